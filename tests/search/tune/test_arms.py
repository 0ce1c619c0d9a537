"""The ways to speculate that are tried, as lines of config.env, and what vLLM refuses of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.progress import silent
from slimqwen.search.tune.arms import KEY, UNDRAFTED, Arm, list_arms, probe_configurations, vary_sampling
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant
from tests.search.tune.turns import K2, K4, NGRAM
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


def test_every_depth_of_the_head_is_tried_prompt_lookup_and_adaptive_verification(
    served: Callable[..., ServerCommand],
) -> None:
    assert names(served()) == [
        "none", *(f"MTP K={depth}" for depth in range(1, 7)), "ngram K=4", "ngram_gpu K=4", "suffix K=8",
        "MTP K=6, adaptive",
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
    assert [arm.is_sampled for arm in (arms[1], arms[2], NGRAM, UNDRAFTED)] == [True, True, False, False]


def test_without_an_mtp_head_one_depth_is_there_to_be_refused(
    served: Callable[..., ServerCommand], tmp_path: Path
) -> None:
    editable = tiny_checkpoint()
    without_mtp()(editable)
    found = names(served(weights=editable.write(tmp_path / "headless")))
    assert [name for name in found if name.startswith("MTP")] == ["MTP K=1", "MTP K=1, adaptive"]


def test_sampling_is_varied_in_three_ways_from_the_plain_one() -> None:
    varied = vary_sampling(Arm({**(K2.speculation or {}), "rejection_sample_method": "block"}))
    assert [arm.name for arm in varied] == [
        "MTP K=2, probabilistic",
        "MTP K=2, block verification",
        "MTP K=2, probabilistic, block verification",
    ]


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


@pytest.mark.engine
def test_vllms_own_configuration_says_what_it_refuses(served: Callable[..., ServerCommand]) -> None:
    command = served()
    settings = [
        None, K2.speculation, {"method": "suffix", "num_speculative_tokens": 8},
        {**(K2.speculation or {}), "enable_adaptive_verification": True},
        {**(K2.speculation or {}), "rejection_sample_method": "block"},
    ]  # fmt: skip
    argvs = [
        ServerCommand.resolve(
            command.variant.with_lines(Arm(each).list_lines(command, None)), platform="cpu"
        ).argv[3:]
        for each in settings
    ]
    plain, drafted, suffix, adaptive, block = probe_configurations(TINY, argvs, silent)
    assert (plain, drafted) == ("", "")
    assert "Arctic Inference is required" in suffix
    assert adaptive
    assert "ignores rejection_sample_method=block" in block
