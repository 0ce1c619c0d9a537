"""The builders of the zoo: what they write is what the formats say."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import TINY, stored
from tests.zoo.animals import ANIMALS

UP = "model.layers.0.mlp.up_proj"


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [...] as its eight nibbles [..., 8], the lowest bits first."""
    return (words.long()[..., None] >> torch.arange(0, 32, 4)) & 15


def from_gptq(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    levels = nibbles(tensors[f"{UP}.qweight"]).movedim(-1, 1).flatten(0, 1)
    zeros = nibbles(tensors[f"{UP}.qzeros"]).flatten(1) + 1
    groups = tensors[f"{UP}.g_idx"].long()
    return ((levels - zeros[groups]) * tensors[f"{UP}.scales"].float()[groups]).T


def from_awq(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    levels = nibbles(tensors[f"{UP}.qweight"])[..., order].flatten(1)
    zeros = nibbles(tensors[f"{UP}.qzeros"])[..., order].flatten(1)
    groups = torch.arange(len(levels)) // 32
    return ((levels - zeros[groups]) * tensors[f"{UP}.scales"].float()[groups]).T


def from_blocks(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    weight, scales = tensors[f"{UP}.weight"].float(), tensors[f"{UP}.weight_scale_inv"].float()
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight * spread[: weight.shape[0], : weight.shape[1]]


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        ("gptq", from_gptq),
        ("gptq-act-order", from_gptq),
        ("auto-round", from_gptq),
        ("awq", from_awq),
        ("fp8-blocks", from_blocks),
    ],
)
def test_a_quantised_weight_decodes_to_about_the_weight_that_it_was(
    tmp_path: Path, name: str, decode
) -> None:
    folder = ANIMALS[name].build(tmp_path / name)
    original = load_file(TINY / "model.safetensors")[f"{UP}.weight"].float()
    decoded = decode(stored(folder))
    assert decoded.shape == original.shape
    # A nibble out of place would leave nothing of the weight; rounding to four bits leaves a tenth of it as error.
    assert float((decoded - original).norm() / original.norm()) < 0.2


def test_the_same_animal_is_built_byte_for_byte_again(tmp_path: Path) -> None:
    first, second = (ANIMALS["multimodal-w4a16"].build(tmp_path / name) for name in ("first", "second"))
    files = sorted(path.relative_to(first) for path in first.rglob("*"))
    assert files == sorted(path.relative_to(second) for path in second.rglob("*"))
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
