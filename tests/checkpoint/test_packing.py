"""Packed linears: which modules a kind names, and what is stored of them."""

import json
import re

import pytest
import torch
from compressed_tensors.compressors import unpack_from_int32
from safetensors.torch import save_file

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.packing import LINEARS
from slimqwen.checkpoint.rtn import quantise
from slimqwen.checkpoint.tensors import list_tensors

LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("module", "kinds"),
    [
        (f"{LAYER}.mlp.gate_proj", {"mlp"}),
        (f"{LAYER}.self_attn.o_proj", {"attention"}),
        (f"{LAYER}.linear_attn.in_proj_qkv", {"linear_attention"}),
        (f"{LAYER}.linear_attn.in_proj_a", set()),
        ("mtp.layers.0.mlp.up_proj", {"mtp"}),
        ("mtp.fc", {"mtp"}),
        ("lm_head", {"lm_head"}),
        ("model.embed_tokens", {"embed_tokens"}),
        (f"{LAYER}.mlp.gate_proj_of_another", set()),
    ],
)
def test_a_module_is_of_one_kind_at_most(module, kinds):
    assert {kind for kind, target in LINEARS.items() if re.match(target[3:], module)} == kinds


def test_the_linears_of_a_kind_are_its_unpacked_weights():
    names = (
        "mlp.up_proj.weight",
        "mlp.up_proj.weight_scale",
        "mlp.up_proj",
        "self_attn.q_proj.weight",
        "norm.weight",
    )
    stored = {f"{LAYER}.{name}": object() for name in names}
    assert list(packing.linears(stored, "mlp")) == [f"{LAYER}.mlp.up_proj.weight"]
    assert re.match(packing.tensor_pattern("mlp"), f"{LAYER}.mlp.up_proj.weight_scale")
    assert not re.match(packing.tensor_pattern("mlp"), f"{LAYER}.mlp.up_proj_of_another.weight")


@pytest.fixture
def stored(tmp_path):
    """A BF16 weight in a checkpoint."""

    def save(weight):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["x"]}))
        save_file({"a.weight": weight.bfloat16()}, tmp_path / "model.safetensors")
        return list_tensors(tmp_path)["a.weight"]

    return save


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_what_is_stored_is_the_weight_rounded_to_nearest(stored, monkeypatch, bits, group_size, rows_at_once):
    weight = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    monkeypatch.setattr(packing, "BLOCK_BYTES", rows_at_once * 64 * 2)
    tensors = packing.rounded_to_nearest(stored(weight), "a.weight", bits, group_size)
    content = {name: b"".join(map(bytes, tensor.chunks())) for name, tensor in tensors.items()}

    integers, scales = quantise(weight, group_size or 64, bits)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "a.weight_packed": ("I32", (7, 64 * bits // 32)),
        "a.weight_scale": ("BF16", (7, 64 // (group_size or 64))),
        "a.weight_shape": ("I64", (2,)),
    }
    packed = torch.frombuffer(bytearray(content["a.weight_packed"]), dtype=torch.int32).reshape(7, -1)
    assert torch.equal(unpack_from_int32(packed, bits, torch.Size((7, 64))), integers)
    assert content["a.weight_scale"] == bytes(scales.view(torch.uint8).numpy())
    assert list(torch.frombuffer(bytearray(content["a.weight_shape"]), dtype=torch.int64)) == [7, 64]


def test_another_rounding_gets_rows_and_scales_and_keeps_the_scales(stored, monkeypatch):
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    monkeypatch.setattr(packing, "SEARCHED_BYTES", 2 * 64 * 2)
    _, scales = quantise(weight, 32, 4)
    seen = []

    def toward_zero(rows, steps):
        seen.append((rows, steps))
        return (rows.unflatten(1, (2, 32)) / steps.float()[..., None]).clamp(-7, 7).to(torch.int8).flatten(1)

    blocks = list(packing.quantised_blocks(stored(weight), 32, 4, toward_zero))
    assert [len(rows) for rows, _ in seen] == [2, 2, 1]
    assert torch.equal(torch.cat([rows for rows, _ in seen]), weight)
    assert torch.equal(torch.cat([steps for _, steps in blocks]), scales)
    packed = packing.rounded_to_nearest(stored(weight), "a.weight", 4, 32, toward_zero)["a.weight_packed"]
    words = torch.frombuffer(bytearray(b"".join(map(bytes, packed.chunks()))), dtype=torch.int32).reshape(
        5, -1
    )
    integers = torch.cat([integers for integers, _ in blocks])
    assert torch.equal(unpack_from_int32(words, 4, torch.Size((5, 64))), integers)


def test_a_weight_that_is_no_number_is_refused(stored):
    weight = torch.zeros(2, 64)
    weight[1, 5] = float("nan")
    with pytest.raises(
        CorruptCheckpointError,
        match=r"of 2 rows and 64 columns, has NaN or infinity in rows 0 to 1; .*of your own training",
    ):
        list(packing.quantised_blocks(stored(weight), 32, 4))


def test_some_mebibytes_are_rounded_at_a_time(stored):
    weight = torch.zeros(3 * 2**10, 2**11)
    blocks = [block.shape[0] for block, _ in packing.quantised_blocks(stored(weight), 32, 4)]
    assert blocks == [2**11, 2**10]
