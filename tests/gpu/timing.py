"""Step b: timing in turns, one and eight requests at a time: TTFT, TPOT, share of the memory's limit.

On a GPU the weights are random, of each variant's shape, and drafts are accepted at the length that is published for
the family. All servers of a group stay up and take turns: there is no time to start them anew for every round, so
the intervals do not hold what one start differs from another by.
"""

import importlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.bench.latency.record import ClassFigures, Latency
from slimqwen.bench.latency.rounds import measure_latency
from slimqwen.bench.latency.speedups import compare_latency
from slimqwen.bench.workload import Workload
from slimqwen.checkpoint import read_config
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.fit.architecture import read_model
from slimqwen.fit.cost import bound_decode_step
from slimqwen.models.families import find_family
from slimqwen.plan.devices import Gpu
from slimqwen.records import store
from slimqwen.serving import flags as vllm_flags
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import run_server
from slimqwen.variant import Variant
from tests.gpu.plans import with_random_weights
from tests.gpu.steps import Here, UnfinishedError

GROUPS = (
    ("qwen3.5-4b", "qwen3.5-4b-best", "cyankiwi-seq8-best"),
    ("qwen3.5-9b", "qwen3.5-9b-best"),
    ("qwen3.8-27b-int4", "qwen3.8-27b-best"),
)
"""Baselines first, each with the variants that are timed in turns with it."""

REHEARSED = (("tiny", "tiny-mtp4"),)

_SEQUENCES = 8
_FIRST_PORT = 18080  # the same in a second run
_GROUP_S = 60.0
_KV_CACHE_BYTES = 6 * 2**30


def run(here: Here) -> str:
    """Time each group as far as the time reaches; a second run goes on, within a group too."""
    groups = GROUPS if here.gpu else REHEARSED
    for names in groups:
        if here.seconds_left < _GROUP_S and here.parts:
            break
        here.part(" / ".join(names), lambda names=names: time_group(here, names))
    line = "; ".join(found["line"] for found in here.parts.values() if "line" in found)
    if len(here.parts) < len(groups):
        raise UnfinishedError(f"{line}; to go: {len(groups) - len(here.parts)} groups")
    return line


