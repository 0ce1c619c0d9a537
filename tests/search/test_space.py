"""The space: what the checkpoint and the GPU leave to choose."""

import json
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.plan.devices import read_gpu
from slimqwen.search import SearchError
from slimqwen.search.space import SearchSettings, Space


def derive(root: Path, gpu_name: str = "a10g", settings: SearchSettings | None = None) -> Space:
    return Space.derive(variant.load("tiny", root), read_gpu(gpu_name, root), settings or SearchSettings())


def with_config(root: Path, **changes: object) -> None:
    """Replace the linked weights by links to their files and a config.json that differs from theirs."""
    folder = root / "weights" / "tiny"
    stock = folder.resolve()
    folder.unlink()
    folder.mkdir()
    for file in stock.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((stock / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_the_embedded_model_has_every_choice_but_those_that_its_gpu_or_its_base_decide(
    small_root: Path,
) -> None:
    space = derive(small_root)
    assert set(space.open_choices) == {
        "mlp", "attention", "linear_attention", "mtp", "group_size", "rounding", "head_bits", "vocabulary",
        "draft_vocabulary", "redistillation", "depth",
    }  # fmt: skip
    assert space.choices["group_size"] == (32, 64)  # 128 does not divide 192
    assert space.choices["kv_cache_dtype"] == ("auto",)


def test_states_of_32_bits_may_become_bfloat16(small_root: Path) -> None:
    with_config(small_root, mamba_ssm_dtype="float32")
    assert derive(small_root).choices["state_dtype"] == ("auto", "bfloat16")


def test_an_fp8_cache_is_a_choice_where_the_gpu_reads_it(small_root: Path) -> None:
    assert derive(small_root, "l4").choices["kv_cache_dtype"] == ("auto", "fp8")


def test_a_model_without_drafts_or_recurrence_has_no_choices_of_theirs(small_root: Path) -> None:
    with_config(small_root, mtp_num_hidden_layers=0, layer_types=["full_attention"] * 4)
    names = set(derive(small_root).open_choices)
    assert not names & {
        "mtp",
        "draft_vocabulary",
        "redistillation",
        "depth",
        "linear_attention",
        "state_dtype",
    }
    assert {"mlp", "attention"} <= names


def test_packed_weights_are_not_packed_again(small_root: Path) -> None:
    with_config(small_root, quantization_config={"config_groups": {}})
    assert not set(derive(small_root).open_choices) & {"mlp", "attention", "mtp", "rounding", "head_bits"}


def test_settings_replace_choices(small_root: Path) -> None:
    settings = SearchSettings(
        choices={"depth": (2,)},
        incumbent={"point": {"depth": 2, "mlp": "W8A16"}},
        points=({"attention": "W4A16"},),
    )
    space = derive(small_root, settings=settings)
    assert "depth" not in space.open_choices
    first, second = space.first_points()
    assert (first["depth"], first["mlp"], first["attention"]) == (2, "W8A16", "none")
    # Other points change the incumbent's.
    assert second == {**first, "attention": "W4A16"}


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (SearchSettings(choices={"mpl": ("none",)}), "'mpl' is no choice"),
        (SearchSettings(incumbent={"point": {"depth": 9}}), "depth 9 is none of 1, 2, 3, 4, 5, 6"),
    ],
)
def test_a_choice_or_a_value_that_does_not_exist_is_refused(
    small_root: Path, settings: SearchSettings, fault: str
) -> None:
    with pytest.raises(SearchError, match=fault):
        derive(small_root, settings=settings)
