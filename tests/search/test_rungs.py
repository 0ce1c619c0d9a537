"""The rungs on the real engine: what a candidate's checkpoint is, what is measured of it, and one that crashes."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.evals.acceptance import summarise_items
from slimqwen.records.record import Estimate, Ratio
from slimqwen.roofline.architecture import read_model, shape_model
from slimqwen.search.candidate import Candidate
from slimqwen.search.executors import Failure, LocalExecutor, Result
from slimqwen.search.ladder import Ladder
from slimqwen.search.record import SearchTrial
from slimqwen.search.rungs import Budget, Shares
from tests.search.trials import trial

TEXTS = 12


@pytest.fixture
def small_ladder(ladder: Ladder, small_root: Path) -> Ladder:
    """A ladder with a few texts and prompts."""
    gates = small_root / "eval" / "gates"
    settings = yaml.safe_load((gates / "tinyworld.yaml").read_text())
    gates.unlink()
    gates.mkdir()
    lines = (small_root / settings["fidelity"]["texts"]).read_text().splitlines()[:TEXTS]
    (small_root / "texts.jsonl").write_text("\n".join(lines))
    settings["fidelity"]["texts"] = str(small_root / "texts.jsonl")
    settings["acceptance"] |= {"prompts": 2, "groups": 2, "tokens": 16, "classes": {"short": 16}}
    (gates / "tinyworld.yaml").write_text(json.dumps(settings))
    return dataclasses.replace(ladder, budget=Budget.of_variant(ladder.base, "tinyworld"))


def measured(ladder: Ladder, candidate: Candidate, *answers: str) -> dict[str, Result | Failure]:
    questions, outcomes = ladder.questions(candidate), {}
    with LocalExecutor(ladder.base.root, warm=True) as executor:
        for answer in answers or questions:
            executor.submit(questions[answer].task)
            outcomes[answer] = executor.wait()
    return outcomes


def share(value: float, standard_error: float) -> SearchTrial:
    """A trial that passed, with this share of the base's acceptance length."""
    half = 1.96 * standard_error
    ratio = Ratio(value=value, low=value - half, high=value + half)
    return trial(0, worst_share=0.5, acceptance_share=ratio)


def test_a_finalist_keeps_every_limit_with_its_whole_interval(ladder: Ladder) -> None:
    budget, error = ladder.budget, 0.005
    least = budget.acceptance.least_share
    assert budget.is_met_by(share(least + 1.97 * error, error))
    assert not budget.is_met_by(share(least + 1.95 * error, error))
    within = share(least + 3 * error, error)
    assert not budget.is_met_by(within.model_copy(update={"worst_share": 1.01}))
    assert not budget.is_met_by(within.model_copy(update={"reason": "its process died (SIGSEGV)"}))
    most = budget.fidelity.limits.kl_nats
    wide = Estimate(value=0.9 * most, standard_error=0.1 * most, count=30)
    assert not budget.is_met_by(within.model_copy(update={"kl_nats": wide}))


@pytest.mark.engine
def test_a_candidate_is_made_compared_and_counted(small_ladder: Ladder) -> None:
    candidate = Candidate(head_bits=4, depth=2)
    name = small_ladder.in_overlay(candidate).name
    answers = {}
    for answer, outcome in measured(small_ladder, candidate).items():
        assert isinstance(outcome, Result), outcome
        answers[answer] = outcome.value
    made = variant.load(name, small_ladder.overlay).weights
    predicted = shape_model(small_ladder.shape(candidate))
    stored = read_model(list_tensors(made), checkpoint.read_config(made))
    for part in ("body", "head", "drafter"):
        assert getattr(predicted, part).bytes == getattr(stored, part).bytes
    shares = Shares.from_answer(answers["fidelity"], small_ladder.budget)
    assert shares.kl_nats is not None
    assert 0 < shares.kl_nats.value < 0.01  # a packed head moves distributions, a little
    assert 0 < answers["fidelity"]["figures"]["texts"] < TEXTS  # those of the search's side alone
    gate_depth = small_ladder.budget.acceptance.gate_depth
    for side, depths in {"acceptance": [2, gate_depth], "base_acceptance": [gate_depth]}.items():
        rows = summarise_items(answers[side])
        assert [row.depth for row in rows] == depths
        for row in rows:
            assert row.length is not None
            assert 1 < row.length.value <= row.depth + 1


@pytest.mark.engine
def test_a_candidate_whose_engine_gives_no_numbers_is_a_failure_with_its_reason(small_ladder: Ladder) -> None:
    # A cache layout of another architecture: vLLM takes the flag and computes NaN.
    candidate = Candidate(kv_cache_dtype="fp8_ds_mla", depth=1)
    outcome = measured(small_ladder, candidate, "fidelity")["fidelity"]
    assert isinstance(outcome, Failure)
    assert "finite number" in outcome.reason