def time_group(here: Here, names: Sequence[str]) -> dict[str, Any]:
    """Start the servers of a group at once, time them in turns, and compare each with the first."""
    sides = [subject(here, name, number, len(names)) for number, name in enumerate(names)]
    workload = Workload.load("turns", here.root)
    if here.gpu is None:
        # A round of a card's load would not end in the half of a rehearsal that the start of the servers leaves.
        parts = {"prompt_tokens": 4, "output_tokens": 4, "requests": 2}
        classes = [
            each.model_copy(update={name: getattr(each, name) // part for name, part in parts.items()})
            for each in workload.classes
        ]
        workload = workload.model_copy(update={"rounds": 2, "classes": classes})
    folders = [here.records / name for name in names]
    with ExitStack() as stack:
        start_all(sides, here.root / "logs", stack)
        paths = measure_latency(
            sides,
            workload,
            command=["make", "gpu-check"],
            records_folders=folders,
            even_if_busy=here.gpu is None,
        )
    figures = {
        side.name: summarise(side, store.read_record(path, Latency), here.gpu)
        for side, path in zip(sides, paths, strict=True)
    }
    # The host of a rehearsal may be busy; such records are compared with nothing.
    is_quiet = not any(store.read_record(path, Latency).provenance.host_was_busy for path in paths)
    speedups = {
        f"{side.name}, {ratio.prompt_class}, {ratio.measure}": ratio.ratio
        for side, path in zip(sides[1:], paths[1:], strict=True)
        for ratio in (compare_latency(paths[0], path) if is_quiet else ())
        if ratio.measure in ("ttft_ms", "tpot_ms")
    }
    lines = [f"{name} {describe(each)}" for name, each in figures.items()]
    ratios = [f"{key} {ratio}" for key, ratio in speedups.items() if "tpot_ms" in key]
    line = "; ".join([*lines, *(ratios or ["the host was busy: nothing is compared"])])
    return {"line": line, "figures": figures, "speedups": speedups, "records": [path.name for path in paths]}


def subject(here: Here, name: str, number: int, of: int) -> Variant:
    """A variant as it is timed beside others: its share of the memory, a port of its own, random weights on a GPU."""
    port = {"VLLM_PORT": str(_FIRST_PORT + number)}
    if here.gpu is None:
        return variants.load(name, here.root).with_lines({**port, "VLLM_MAX_NUM_SEQS": str(_SEQUENCES)})
    shaped = with_random_weights(name, here.root)
    lines = {
        **port,
        # Servers that start at once would take one another's allocations for their own in vLLM's memory profile.
        "VLLM_GPU_MEMORY_UTILIZATION": f"{0.9 / of:.2f}",
        "VLLM_KV_CACHE_MEMORY_BYTES": str(_KV_CACHE_BYTES),
        "VLLM_MAX_NUM_SEQS": shaped.settings["VLLM_MAX_NUM_SEQS"].value
        if "VLLM_MAX_NUM_SEQS" in shaped.settings
        else str(_SEQUENCES),
    }
    setting = shaped.settings.get("VLLM_SPECULATIVE_CONFIG")
    if setting is not None:
        speculation = vllm_flags.parse(setting).value
        length = published_length(shaped, speculation["num_speculative_tokens"])
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
        lines["VLLM_SPECULATIVE_CONFIG"] = json.dumps(speculation | synthetic)
    return shaped.with_lines(lines)


def published_length(shaped: Variant, depth: int) -> float:
    """The acceptance length at K = `depth` that is published for the family, or that of the deepest known K."""
    lengths = find_family(read_config(shaped.weights)).acceptance_lengths
    return lengths[min(depth, max(lengths))]


def start_all(sides: Sequence[Variant], logs: Path, stack: ExitStack) -> None:
    """Start the servers of all sides at once; they end with the stack.

    No fork of a process that has imported vLLM is found again as a running server, so these are none.
    """
    commands = [ServerCommand.resolve(side) for side in sides]

    def start(command: ServerCommand) -> None:
        stack.enter_context(run_server(command, log=logs / f"gpu-check-{command.variant.name}.log"))

    with ThreadPoolExecutor(len(sides)) as pool:
        starts = [pool.submit(start, command) for command in commands]
        importlib.import_module("vllm.benchmarks.serve")  # the client's, which takes as long as a start
        for each in starts:
            each.result()


def summarise(side: Variant, record: Latency, gpu: Gpu | None) -> dict[str, Any]:
    """Figures of each class: TTFT and TPOT in ms, tokens a second, acceptance length, share of the memory's limit."""
    return {
        name: {
            "ttft_ms": figures.ttft_ms.median,
            "tpot_ms": figures.tpot_ms.median,
            "tokens_per_second": figures.output_throughput_tokens_per_s,
            "acceptance_length": figures.acceptance.length if figures.acceptance else None,
            "share_of_memory_limit": share_of_limit(side, figures, gpu) if gpu else None,
        }
        for name, figures in record.classes.items()
    }


def share_of_limit(side: Variant, figures: ClassFigures, gpu: Gpu) -> float:
    """Time in which the memory could move the bytes of a decode step, over the step's time by the median TPOT."""
    flags = ServerCommand.resolve(side).flags
    dtypes = {
        "kv_cache_dtype": str(flags.get("kv-cache-dtype", "auto")),
        "state_dtype": str(flags.get("mamba-ssm-cache-dtype", "auto")),
    }
    model = read_model(list_tensors(side.weights), read_config(side.weights), **dtypes)
    depth = (flags.get("speculative-config") or {}).get("num_speculative_tokens", 0)
    length = figures.acceptance.length if figures.acceptance else 1.0
    context = figures.prompt_tokens + figures.output_tokens // 2
    step = bound_decode_step(model, gpu, figures.concurrency or 1, context, depth)
    return step.bytes / gpu.bandwidth / (figures.tpot_ms.median * 1e-3 * length)


def describe(figures: dict[str, Any]) -> str:
    """The figures of a side in a few words."""
    shown = []
    for name, each in figures.items():
        share = each["share_of_memory_limit"]
        limit = f", {share:.0%} of the memory's limit" if share is not None else ""
        shown.append(f"{name}: TTFT {each['ttft_ms']:.0f} ms, TPOT {each['tpot_ms']:.2f} ms{limit}")
    return "; ".join(shown)
