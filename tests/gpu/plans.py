"""Step a: the plan of every variant for this card against its start, with random weights of the variant's shape."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.plan import rehearsal, shapes, start
from slimqwen.plan.facts import Plan
from slimqwen.plan.record import list_facts
from slimqwen.records import provenance
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.server import RunningServer, run_server
from slimqwen.variant import Variant
from tests.gpu.steps import Here, UnfinishedError, one_line

FIRST = (
    "qwen3.5-4b", "qwen3.5-4b-best", "cyankiwi-seq8-best", "qwen3.5-9b-best", "qwen3.5-9b", "qwen3.8-27b-best",
    "qwen3.8-27b-int4",
)  # fmt: skip
REHEARSED = ("tiny-mtp4",)

_START_S = 45.0
"""A start that has less time than this is left to the next run."""

_AT_A_TIME = 4

_NOT_AS_PLANNED = re.compile(r"Not as planned \([^)]*\): (.+)")


def run(here: Here) -> str:
    """Start one variant after the other, while the plans of the next ones are made."""
    names = list_subjects(here)
    left = [name for name in names if "failure" in here.parts.get(name, {"failure": ""})]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        plans = {name: pool.submit(make_plan, here, name) for name in left}
        for name in left:
            if here.seconds_left < _START_S and here.parts:
                break
            here.part(name, lambda name=name: start_one(here, *plans[name].result()))
        pool.shutdown(wait=False, cancel_futures=True)
    line = describe(here.parts)
    if missing := [name for name in names if name not in here.parts]:
        raise UnfinishedError(f"{line}; to go: {len(missing)}")
    for name, found in here.parts.items():
        assert not found.get("differences"), f"{name} is not as planned; {line}"
        assert found.get("starts") == found.get("planned_to_start"), f"{name}: {found.get('why')}; {line}"
    return line


def list_subjects(here: Here) -> list[str]:
    """The variants to start, the worthiest first: on a GPU every shipped one for GPUs."""
    if here.gpu is None:
        return list(REHEARSED)
    shipped = [
        name
        for name in provenance.shipped_variants(here.root)
        if variants.load(name, here.root).platform == "cuda"
    ]
    return [*FIRST, *(name for name in shipped if name not in FIRST)]


def with_random_weights(name: str, root: Path) -> Variant:
    """A variant with random weights of its shape, which is written into weights/ unless it lies there."""
    subject = variants.load(name, root)
    folder = root / "weights" / f"{variants.SHAPE_PREFIX}{name}"
    config = {**shapes.variant_shape(subject).config_json, checkpoint.RANDOM_WEIGHTS: True}
    # To write one takes the time of a hash of its zeros: 40 s for 27B in 16 bits.
    if not (folder / "config.json").is_file() or checkpoint.read_config(folder) != config:
        shapes.write_variant_shape(subject)
    lines = {"VLLM_MODEL": folder.relative_to(root).as_posix(), "VLLM_LOAD_FORMAT": "dummy"}
    return subject.with_lines(lines)


def make_plan(here: Here, name: str) -> tuple[Variant, Plan]:
    """The variant to start, and its plan on the device of this host."""
    subject = with_random_weights(name, here.root) if here.gpu else variants.load(name, here.root)
    log = here.root / "logs" / f"gpu-check-plan-{name}.log"
    return subject, rehearsal.rehearse_variant(subject, here.gpu, log=log)


def start_one(here: Here, subject: Variant, plan: Plan) -> dict[str, Any]:
    """What a start does beside what its plan says: facts that differ, or why it did not start."""
    command = ServerCommand.resolve(subject, platform="cuda" if here.gpu else "cpu")
    trouble = start.match_start_trouble(plan, command, compiles=start.compiles_here(command)).dies
    expects = plan.error or "; ".join(each.description for each in trouble)
    found: dict[str, Any] = {"planned_to_start": not expects, "plan": list_facts(plan)}
    began, log = time.monotonic(), here.root / "logs" / f"gpu-check-start-{subject.name}.log"
    try:
        with started_as_planned(command, plan, log=log, required=False):
            found |= {"starts": True, **read_comparison(log)}
    except ServingError as error:
        found |= {"starts": False, "why": f"planned: {expects or 'starts'}; {one_line(error, here.root)}"}
    return found | {
        "facts": len(start.expect_facts(plan, required=False).facts),
        "seconds": time.monotonic() - began,
    }


@contextmanager
def started_as_planned(
    command: ServerCommand, plan: Plan, *, log: Path, required: bool
) -> Iterator[RunningServer]:
    """A server that compared itself with its plan when it started.

    Raises:
        ServingError: it did not start, or, if `required`, a fact differs.
    """
    expected = start.expect_facts(plan, required=required)
    with run_server(command.compared_with_plan(expected), log=log) as server:
        yield server


def read_comparison(log: Path) -> dict[str, Any]:
    """The facts in which a started server differs from its plan, a line each, by its log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    differences = _NOT_AS_PLANNED.findall(text)
    assert differences or "As planned (" in text, "the server compared nothing with its plan"
    return {"differences": differences}


def describe(parts: dict[str, Any]) -> str:
    """What was seen, in a line."""
    as_planned = [
        f"{name} ({found['facts']} facts)"
        for name, found in parts.items()
        if found.get("starts") and not found["differences"]
    ]
    other = [
        f"{name}: {'; '.join(found.get('differences') or [found.get('why') or found.get('failure')])}"
        for name, found in parts.items()
        if not found.get("starts") or found["differences"]
    ]
    return "; ".join([f"as planned: {', '.join(as_planned) or 'none'}", *other])
