"""Words of GPTQ and AWQ decode to (level - zero point) * scale, packed here as their makers pack them."""

import pytest
import torch

from slimqwen.formats.gptq import AwqWords, GptqWords
from tests.formats.stored import Stored

ROWS, COLUMNS, GROUP = 32, 64, 16
AUTO_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output that AutoAWQ's `gemm` puts at each position of a word (`order_map` of awq/modules/linear/gemm.py)."""


def words(levels: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack along the last dimension, the lowest bits first."""
    count = 32 // bits
    of_words = levels.unflatten(-1, (-1, count))[..., list(order or range(count))]
    packed = sum(of_words[..., place].long() << (bits * place) for place in range(count))
    return (packed - (packed >= 2**31) * 2**32).to(torch.int32)


def drawn(bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels [columns, rows], zero points and scales [groups, rows]."""
    generator = torch.Generator().manual_seed(bits)
    shapes = (COLUMNS, ROWS), (COLUMNS // GROUP, ROWS)
    levels, points = (torch.randint(1, 2**bits, shape, generator=generator) for shape in shapes)
    return levels, points, torch.rand(shapes[1], generator=generator) + 0.1


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("zero_offset", [1, 0], ids=["first version", "second version"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_of_gptq_hold_columns(bits, zero_offset, is_ordered):
    levels, points, scales = drawn(bits)
    groups = torch.arange(COLUMNS) // GROUP
    parts = {
        "qweight": Stored(words(levels.T, bits).T.contiguous()),
        "qzeros": Stored(words(points - zero_offset, bits)),
        "scales": Stored(scales),
    }
    if is_ordered:
        groups = groups.flip(0)
        parts["g_idx"] = Stored(groups.int())
    layout = GptqWords(bits, GROUP, zero_offset)
    expected = ((levels - points[groups]) * scales[groups]).T
    assert layout.shape(parts) == (ROWS, COLUMNS)
    assert layout.unreadable(parts) is None
    assert {part: shape for part, (shape, _) in layout.parts(ROWS, COLUMNS).items() if part in parts} == {
        part: tensor.shape for part, tensor in parts.items()
    }
    assert torch.equal(torch.cat(list(layout.blocks(parts, 5))), expected)


def test_words_of_awq_hold_interleaved_rows():
    levels, points, scales = drawn(4)
    parts = {
        "qweight": Stored(words(levels, 4, AUTO_AWQ)),
        "qzeros": Stored(words(points, 4, AUTO_AWQ)),
        "scales": Stored(scales),
    }
    groups = torch.arange(COLUMNS) // GROUP
    layout = AwqWords(4, GROUP)
    assert layout.shape(parts) == (ROWS, COLUMNS)
    assert torch.equal(layout.read(parts, 8, 24), ((levels - points[groups]) * scales[groups]).T[8:24])


def test_three_bits_are_not_read():
    parts = {
        "qweight": Stored(torch.zeros(6, 32)),
        "qzeros": Stored(torch.zeros(4, 3)),
        "scales": Stored(torch.ones(4, 32)),
    }
    assert GptqWords(3, GROUP).unreadable(parts) == "packed in 3 bits"
