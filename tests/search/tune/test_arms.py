"""The ways to speculate that are tried, as lines of config.env."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.search.tune.arms import KEY, UNDRAFTED, Arm, list_arms
from slimqwen.search.tune.changes import SettingsChange
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant
from tests.search.tune.turns import K2, K4, ROUNDING, SECOND, SLOW, WINNER
from tests.zoo.editable_checkpoint import tiny as tiny_checkpoint
from tests.zoo.editable_checkpoint import without_mtp

TINY = Path(__file__).parents[3] / "weights" / "tiny"


@pytest.fixture
def served(add_variant: Callable[..., Path], tmp_path: Path) -> Callable[..., ServerCommand]:
    """The command of a variant of the embedded checkpoint, or of another, with these lines."""

    def make(*lines: str, weights: Path = TINY, platform: str = "cpu") -> ServerCommand:
        add_variant(
            "v", "VLLM_MODEL=weights/v\nVLLM_MAX_MODEL_LEN=256\n" + "".join(f"{each}\n" for each in lines)
        )
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "v").symlink_to(weights)
        return ServerCommand.resolve(variant.load("v", tmp_path), platform=platform)  # type: ignore[arg-type]

    return make


def names(command: ServerCommand) -> list[str]:
    return [arm.name for arm in list_arms(command)]


def test_every_depth_of_the_head_is_tried_and_prompt_lookup(
    served: Callable[..., ServerCommand],
) -> None:
    assert names(served()) == [
        "none", *(f"MTP K={depth}" for depth in range(1, 7)), "ngram K=4", "ngram_gpu K=4", "suffix K=8",
    ]  # fmt: skip


def test_what_is_served_comes_first_and_mtp_keeps_its_other_settings(
    served: Callable[..., ServerCommand],
) -> None:
    own = {"method": "mtp", "num_speculative_tokens": 7, "use_local_argmax_reduction": True}
    arms = list_arms(served(f"{KEY}='{json.dumps(own)}'"))
    assert [arm.name for arm in arms[:3]] == [
        "none",
        "MTP K=7, use_local_argmax_reduction=True",
        "MTP K=1, use_local_argmax_reduction=True",
    ]
    assert arms[1].speculation == own


def test_a_depth_that_is_served_is_tried_once(served: Callable[..., ServerCommand]) -> None:
    found = names(served(f"{KEY}='{json.dumps(K4.speculation)}'"))
    assert found[:3] == ["none", "MTP K=4", "MTP K=1"]
    assert found.count("MTP K=4") == 1


def test_a_drafter_that_the_config_names_is_tried_as_it_is(served: Callable[..., ServerCommand]) -> None:
    own = {"method": "dflash", "model": "weights/drafter", "num_speculative_tokens": 8}
    arms = list_arms(served(f"{KEY}='{json.dumps(own)}'"))
    assert [arm.name for arm in arms[:3]] == ["none", "dflash drafter K=8", "MTP K=1"]
    assert arms[2].speculation == {"method": "mtp", "num_speculative_tokens": 1}


def test_without_an_mtp_head_one_depth_is_there_to_be_refused(
    served: Callable[..., ServerCommand], tmp_path: Path
) -> None:
    editable = tiny_checkpoint()
    without_mtp()(editable)
    found = names(served(weights=editable.write(tmp_path / "headless")))
    assert [name for name in found if name.startswith("MTP")] == ["MTP K=1"]


def test_changes_are_named_and_united_and_the_first_of_two_of_one_line_counts() -> None:
    winner, second, slow = (Arm(K2.drafts, (each,)) for each in (WINNER, SECOND, SLOW))
    adaptive = Arm(
        K2.drafts, (SettingsChange("adaptive", speculation={"enable_adaptive_verification": True}),)
    )
    united = winner.unite([winner, second, slow, adaptive])
    assert united.name == "MTP K=2, winner, second winner, adaptive"
    assert united.changes == WINNER.lines | SECOND.lines
    assert united.speculation == {**(K2.drafts or {}), "enable_adaptive_verification": True}
    assert (united.rounds, Arm(None, (ROUNDING,)).rounds) == (False, True)


def test_lines_are_those_that_differ_from_the_variants_own(served: Callable[..., ServerCommand]) -> None:
    command = served(f"{KEY}='{json.dumps(K4.speculation)}'")
    assert K4.list_lines(command, None) == {}
    assert UNDRAFTED.list_lines(command, None) == {KEY: ""}
    assert K2.list_lines(command, 4) == {KEY: json.dumps(K2.speculation), "VLLM_MAX_NUM_SEQS": "4"}
    changed: Variant = command.variant.with_lines(K2.list_lines(command, None))
    assert ServerCommand.resolve(changed, platform="cpu").flags["speculative-config"] == K2.speculation


@pytest.mark.parametrize(
    ("own", "arm", "sequences", "sizes"),
    [(K4, K2, None, "3,6,12"), (K4, UNDRAFTED, None, "1,2,4"), (K4, K4, None, None), (K4, K2, 16, "")],
)
def test_sizes_of_cuda_graphs_follow_the_depth(
    served: Callable[..., ServerCommand], own: Arm, arm: Arm, sequences: int | None, sizes: str | None
) -> None:
    lines = (f"{KEY}='{json.dumps(own.speculation)}'", "VLLM_CUDAGRAPH_CAPTURE_SIZES=5,10,20")
    command = served(*lines, platform="cuda")
    assert arm.list_lines(command, sequences).get("VLLM_CUDAGRAPH_CAPTURE_SIZES") == sizes
