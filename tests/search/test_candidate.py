"""Candidates: what a point makes, and that equal ones are one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.recipe import recipe_file
from slimqwen.search.candidate import Candidate, describe_changes, make_overlay
from slimqwen.search.ladder import Ladder
from tests.search.conftest import ROOT


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"group_size": 64, "mlp": "W8A16"}, {"group_size": 32, "mlp": "W8A16"}),
        ({"rounding": "gptq", "head_bits": 4}, {"head_bits": 4}),
        ({"draft_vocabulary": 0.5, "mtp": "W4A16", "redistillation": True}, {}),
        ({"draft_bits": 4, "depth": 2}, {"depth": 2}),
    ],
)
def test_points_that_make_the_same_thing_are_one_candidate(first: dict, second: dict) -> None:
    assert Candidate.from_point(first) == Candidate.from_point(second)


def test_a_choice_that_does_something_makes_another_candidate() -> None:
    assert Candidate.from_point({"group_size": 64, "mlp": "W4A16"}) != Candidate.from_point({"mlp": "W4A16"})


def test_the_stages_of_the_target_come_before_those_of_its_drafts(ladder: Ladder) -> None:
    candidate = Candidate(
        mlp="W4A16", mtp="W8A16", head_bits=4, vocabulary=0.96875, draft_vocabulary=0.25, redistillation=True, depth=3
    )  # fmt: skip
    steps = candidate.steps(ladder.space.settings.stages, 8192)
    assert [stage for stage, _ in steps] == [
        "calibrate", "prune_vocab", "quantise_lm_head", "sample_outputs", "trim_draft_vocab", "redistill_mtp",
        "calibrate",
    ]  # fmt: skip
    sizes = {stage: parameters["size"] for stage, parameters in steps if "size" in parameters}
    assert sizes == {"prune_vocab": 7936, "trim_draft_vocab": 1984}
    assert candidate.target.steps(ladder.space.settings.stages, 8192) == steps[:3]


def test_tables_are_packed_in_the_groups_of_the_candidate() -> None:
    candidate = Candidate(
        head_bits=4, embedding_bits=8, draft_vocabulary=0.25, draft_bits=4, depth=3, group_size=64
    )
    assert Candidate.from_point(candidate.changes) == candidate
    steps = dict(candidate.steps({}, 8192))
    assert steps["quantise_lm_head"] == {"group_size": 64}
    assert steps["quantise_embedding"] == {"bits": 8, "group_size": 64}
    assert steps["trim_draft_vocab"] == {"size": 2048, "bits": 4, "group_size": 64}
    assert "quantise_embedding" in dict(candidate.target.steps({}, 8192))


def test_candidates_of_one_target_share_it(ladder: Ladder) -> None:
    deep = Candidate(mlp="W4A16", depth=6, mtp="W4A16")
    assert deep.target == Candidate(mlp="W4A16", depth=1).target
    assert deep.target != replace(deep, head_bits=4).target


def test_every_choice_gives_a_recipe_and_a_configuration_that_can_be_read(ladder: Ladder) -> None:
    first, *_ = ladder.space.first_points()
    moves = [{**first, name: values[-1]} for name, values in ladder.space.open_choices.items()]
    for point in [*ladder.space.first_points(), *moves]:
        candidate = Candidate.from_point(point)
        made = ladder.in_overlay(candidate)
        assert made.baseline == "tiny"
        assert made.recipe is not None
        names = [step.stage.name for step in recipe_file.read_recipe(made.recipe).steps]
        assert names == [stage for stage, _ in candidate.steps(ladder.space.settings.stages, 8192)]
        drafts = made.settings["VLLM_SPECULATIVE_CONFIG"].value
        assert f'"num_speculative_tokens": {candidate.depth}' in drafts


def test_an_overlay_shares_the_store_and_leaves_the_experiments_alone(
    ladder: Ladder, small_root: Path
) -> None:
    base = variant.load("tiny", small_root)
    before = sorted(path.name for path in (small_root / "experiments").iterdir())
    overlay = make_overlay(base, small_root / "overlay")
    make_overlay(base, small_root / "overlay")  # again, as a run that goes on does
    assert (overlay / "weights" / "store").resolve() == (small_root / "weights" / "store").resolve()
    assert variant.load("tiny", overlay).weights.resolve() == (ROOT / "weights" / "tiny").resolve()
    made = Candidate(mlp="W4A16").scaffold(base, ladder.space, "A candidate.", overlay)
    assert made.name.startswith("tiny-search-")
    assert made.folder.parent == overlay / "experiments"
    assert sorted(path.name for path in (small_root / "experiments").iterdir()) == before


def test_lines_of_config_env_are_those_that_differ_from_the_base(ladder: Ladder) -> None:
    candidate = Candidate(depth=3, state_dtype="bfloat16", kv_cache_dtype="fp8", max_sequences=4)
    lines = candidate.lines(ladder.base)
    assert json.loads(lines["VLLM_SPECULATIVE_CONFIG"].strip("'")) == {
        "method": "mtp",
        "num_speculative_tokens": 3,
    }
    assert {key: value for key, value in lines.items() if key != "VLLM_SPECULATIVE_CONFIG"} == {
        "VLLM_MAMBA_SSM_CACHE_DTYPE": "bfloat16",
        "VLLM_KV_CACHE_DTYPE": "fp8",
        "VLLM_MAX_NUM_SEQS": "4",
    }
    assert Candidate().lines(ladder.base) == {}
    drafting = variant.load("tiny-mtp4", ladder.base.root)
    assert Candidate().lines(drafting) == {"VLLM_SPECULATIVE_CONFIG": ""}


def test_changes_are_one_line() -> None:
    assert describe_changes(Candidate(mlp="W4A16", depth=2).changes) == "mlp W4A16, depth 2"
    assert describe_changes({}) == "nothing"
