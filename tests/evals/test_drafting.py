"""Prompts and settings of measured drafts; the counting itself is tested in the engine by `test_acceptance`."""

from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.evals import EvalError, drafting
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.records.split import Split

ROOT = Path(__file__).parents[2]
SIDES = {side: Split(side=side, proof_share=0.75) for side in ("search", "proof")}
SETTINGS = AcceptanceSettings.load("tinyworld", ROOT).model_copy(
    update={"groups": 2, "prompts": 4, "proof_prompts": None, "classes": {"short": 8, "long": 32}}
)


def test_both_sides_of_the_split_have_as_many_prompts_of_other_documents() -> None:
    tiny = variant.load("tiny", ROOT)
    sides = {name: drafting.cut_prompts(SETTINGS, tiny, tiny, 64, split) for name, split in SIDES.items()}
    assert {side: {name: len(cut) for name, cut in cuts.items()} for side, cuts in sides.items()} == {
        side: {"short": 4, "long": 4} for side in sides
    }
    search, proof = ({tuple(ids[:8]) for cut in cuts.values() for ids in cut} for cuts in sides.values())
    assert search.isdisjoint(proof)


def test_a_context_that_holds_no_prompt_is_told() -> None:
    tiny = variant.load("tiny", ROOT)
    with pytest.raises(EvalError, match="the context of tiny is too short for a prompt, "):
        drafting.cut_prompts(SETTINGS, tiny, tiny, 0)


def test_a_proof_counts_more_prompts_than_a_search() -> None:
    more = SETTINGS.model_copy(update={"prompts": 24, "proof_prompts": 72})
    assert [more.prompt_count(split) for split in (None, *SIDES.values())] == [24, 24, 72]
    same = more.model_copy(update={"proof_prompts": None})
    assert same.prompt_count(SIDES["proof"]) == 24


@pytest.mark.parametrize("fewest", [{"prompts": 5}, {"proof_prompts": 5}])
def test_more_groups_than_prompts_are_an_error(fewest: dict[str, int]) -> None:
    settings = SETTINGS.model_dump() | {"groups": 6, "prompts": 24}
    cure = f"5 prompts cannot be divided into 6 groups; raise {next(iter(fewest))} or lower groups"
    with pytest.raises(ValueError, match=cure):
        AcceptanceSettings.model_validate(settings | fewest)
