"""The ladder: what is known of a candidate before it is made, and which tasks candidates share."""

from dataclasses import replace
from pathlib import Path

import pytest

from slimqwen import checkpoint
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.fit.architecture import read_model, shape_model
from slimqwen.search.candidate import Candidate
from slimqwen.search.ladder import Ladder


def test_the_base_is_predicted_as_it_is(ladder: Ladder) -> None:
    predicted = shape_model(ladder.shape(Candidate()))
    stored = read_model(list_tensors(ladder.base.weights), checkpoint.read_config(ladder.base.weights))
    assert predicted == replace(stored, body=predicted.body, drafter=predicted.drafter, head=predicted.head)
    for part in ("body", "drafter", "head"):
        assert getattr(predicted, part).bytes == getattr(stored, part).bytes
        assert getattr(predicted, part).flops == getattr(stored, part).flops


def test_fewer_bytes_are_faster_and_smaller(ladder: Ladder) -> None:
    plain, packed = Candidate(depth=4), Candidate(depth=4, mlp="W4A16", mtp="W4A16", draft_vocabulary=0.25)
    assert ladder.tokens_per_second(packed, 4.0) > ladder.tokens_per_second(plain, 4.0)
    assert ladder.checkpoint_bytes(Candidate(mlp="W4A16")) < ladder.checkpoint_bytes(Candidate())


def test_a_first_bound_has_the_slack_but_never_more_tokens_than_are_drafted(ladder: Ladder) -> None:
    candidate = Candidate(depth=2)
    bound = ladder.best_tokens_per_second(candidate, [0.6, 0.4, 0.3])
    assert bound == pytest.approx(ladder.tokens_per_second(candidate, 2.1))
    assert ladder.best_tokens_per_second(candidate, [1.0, 0.99]) == pytest.approx(
        ladder.tokens_per_second(candidate, 3.0)
    )


def test_candidates_of_one_target_share_its_fidelity_and_no_acceptance(ladder: Ladder) -> None:
    first, second = Candidate(mlp="W4A16", depth=2), Candidate(mlp="W4A16", depth=6, mtp="W8A16")
    keys = [ladder.fidelity_task(each).key for each in (first, second, replace(first, mlp="W8A16"))]
    assert keys[0] == keys[1] != keys[2]
    tasks = [ladder.acceptance_task(ladder.in_overlay(each), each.depth) for each in (first, second)]
    assert tasks[0].key != tasks[1].key
    assert ladder.fidelity_task(first).argument.depths == ()


def test_acceptance_is_measured_at_the_candidates_depth_and_at_the_gates(ladder: Ladder) -> None:
    gate_depth = ladder.budget.acceptance.gate_depth
    candidate = ladder.in_overlay(Candidate(depth=gate_depth))
    depths = [
        ladder.acceptance_task(candidate, depth).argument.depths for depth in (gate_depth - 2, gate_depth)
    ]
    assert depths == [(gate_depth - 2, gate_depth), (gate_depth,)]
    assert ladder.deepest == 6


def test_what_decides_a_rung_decides_its_key(ladder: Ladder, small_root: Path) -> None:
    candidate = Candidate(mlp="W4A16")
    key = ladder.fidelity_task(candidate).key
    other = small_root / "eval" / "texts" / "other.jsonl"
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text('{"text": "other"}\n')
    other_texts = ladder.budget.fidelity.model_copy(update={"texts": "eval/texts/other.jsonl"})
    changed = replace(ladder, budget=replace(ladder.budget, fidelity=other_texts))
    assert changed.fidelity_task(candidate).key != key
    assert replace(ladder, budget=replace(ladder.budget, split=None)).fidelity_task(candidate).key != key
    # The size of the proof's sample decides nothing here.
    variant, acceptance = ladder.in_overlay(candidate), ladder.budget.acceptance
    proof = acceptance.model_copy(update={"proof_prompts": 2 * acceptance.prompts})
    same = replace(ladder, budget=replace(ladder.budget, acceptance=proof))
    assert same.acceptance_task(variant, 2).key == ladder.acceptance_task(variant, 2).key
