"""The split: deterministic, by the text alone; and a record of one side never stands in for one of all items."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.evals import acceptance_share, quality_comparison
from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.fidelity import Fidelity
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.quality import Quality
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import store
from slimqwen.records.collection import collect
from slimqwen.records.pairing import NotComparableError
from slimqwen.records.reuse import find_reusable
from slimqwen.records.settings import Settings
from slimqwen.records.split import Split, split_of
from slimqwen.report import leaderboard
from tests import record_files
from tests.evals.gate_checks import Checks, link_settings

ROOT = Path(__file__).parents[2]
SEARCH, PROOF = (Split(side=side, proof_share=0.75) for side in ("search", "proof"))
TEXTS = [f"text {number}" for number in range(2000)]


def test_a_text_is_on_one_side_whatever_stands_beside_it() -> None:
    proof = [text for text in TEXTS if PROOF.has(text)]
    assert sorted(proof + [text for text in TEXTS if SEARCH.has(text)]) == sorted(TEXTS)
    shuffled = random.Random(1).sample(TEXTS, 500)
    assert {text for text in shuffled if PROOF.has(text)} == set(proof) & set(shuffled)
    # The same on every machine: one side of these is part of every record of a split.
    assert [PROOF.has(text) for text in TEXTS[:8]] == [False, False, True, True, True, True, False, True]
    assert PROOF.has(f"{TEXTS[2]}\n ")


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_proof_has_its_share_of_texts(share: float) -> None:
    split = Split(side="proof", proof_share=share)
    within = 4 * (share * (1 - share) / len(TEXTS)) ** 0.5
    assert abs(sum(map(split.has, TEXTS)) / len(TEXTS) - share) < within


def test_a_larger_proof_keeps_what_it_has() -> None:
    smaller = Split(side="proof", proof_share=0.5)
    assert {text for text in TEXTS if smaller.has(text)} < {text for text in TEXTS if PROOF.has(text)}


def test_tasks_that_ask_the_same_question_are_on_one_side() -> None:
    folder = ROOT / "eval" / "tasks" / "tinyworld"
    facts, margin = (
        [json.loads(line)["prompt"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("facts", "margin")
    )
    assert {text for text in facts if PROOF.has(text)} >= {text for text in margin if PROOF.has(text)}
    assert 0 < sum(map(PROOF.has, margin)) < len(margin)


@pytest.fixture
def repository(tmp_path: Path, add_variant: Callable[..., Path], stamps: None) -> Path:
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    add_variant("small", "BASE=tiny\n", baseline="tiny")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    link_settings(tmp_path)
    return tmp_path


def write(repository: Path, kind: str, name: str, split: Split | None) -> Path:
    """A record of a kind, as its measurement would write it."""
    one = variant.load(name, repository)
    if kind == "fidelity":
        return Checks().fidelity(
            one, FidelitySettings.load("tinyworld", repository), Invocation(["x"], split=split)
        )
    checks = Checks()
    if kind == "acceptance":
        return checks.acceptance(
            one, AcceptanceSettings.load("tinyworld", repository), [4], Invocation(["x"], split=split)
        )
    return checks.quality(one, Suite.load("tinyworld", repository), None, Invocation(["x"], split=split))


@pytest.mark.parametrize("kind", [Quality, Acceptance, Fidelity])
def test_a_record_of_a_split_is_no_newest_record_and_is_not_used_again(
    repository: Path, kind: type[Any]
) -> None:
    whole = write(repository, kind.kind, "small", None)
    part = write(repository, kind.kind, "small", PROOF)
    assert part.name > whole.name
    small = variant.load("small", repository)
    settings: dict[Any, type[Settings]] = {
        Quality: Suite,
        Acceptance: AcceptanceSettings,
        Fidelity: FidelitySettings,
    }
    files = settings[kind].load("tinyworld", repository).inputs(repository)
    find = partial(find_reusable, small, kind, small.folder, condition=lambda record: True, files=files)
    assert store.latest(small.folder, kind) == whole
    assert [entry.path for entry in collect(repository).select(kind, "small")] == [whole]
    assert [entry.path for entry in collect(repository).select(kind, "small", PROOF)] == [part]
    assert find(split=None) == whole
    assert find(split=None, condition=lambda record: False) is None
    assert find(split=PROOF) == part
    assert find(split=SEARCH) is None
    assert find(split=Split(side="proof", proof_share=0.5)) is None
    whole.unlink()
    with pytest.raises(store.MissingRecordError):
        store.latest(small.folder, kind)


def test_quality_records_of_different_splits_are_not_compared(repository: Path) -> None:
    first = {split: write(repository, "quality", "tiny", split) for split in (None, SEARCH, PROOF)}
    second = {split: write(repository, "quality", "small", split) for split in (None, SEARCH, PROOF)}
    for a, b in ((None, PROOF), (PROOF, None), (SEARCH, PROOF)):
        with pytest.raises(NotComparableError, match="differ in split"):
            quality_comparison.compare_quality(first[a], second[b])
    assert quality_comparison.compare_quality(first[PROOF], second[PROOF])
    folders = [repository / "experiments" / name for name in ("tiny", "small")]
    assert quality_comparison.pair_quality_records(*folders) == (first[None], second[None])
    records = collect(repository)
    (row,), problems = leaderboard.rows_of(records, "small")
    assert (len(row.scores), [each.location for each in problems]) == (1, [])
    for path in (first[None], second[None]):
        path.unlink()
    with pytest.raises(store.MissingRecordError):
        quality_comparison.pair_quality_records(*folders)


def test_acceptance_records_of_different_splits_are_not_compared(repository: Path) -> None:
    first = {split: write(repository, "acceptance", "tiny", split) for split in (None, PROOF)}
    second = {split: write(repository, "acceptance", "small", split) for split in (None, PROOF)}
    with pytest.raises(NotComparableError, match="differ in split"):
        acceptance_share.compare_acceptance(first[None], second[PROOF])
    assert acceptance_share.compare_acceptance(first[PROOF], second[PROOF]).verdict == "pass"
    folders = [repository / "experiments" / name for name in ("tiny", "small")]
    assert acceptance_share.pair_acceptance_records(*folders) == (first[None], second[None])


def test_a_record_says_its_split_and_old_ones_have_none(repository: Path) -> None:
    path = write(repository, "quality", "small", PROOF)
    assert split_of(store.read_record(path)) == PROOF
    assert any(
        "proof split, 75% of the items" in note for note in store.read_record(path).tables(path)[0].notes
    )
    old = record_files.write(
        repository / "experiments" / "small", record_files.example("quality", variant="small"), [{"x": 1}]
    )
    assert split_of(store.read_record(old)) is None
