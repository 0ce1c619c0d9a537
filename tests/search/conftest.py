"""A repository in small, whose checks are stand-ins."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen.checkpoint.files import carry_all
from slimqwen.evals import quality
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.quality import Quality
from slimqwen.evals.suites.scored import Item, TaskRun
from slimqwen.evals.suites.suite import Limit, Suite
from slimqwen.records import store
from slimqwen.variant import Variant
from tests.evals.gate_checks import Checks, link_settings

ROOT = Path(__file__).parents[2]
QUESTIONS = 1200


def question(number: int) -> str:
    """Text of a question, by which it is on one side of the split."""
    return f"question {number}"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, stamps: None) -> Checks:
    """The four measurements as stand-ins; `wrong` says which questions a variant gets wrong on a side."""
    made = Checks()
    made.install(monkeypatch)

    def measure(one: Variant, suite: Suite, limit: Limit, invocation: Invocation) -> Path:
        made.asked.append(("quality", one.name))
        split = invocation.split
        chosen = [n for n in range(QUESTIONS) if split is None or split.has(question(n))]
        wrong = made.wrong.get((one.name, split.side if split else None), 0)
        # The first `wrong` of what the baseline gets right; a negative number gets others right.
        right = {n for n in chosen if n % 2}
        for n in [n for n in chosen if n % 2 == (wrong > 0)][: abs(wrong)]:
            right ^= {n}
        task = suite.tasks[0]
        name = task.name
        items = [Item(name, n, f"{n:016x}", float(n in right), 1.0, None, None) for n in chosen]
        record = Quality(
            variant=one.name,
            suite=suite.name,
            limit=limit,
            split=split,
            tasks={name: quality.score_task(TaskRun(task, items, QUESTIONS, suite.settings_of(task)))},
            provenance=made.described(one, suite),
        )
        return store.write_record(invocation.records_of(one), record, map(vars, items))

    monkeypatch.setattr(quality, "measure_quality", measure)
    return made


@pytest.fixture
def root(tmp_path: Path, add_variant: Callable[..., Path]) -> Path:
    """A repository with tiny and its variants small, lucky and third, each with weights of its own."""
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\nEVALUATION=tinyworld\n")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    for name in ("small", "lucky", "third"):
        add_variant(name, f"BASE=tiny\nVLLM_MODEL=weights/{name}\n", baseline="tiny")
        (tmp_path / "weights" / name).mkdir()
        carry_all(ROOT / "weights" / "tiny", tmp_path / "weights" / name)
    link_settings(tmp_path)
    return tmp_path
