"""Packed linears: which modules a kind names, what config.json says of them, and what is stored."""

import json
import re

import pytest
import torch
from compressed_tensors.compressors import unpack_from_int32
from safetensors.torch import save_file

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.packing import LINEARS, Quantisation
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
        (f"{LAYER}.mlp.gate_proj_of_another", set()),
    ],
)
def test_a_module_is_of_one_kind_at_most(module, kinds):
    assert {kind for kind, target in LINEARS.items() if re.match(target[3:], module)} == kinds


def test_a_target_that_names_a_module_goes_before_its_class():
    quantisation = Quantisation.model_validate(
        {
            "config_groups": {
                "all": {"targets": ["Linear"], "weights": {"num_bits": 8}},
                "none": {"targets": ["lm_head"]},
                "mlp": {"targets": [LINEARS["mlp"]], "weights": {"num_bits": 4, "group_size": 32}},
                "one": {"targets": ["mtp.fc"], "weights": {"num_bits": 2, "symmetric": False}},
            }
        }
    )
    bits = [quantisation.of_module(name).num_bits for name in (f"{LAYER}.mlp.up_proj", "mtp.fc", "lm_head")]
    assert bits == [4, 2, 8]
    assert quantisation.of_module("mtp.fc").symmetric is False
    assert quantisation.of_module("lm_head").symmetric is True


def test_a_packed_module_of_no_group_is_an_error():
    group = {"targets": [LINEARS["mlp"]], "weights": {"num_bits": 4}}
    with pytest.raises(CorruptCheckpointError, match="no group of quantization_config has lm_head"):
        Quantisation.model_validate({"config_groups": {"a": group}}).of_module("lm_head")


@pytest.mark.parametrize(("group_size", "strategy"), [(32, "group"), (None, "channel")])
def test_a_group_says_how_its_weights_share_scales(group_size, strategy):
    group = packing.config_group("mlp", 4, group_size)
    assert (group["targets"], group["format"]) == ([LINEARS["mlp"]], "pack-quantized")
    assert group["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size,
        "dynamic": False,
    }  # fmt: skip


def test_where_only_heads_are_packed_everything_else_is_ignored():
    one = {"quantization_config": packing.with_group({}, "lm_head", packing.config_group("lm_head", 4, 32))}
    both = packing.with_group(one, "mtp", packing.config_group("mtp", 8, None))

    assert both["quant_method"] == "compressed-tensors"
    assert set(both["config_groups"]) == {"lm_head", "mtp"}
    (pattern,) = both["ignore"]
    ignored = {
        name: re.match(pattern[3:], name) is not None
        for name in ("lm_head", "mtp.fc", "mtp.norm", f"{LAYER}.mlp.up_proj")
    }
    assert ignored == {"lm_head": False, "mtp.fc": False, "mtp.norm": True, f"{LAYER}.mlp.up_proj": True}


def test_where_layers_are_packed_the_head_leaves_the_list_of_the_ignored():
    before = {
        "format": "pack-quantized",
        "config_groups": {"group_0": packing.config_group("mlp", 4, 32)},
        "ignore": ["lm_head", packing.UNPACKED_MTP, "model.other"],
    }
    after = packing.with_group(
        {"quantization_config": before}, "lm_head", packing.config_group("lm_head", 4, 32)
    )
    assert after["ignore"] == [packing.UNPACKED_MTP, "model.other"]
    assert set(after["config_groups"]) == {"group_0", "lm_head"}
    assert before["ignore"][0] == "lm_head"


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


def test_a_weight_that_is_no_number_is_refused(stored):
    weight = torch.zeros(2, 64)
    weight[1, 5] = float("nan")
    with pytest.raises(CorruptCheckpointError, match="NaN or infinity"):
        list(packing.quantised_blocks(stored(weight), 32, 4))


def test_some_mebibytes_are_rounded_at_a_time(stored):
    weight = torch.zeros(3 * 2**10, 2**11)
    blocks = [block.shape[0] for block, _ in packing.quantised_blocks(stored(weight), 32, 4)]
    assert blocks == [2**11, 2**10]
