"""NVFP4 decodes to what compressed-tensors and vLLM compute, bit by bit."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

from slimqwen.formats.nvfp4 import CompressedNvfp4, Nvfp4
from tests.formats.stored import Stored


@pytest.mark.parametrize(
    ("layout", "apply"),
    [(Nvfp4(), torch.mul), (CompressedNvfp4(), torch.div)],
    ids=["modelopt", "compressed-tensors"],
)
def test_every_byte_and_scale_decodes_as_the_reference_does(layout, apply):
    generator = torch.Generator().manual_seed(0)
    words = (
        torch.cat([torch.arange(256), torch.randint(0, 256, (256,), generator=generator)])
        .byte()
        .reshape(8, 64)
    )
    scales = (torch.rand(8, 8, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.037)
    parts = {
        layout.carrier: Stored(words, "U8"),
        layout.required[0]: Stored(scales, "F8_E4M3"),
        layout.required[1]: Stored(whole, "F32"),
    }

    numbers = unpack_fp4_from_uint8(words, 8, 128, torch.float32).reshape(8, 8, 16)
    expected = numbers * apply(scales.float(), whole)[:, :, None]

    assert layout.shape(parts) == (8, 128)
    assert torch.equal(torch.cat(list(layout.blocks(parts, 4))), expected.flatten(1))


@pytest.mark.parametrize("layout", [Nvfp4(), CompressedNvfp4()])
def test_sixteen_weights_share_a_scale_and_two_a_byte(layout):
    parts = layout.parts(64, 96)
    assert parts[layout.carrier] == ((64, 48), ("U8",))
    assert parts["weight_scale"] == ((64, 6), ("F8_E4M3",))
    assert layout.count(64 * 48) == 64 * 96
