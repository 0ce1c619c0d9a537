"""The driver of a search: which variants it makes of what was found, and the record that it writes."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from slimqwen.search.rungs import Budget
from slimqwen.search.space import SearchSettings
from tests.search.recorded_rungs import RecordedRungs

from slimqwen import variant
from slimqwen.records import store
from slimqwen.records.record import Verdict
from slimqwen.search import driver
from slimqwen.search.driver import Extent
from slimqwen.search.proof import Finalist, Proof
from slimqwen.search.record import Search


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The finalists of every proof; each passes."""
    families: list[Sequence[str]] = []

    def prove(names: Sequence[str], *_: Any, **__: Any) -> Proof:
        families.append(names)
        passed = {"verdict": Verdict.PASS, "reason": None, "p_value": 0.001, "adjusted_p_value": 0.002}
        finalists = tuple(Finalist(variant=name, findings=(), record=None, **passed) for name in names)
        return Proof(alpha=0.025, proof_share=0.5, finalists=finalists)

    monkeypatch.setattr(driver, "prove_finalists", prove)
    return families


def run(root: Path, name: str = "tinyworld", trials: int = 24, finalists: int = 2, **changes: Any) -> Search:
    settings = SearchSettings.load(name, root).model_copy(update=changes)
    base, command = variant.load("tiny", root), ["slimqwen", "search", "--base", "tiny", "--gpu", "a10g"]
    path = driver.search_variants(
        base, "a10g", "tinyworld", settings, RecordedRungs(root), Extent(trials, finalists), command=command
    )
    assert path.parent == root / "experiments" / "tiny"
    record = store.read_record(path, Search)
    path.unlink()  # a second run may end within the same second
    return record


def test_the_record_has_the_digest_of_the_settings_that_were_read(small_root: Path) -> None:
    own = small_root / "eval" / "search" / "mine.yaml"
    own.write_text((small_root / "eval" / "search" / "tinyworld.yaml").read_text() + "# mine\n")
    record = run(small_root, "mine", trials=2, finalists=0)
    assert record.provenance.datasets["eval/search/mine.yaml"] == hashlib.sha256(own.read_bytes()).hexdigest()
    assert "eval/search/tinyworld.yaml" not in record.provenance.datasets
    assert record.proof is None


def test_the_fastest_of_the_front_become_variants_and_are_proven(small_root: Path, proven: list[Any]) -> None:
    record = run(small_root)
    budget = Budget.of_variant(variant.load("tiny", small_root), "tinyworld")
    within = [trial for trial in record.faster if budget.is_met_by(trial)]
    assert proven == [[trial.name for trial in within[:2]]]
    for name, trial in zip(proven[0], within, strict=False):
        made = variant.load(name, small_root)
        assert made.baseline == "tiny"
        assert made.recipe is not None
        assert trial.label in made.hypothesis
    assert record.advice.startswith(f"Serve {within[0].name}: it passed")
    assert len(record.trials) == 24


def test_a_second_run_measures_nothing_and_proves_the_same_variants(
    small_root: Path, proven: list[Any]
) -> None:
    first, second = run(small_root), run(small_root)
    assert proven[0] == proven[1]
    assert second.trials == first.trials
    assert len(list((small_root / "experiments").glob("tiny-search-*"))) == 2


def test_no_variant_is_made_where_nothing_is_faster(small_root: Path, proven: list[Any]) -> None:
    incumbent = {"mlp": "W4A16", "vocabulary": 0.96875, "depth": 4}
    only = {name: (value,) for name, value in incumbent.items()}
    still = {
        "attention": ("none",), "linear_attention": ("none",), "mtp": ("none",), "head_bits": (16,),
        "group_size": (32,), "draft_vocabulary": (1.0,),
    }  # fmt: skip
    record = run(small_root, choices={**only, **still}, points=())
    assert {trial.rung for trial in record.trials} == {"speed"}
    assert record.proof is None
    assert proven == []
    assert record.advice.startswith("Serve tiny-classic: of ")
