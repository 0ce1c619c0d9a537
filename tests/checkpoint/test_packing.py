"""Packed linears: which modules a kind names, what config.json says of them, and what is stored."""

import json
import re

import pytest
import torch
from compressed_tensors.compressors import unpack_from_int32
from safetensors.torch import save_file

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.errors import CorruptCheckpointError, UnsupportedFormatError
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


def test_a_target_that_names_a_module_goes_before_its_class():
    form = {
        "config_groups": {
            "all": {"targets": ["Linear"], "weights": {"num_bits": 8}},
            "none": {"targets": ["lm_head"]},
            "mlp": {"targets": [LINEARS["mlp"]], "weights": {"num_bits": 4}},
            "one": {"targets": ["mtp.fc"], "weights": {"num_bits": 2}},
        },
        "ignore": ["re:.*k_proj"],
    }
    modules = (f"{LAYER}.mlp.up_proj", "mtp.fc", f"{LAYER}.self_attn.q_proj")
    assert [packing.packed_bits(name, form) for name in modules] == [4, 2, 8]
    assert packing.group_of(f"{LAYER}.self_attn.k_proj", form) is None


def test_a_packed_module_of_no_group_is_an_error():
    group = {"targets": [LINEARS["mlp"]], "weights": {"num_bits": 4}}
    with pytest.raises(
        CorruptCheckpointError, match="no group of quantization_config has the target lm_head"
    ):
        packing.packed_bits("lm_head", {"config_groups": {"a": group}})


@pytest.mark.parametrize(("group_size", "strategy"), [(32, "group"), (None, "channel")])
def test_a_group_says_how_its_weights_share_scales(group_size, strategy):
    group = packing.config_group("mlp", 4, group_size)
    assert (group["targets"], group["format"]) == ([LINEARS["mlp"]], "pack-quantized")
    assert group["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size,
        "dynamic": False,
    }  # fmt: skip


HEAD, MTP = packing.config_group("lm_head", 4, 32), packing.config_group("mtp", 8, None)
MTP_LINEARS = ["mtp.fc", "mtp.layers.0.mlp.up_proj"]


def test_where_only_heads_are_packed_everything_else_is_ignored():
    one = {"quantization_config": packing.with_group({}, "lm_head", HEAD, ["lm_head"])}
    both = packing.with_group(one, "mtp", MTP, MTP_LINEARS)

    assert both["quant_method"] == "compressed-tensors"
    assert set(both["config_groups"]) == {"lm_head", "mtp"}
    (pattern,) = both["ignore"]
    ignored = {
        name: re.match(pattern[3:], name) is not None
        for name in ("lm_head", "mtp.fc", "mtp.norm", f"{LAYER}.mlp.up_proj")
    }
    assert ignored == {"lm_head": False, "mtp.fc": False, "mtp.norm": True, f"{LAYER}.mlp.up_proj": True}


def base(*ignore, targets=("Linear",)):
    """The config of a checkpoint whose layers are packed."""
    group = {**packing.config_group("mlp", 4, 32), "targets": list(targets)}
    return {"quantization_config": {"config_groups": {"group_0": group}, "ignore": list(ignore)}}


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (["lm_head", "re:^mtp.*", "model.other"], ["re:^mtp.*", "model.other"]),
        (["re:.*lm_head.*", "re:.*lm_head$", "re:^lm_head$"], []),
        (
            ["model.layers.0.mlp.down_proj", "re:.*visual.*"],
            ["model.layers.0.mlp.down_proj", "re:.*visual.*"],
        ),
    ],
)
def test_no_spelling_of_the_head_stays_among_the_ignored(ignore, left):
    before = base(*ignore)
    after = packing.with_group(before, "lm_head", HEAD, ["lm_head"])
    assert after["ignore"] == left
    assert list(after["config_groups"]) == ["group_0", "lm_head"]
    assert before["quantization_config"]["ignore"] == ignore


@pytest.mark.parametrize("spelling", ["re:.*mtp.*", "re:^mtp.*", "re:mtp.fc"])
def test_no_pattern_of_the_mtp_head_stays_among_the_ignored(spelling):
    after = packing.with_group(base(spelling, *MTP_LINEARS), "mtp", MTP, MTP_LINEARS)
    assert after["ignore"] == []


def test_a_pattern_that_means_more_keeps_the_rest():
    after = packing.with_group(base("re:.*(lm_head|mtp|linear_attn).*"), "mtp", MTP, MTP_LINEARS)
    (pattern,) = after["ignore"]
    modules = (*MTP_LINEARS, "mtp.layers.0.self_attn.qkv_proj", "lm_head", f"{LAYER}.linear_attn.in_proj_a")
    assert [packing.means(pattern, module) for module in modules] == [False, False, False, True, True]


@pytest.mark.parametrize(("targets", "first"), [(["re:.*_proj$"], "mtp"), (["Linear"], "group_0")])
def test_a_target_of_the_base_does_not_take_the_linears(targets, first):
    after = packing.with_group(base(targets=targets), "mtp", MTP, MTP_LINEARS)
    assert next(iter(after["config_groups"])) == first
    assert packing.packed_bits("mtp.layers.0.mlp.up_proj", after) == 8


def test_a_part_of_the_mtp_head_is_named_where_the_rest_of_it_was_packed_before():
    whole = packing.with_group(base(), "mtp", MTP, MTP_LINEARS)["config_groups"]["mtp"]
    assert whole == MTP
    part = packing.with_group(base(), "mtp", MTP, MTP_LINEARS[1:])["config_groups"]["mtp"]
    assert part == MTP | {"targets": MTP_LINEARS[1:]}


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "auto-round", "modelopt"])
def test_packed_linears_are_not_added_to_another_format(tmp_path, method):
    with pytest.raises(UnsupportedFormatError, match=f"quantised in the format {method}, .*; take"):
        packing.require_extensible(
            tmp_path, {"text_config": {"quantization_config": {"quant_method": method}}}
        )


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
    with pytest.raises(CorruptCheckpointError, match="NaN or infinity"):
        list(packing.quantised_blocks(stored(weight), 32, 4))


def test_some_mebibytes_are_rounded_at_a_time(stored):
    weight = torch.zeros(3 * 2**10, 2**11)
    blocks = [block.shape[0] for block, _ in packing.quantised_blocks(stored(weight), 32, 4)]
    assert blocks == [2**11, 2**10]
