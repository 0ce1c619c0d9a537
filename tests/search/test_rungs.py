"""The rungs on the real engine: what a candidate's checkpoint is, what is measured of it, and figures that are none."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from slimqwen import checkpoint, host, variant
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.evals import token_distributions
from slimqwen.evals.acceptance import summarise_items
from slimqwen.evals.fidelity_figures import PLAIN, TextComparison
from slimqwen.fit.architecture import read_model, shape_model
from slimqwen.processes import Failure, LocalExecutor, Result
from slimqwen.progress import silent
from slimqwen.records.record import Estimate, Ratio
from slimqwen.search.candidate import Candidate
from slimqwen.search.ladder import Ladder
from slimqwen.search.record import SearchTrial
from slimqwen.search.rungs import Budget, LimitShares
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


def measured(ladder: Ladder, candidate: Candidate) -> dict[str, Result | Failure]:
    base = variant.load(ladder.base.name, ladder.overlay)
    tasks = {
        "fidelity": ladder.fidelity_task(candidate),
        "acceptance": ladder.acceptance_task(ladder.in_overlay(candidate), candidate.depth),
        "base": ladder.acceptance_task(base, ladder.deepest),
    }
    outcomes = {}
    with LocalExecutor(ladder.base.root, warm=True) as executor:
        for rung, task in tasks.items():
            executor.submit(task)
            outcomes[rung] = executor.wait()
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


def estimate(value: float, standard_error: float) -> dict[str, float]:
    return {"value": value, "standard_error": standard_error, "count": 30}


def test_the_figure_nearest_to_its_limit_and_the_surest_excess_are_told_apart(ladder: Ladder) -> None:
    limits = ladder.budget.fidelity.limits
    fields = {name: estimate(0.1 * limit, 0.0) for name, limit in limits}
    fields["regret_nats"] = estimate(2.0 * limits.regret_nats, limits.regret_nats)
    fields["bits_per_byte"] = estimate(1.5 * limits.bits_per_byte, 0.1 * limits.bits_per_byte)
    counts = dict.fromkeys(("texts", "texts_compared", "positions_compared", "joined_tokens"), 9)
    figures = {**fields, **counts, "head_delta_max": None, "baseline_bits_per_byte": 1.0}
    shares = LimitShares.of_figures({**figures, "joined_kl_nats": None}, ladder.budget)
    assert (shares.worst, shares.share) == ("regret_nats", pytest.approx(2.0))
    assert 1.2 < shares.lower_share < 1.4  # of bits_per_byte
    assert shares.kl_nats == Estimate(**fields["kl_nats"])
    joined = LimitShares.of_figures({**figures, "joined_kl_nats": 3 * limits.kl_nats}, ladder.budget)
    assert joined.worst == "joined_kl_nats"
    assert joined.share == joined.lower_share == pytest.approx(3.0)


@pytest.mark.engine
def test_a_candidate_is_made_compared_and_counted(small_ladder: Ladder) -> None:
    candidate = Candidate(head_bits=4, depth=2)
    name = small_ladder.in_overlay(candidate).name
    values = {}
    for rung, outcome in measured(small_ladder, candidate).items():
        assert isinstance(outcome, Result), outcome
        values[rung] = outcome.value
    made = variant.load(name, small_ladder.overlay).weights
    predicted = shape_model(small_ladder.shape(candidate))
    stored = read_model(list_tensors(made), checkpoint.read_config(made))
    for part in ("body", "head", "drafter"):
        assert getattr(predicted, part).bytes == getattr(stored, part).bytes
    shares = LimitShares.of_figures(values["fidelity"], small_ladder.budget)
    assert shares.kl_nats is not None
    assert 0 < shares.kl_nats.value < 0.01  # a packed head moves distributions, a little
    assert 0 < values["fidelity"]["texts"] < TEXTS  # those of the search's side alone
    gate_depth = small_ladder.budget.acceptance.gate_depth
    for side, depths in {"acceptance": [2, gate_depth], "base": [gate_depth, 6]}.items():
        rows = summarise_items(values[side])
        assert [row.depth for row in rows] == depths
        for row in rows:
            assert row.length is not None
            assert 1 < row.length.value <= row.depth + 1


def test_an_engine_with_the_candidate_s_own_cache_that_gives_no_numbers_is_an_error(
    small_ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*_: Any, flags: dict[str, Any], **__: Any) -> list[TextComparison]:
        assert flags["kv-cache-dtype"] == "fp8_ds_mla"
        return [
            TextComparison(str(number), PLAIN, bytes=9, compared=9, kl_nats=math.nan) for number in range(2)
        ]

    monkeypatch.setattr(host, "has_avx512", lambda: True)  # without it an FP8 cache is left out
    monkeypatch.setattr(token_distributions, "compare_in_process", compare)
    task = small_ladder.fidelity_task(Candidate(kv_cache_dtype="fp8_ds_mla", depth=1))
    with pytest.raises(ValidationError, match="finite number"):
        task.function(small_ladder.base.root, task.argument, silent)
