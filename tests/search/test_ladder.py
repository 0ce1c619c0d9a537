"""The ladder: what is known of a candidate before it is made, and which answers candidates share."""

from dataclasses import replace
from typing import Any

import pytest

from slimqwen import checkpoint
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.roofline.architecture import read_model, shape_model
from slimqwen.search.candidate import Candidate
from slimqwen.search.ladder import Ladder


def requests(ladder: Ladder, candidate: Candidate) -> dict[str, Any]:
    return {answer: question.request for answer, question in ladder.questions(candidate).items()}


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


def test_drafts_do_not_decide_the_answer_of_fidelity(ladder: Ladder) -> None:
    first, second = Candidate(mlp="W4A16", depth=2), Candidate(mlp="W4A16", depth=6, mtp="W8A16")
    one, other = requests(ladder, first), requests(ladder, second)
    assert one["fidelity"] == other["fidelity"]
    assert one["acceptance"] != other["acceptance"]
    assert one["fidelity"] != requests(ladder, replace(first, mlp="W8A16"))["fidelity"]


def test_acceptance_is_counted_at_the_candidates_depth_and_at_the_gates(ladder: Ladder) -> None:
    gate_depth = ladder.budget.acceptance.gate_depth
    one, other = (requests(ladder, Candidate(depth=depth)) for depth in (gate_depth - 2, gate_depth))
    assert one["acceptance"][-1] == {"depths": [gate_depth - 2, gate_depth]}
    assert other["acceptance"][-1] == {"depths": [gate_depth]}
    assert one["base_acceptance"] == other["base_acceptance"]
