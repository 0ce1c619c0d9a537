"""Candidates: what choices make, and that equal ones are one."""

import json
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.fit.architecture import read_model, shape_model
from slimqwen.plan import shapes
from slimqwen.recipe import recipe_file
from slimqwen.search.candidate import Candidate, describe_changes
from tests.checkpoints import TINY

STAGES = {"sample_outputs": {"texts": 64}}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"group_size": 64, "mlp": "W8A16"}, {"group_size": 32, "mlp": "W8A16"}),
        ({"rounding": "gptq", "head_bits": 4}, {"head_bits": 4}),
        ({"draft_vocabulary": 0.5, "mtp": "W4A16"}, {}),
        ({"draft_bits": 4, "depth": 2}, {"depth": 2}),
    ],
)
def test_choices_that_make_the_same_thing_are_one_candidate(first: dict, second: dict) -> None:
    assert Candidate.of(first) == Candidate.of(second)


@pytest.mark.parametrize("scheme", ["W3A16", "W4A16"])
def test_a_choice_that_does_something_makes_another_candidate(scheme: str) -> None:
    assert Candidate.of({"group_size": 64, "mlp": scheme}) != Candidate.of({"mlp": scheme})


def test_the_stages_of_the_target_come_before_those_of_its_drafts() -> None:
    candidate = Candidate(
        mlp="W4A16", mtp="W8A16", head_bits=4, vocabulary=0.96875, draft_vocabulary=0.25, depth=3, rounding="gptq"
    )  # fmt: skip
    steps = candidate.steps(STAGES, 8192)
    assert [stage for stage, _ in steps] == [
        "calibrate", "prune_vocab", "quantise_lm_head", "sample_outputs", "trim_draft_vocab", "calibrate",
    ]  # fmt: skip
    sizes = {stage: parameters["size"] for stage, parameters in steps if "size" in parameters}
    assert sizes == {"prune_vocab": 7936, "trim_draft_vocab": 1984}
    assert dict(steps)["sample_outputs"] == {"texts": 64}
    # GPTQ of the MTP head reads what was sampled.
    assert [each.get("rounding") for stage, each in steps if stage == "calibrate"] == ["gptq", "gptq"]
    [*_, (_, alone)] = Candidate(mlp="W4A16", mtp="W8A16", depth=3, rounding="gptq").steps({}, 8192)
    assert "rounding" not in alone


def test_tables_are_packed_in_the_groups_of_the_candidate() -> None:
    candidate = Candidate(
        head_bits=4, embedding_bits=8, draft_vocabulary=0.25, draft_bits=4, depth=3, group_size=64
    )
    assert Candidate.of(candidate.changes) == candidate
    steps = dict(candidate.steps({}, 8192))
    assert steps["quantise_lm_head"] == {"group_size": 64}
    assert steps["quantise_embedding"] == {"bits": 8, "group_size": 64}
    assert steps["trim_draft_vocab"] == {"size": 2048, "bits": 4, "group_size": 64}


def test_the_dimensions_are_those_of_the_base_and_of_what_is_changed() -> None:
    stored = read_model(list_tensors(TINY), checkpoint.read_config(TINY))
    shape = shapes.variant_shape(variant.load("tiny"))
    plain = shape_model(Candidate().shape(shape))
    assert (plain.body.bytes, plain.head.bytes) == (stored.body.bytes, stored.head.bytes)
    packed = shape_model(Candidate(mlp="W4A16", mtp="W4A16", draft_vocabulary=0.25, depth=4).shape(shape))
    assert packed.body.bytes < plain.body.bytes
    assert packed.draft_output.bytes < plain.draft_output.bytes / 2


def test_a_candidate_becomes_a_variant_once(root: Path) -> None:
    base = variant.load("tiny", root)
    candidate = Candidate(mlp="W4A16", draft_vocabulary=0.25, depth=3)
    made = candidate.scaffold(base, "search", STAGES, "tinyworld", "general")
    assert made.name.startswith("tiny-search-")
    assert (made.baseline, made.evaluation) == ("tiny", "general")
    assert made.recipe is not None
    names = [step.stage.name for step in recipe_file.read_recipe(made.recipe).steps]
    assert names == [stage for stage, _ in candidate.steps(STAGES, 8192)]
    drafts = json.loads(made.settings["VLLM_SPECULATIVE_CONFIG"].value)
    assert drafts == {"method": "mtp", "num_speculative_tokens": 3}
    assert candidate.scaffold(base, "search", STAGES, "tinyworld", "general").folder == made.folder


def test_lines_of_config_env_are_those_that_differ_from_the_base() -> None:
    drafts = json.loads(Candidate(depth=3).lines(variant.load("tiny"))["VLLM_SPECULATIVE_CONFIG"].strip("'"))
    assert drafts == {"method": "mtp", "num_speculative_tokens": 3}
    assert Candidate().lines(variant.load("tiny")) == {}
    assert Candidate().lines(variant.load("tiny-mtp4")) == {"VLLM_SPECULATIVE_CONFIG": ""}


def test_changes_are_one_line() -> None:
    assert describe_changes(Candidate(mlp="W4A16", depth=2).changes) == "mlp W4A16, depth 2"
    assert describe_changes({}) == "nothing"
