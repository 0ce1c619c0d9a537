"""The proof of finalists: what it promotes, what it does not and why; the traps that it is made for."""

import shutil
from pathlib import Path

import pytest

from slimqwen.evals.gate import Gate
from slimqwen.evals.quality import Quality
from slimqwen.processes import LocalExecutor
from slimqwen.records import store
from slimqwen.records.record import Finding
from slimqwen.records.split import split_of
from slimqwen.search import SearchError, measurements
from slimqwen.search.proof import Proof, prove_finalists
from slimqwen.stats.sequential import ALPHA
from tests.evals.gate_checks import Checks
from tests.processes.tasks import crash
from tests.search.conftest import QUESTIONS, question
from tests.search.in_process import InProcess

COMMAND = ("slimqwen", "search")


def proof_of(names: list[str], root: Path, executor: InProcess | None = None) -> Proof:
    return prove_finalists(names, executor or InProcess(root), root, command=COMMAND)


def promoted(proof: Proof) -> list[str]:
    return [each.variant for each in proof.finalists if each.passed]


def gain(findings: tuple[Finding, ...]) -> float:
    """The estimate of the one task."""
    (finding,) = (each for each in findings if each.gate == "quality")
    assert finding.value is not None
    return finding.value


def test_what_is_best_on_the_search_s_items_alone_is_not_promoted(root: Path, checks: Checks) -> None:
    """The winner's curse, planted: better than every other where the search looks, damaged where it does not."""
    checks.wrong = {("lucky", "search"): -40, ("lucky", "proof"): 120, ("small", "proof"): 2}
    proof = proof_of(["lucky", "small", "third"], root)
    lucky, small, third = proof.finalists
    assert gain(lucky.findings) < -0.04 < gain(small.findings) < 0
    assert promoted(proof) == ["small", "third"]
    assert (lucky.verdict, lucky.adjusted_p_value) == ("fail", lucky.p_value)
    assert lucky.p_value > 0.5
    assert lucky.reason == "quality: tinyworld_facts: gain of exact_match fail"
    assert (small.reason, third.reason) == (None, None)
    assert third.p_value <= small.p_value <= small.adjusted_p_value <= ALPHA


def test_an_engine_that_crashes_is_not_promoted_and_says_why(root: Path, checks: Checks) -> None:
    executor = InProcess(root)
    executor.broken = "engine of lucky"
    proof = proof_of(["lucky", "small"], root, executor)
    lucky, small = proof.finalists
    assert (lucky.verdict, lucky.reason) == ("fail", "its process died (SIGSEGV)")
    assert (lucky.p_value, lucky.findings, lucky.record) == (1.0, (), None)
    assert promoted(proof) == ["small"]
    # It was a finalist: the family does not shrink because one of it died.
    assert small.adjusted_p_value == pytest.approx(2 * small.p_value)


def test_a_process_that_really_dies_ends_the_finalist_and_not_the_proof(
    root: Path, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "measure_check", crash)
    proof = prove_finalists(["lucky"], LocalExecutor(root), root, command=COMMAND)
    (lucky,) = proof.finalists
    assert promoted(proof) == []
    assert lucky.reason is not None
    assert "its process died" in lucky.reason
    assert (proof.proof_share, list(root.glob("experiments/*/gate_*"))) == (None, [])


def test_more_finalists_need_stronger_evidence(root: Path, checks: Checks) -> None:
    """One that passes alone does not pass as one of three when the other two cannot be promoted."""
    checks.wrong = {("small", "proof"): 19, ("lucky", "proof"): 200, ("third", "proof"): 200}
    (alone,) = proof_of(["small"], root).finalists
    assert (alone.verdict, alone.adjusted_p_value) == ("pass", alone.p_value)
    assert ALPHA / 3 < alone.p_value <= ALPHA
    among = proof_of(["small", "lucky", "third"], root).finalists[0]
    assert (among.p_value, among.verdict) == (alone.p_value, "inconclusive")
    assert among.adjusted_p_value == pytest.approx(3 * alone.p_value)
    assert among.reason == f"adjusted p-value {among.adjusted_p_value:.3g} above 0.025"
    assert {each.verdict for each in among.findings} == {"pass"}


def test_a_proof_rests_on_all_items_of_its_side_and_on_no_others(root: Path, checks: Checks) -> None:
    proof = proof_of(["small"], root)
    (small,) = proof.finalists
    assert proof.proof_share == 0.75
    record = store.read_record(root / "experiments" / str(small.record), Gate)
    split = split_of(record)
    assert split is not None
    assert split.side == "proof"
    evidence = record.evidence(root / "experiments")
    assert {
        split_of(store.read_record(path)) for path in evidence if not path.name.startswith("engine_")
    } == {split}
    (path,) = (each for each in evidence if each.parent.name == "small" and each.name.startswith("quality_"))
    assert store.read_record(path, Quality).limit is None
    items = {item["item"] for item in store.read_items(path)}
    assert len(items) == sum(split.has(question(number)) for number in range(QUESTIONS))


def test_a_proof_that_is_made_again_measures_nothing(root: Path, checks: Checks) -> None:
    first = proof_of(["small", "third"], root)
    checks.asked.clear()
    again = proof_of(["third", "small", "third"], root)
    assert checks.asked == []
    assert [each.variant for each in again.finalists] == ["third", "small"]
    assert again.finalists[1].findings == first.finalists[0].findings


def test_the_baseline_of_several_finalists_is_measured_once(root: Path, checks: Checks) -> None:
    executor = InProcess(root)
    proof_of(["small", "third"], root, executor)
    assert [task.title for task in executor.ran] == [
        "fidelity of small", "acceptance of tiny", "acceptance of small",
        "quality of tiny", "quality of small", "engine of small",
        "fidelity of third", "acceptance of third", "quality of third", "engine of third",
        "gate of small", "gate of third",
    ]  # fmt: skip
    assert len(checks.asked) == 10


def test_finalists_that_cannot_be_proven_are_refused_or_say_why(root: Path, checks: Checks) -> None:
    with pytest.raises(SearchError, match="no finalist"):
        proof_of([], root)
    with pytest.raises(SearchError, match="tiny has no baseline"):
        proof_of(["small", "tiny"], root)
    shutil.rmtree(root / "weights" / "third")
    third, small = proof_of(["third", "small"], root).finalists
    assert (third.verdict, third.p_value, small.verdict) == ("fail", 1.0, "pass")
    assert third.reason is not None
    assert "weights/third" in third.reason
