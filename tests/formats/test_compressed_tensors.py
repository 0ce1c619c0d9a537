"""compressed-tensors: which weights its groups mean, and groups that are added to those of a checkpoint."""

import re

import pytest
from compressed_tensors.utils.match import is_match
from torch.nn import Embedding, Linear

from slimqwen.checkpoint.packing import LINEARS
from slimqwen.formats.compressed_tensors import (
    CompressedTensors,
    PackedIntegers,
    config_group,
    matches,
    with_group,
)

LAYER = "model.layers.3"


def bits(module, settings):
    """Bits of the layouts that a module may have."""
    return [layout.bits for layout in CompressedTensors(settings).layouts_of(module)]


@pytest.mark.parametrize("module", [f"{LAYER}.mlp.up_proj", "mtp.fc", "model.embed_tokens"])
@pytest.mark.parametrize(
    "entry",
    ["Linear", "Embedding", "mtp.fc", "up_proj", "re:.*proj$", "re:up_proj", "re:^(?!mtp).*", LINEARS["mtp"]],
)
def test_entries_match_as_in_the_package_compressed_tensors(entry, module):
    layer = Embedding(2, 2) if "embed" in module else Linear(2, 2)
    assert matches(entry, module) is is_match(module, layer, entry)


def test_the_output_head_is_no_linear_by_its_class():
    assert not matches("Linear", "lm_head")


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
    assert [bits(name, form) for name in modules] == [[4], [2], [8]]
    assert not CompressedTensors(form).packs(f"{LAYER}.self_attn.k_proj")


@pytest.mark.parametrize("width", range(2, 9))
def test_integers_of_every_width_are_packed_without_gaps(width):
    parts = PackedIntegers(width, 32, symmetric=False).parts(64, 96)
    assert parts["weight_packed"][0] == (64, 96 * width // 32)
    assert parts["weight_zero_point"][0] == (64 * width // 32, 3)


@pytest.mark.parametrize(("group_size", "strategy"), [(32, "group"), (None, "channel")])
def test_a_group_says_how_its_weights_share_scales(group_size, strategy):
    group = config_group(LINEARS["mlp"], 4, group_size)
    assert (group["targets"], group["format"]) == ([LINEARS["mlp"]], "pack-quantized")
    assert group["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size,
        "dynamic": False,
    }  # fmt: skip


HEAD, MTP = config_group(LINEARS["lm_head"], 4, 32), config_group(LINEARS["mtp"], 8, None)
MTP_LINEARS = ["mtp.fc", "mtp.layers.0.mlp.up_proj"]


def test_where_only_heads_are_packed_everything_else_is_ignored():
    one = with_group({}, "lm_head", HEAD, ["lm_head"])
    both = with_group(one, "mtp", MTP, MTP_LINEARS)

    assert both["quant_method"] == "compressed-tensors"
    assert set(both["config_groups"]) == {"lm_head", "mtp"}
    (pattern,) = both["ignore"]
    ignored = {
        name: re.match(pattern[3:], name) is not None
        for name in ("lm_head", "mtp.fc", "mtp.norm", f"{LAYER}.mlp.up_proj")
    }
    assert ignored == {"lm_head": False, "mtp.fc": False, "mtp.norm": True, f"{LAYER}.mlp.up_proj": True}


def base(*ignore, targets=("Linear",)):
    """The quantization_config of a checkpoint whose layers are packed."""
    group = {**config_group(LINEARS["mlp"], 4, 32), "targets": list(targets)}
    return {"config_groups": {"group_0": group}, "ignore": list(ignore)}


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
    after = with_group(before, "lm_head", HEAD, ["lm_head"])
    assert after["ignore"] == left
    assert list(after["config_groups"]) == ["group_0", "lm_head"]
    assert before["ignore"] == ignore


@pytest.mark.parametrize("spelling", ["re:.*mtp.*", "re:^mtp.*", "re:mtp.fc"])
def test_no_pattern_of_the_mtp_head_stays_among_the_ignored(spelling):
    after = with_group(base(spelling, *MTP_LINEARS), "mtp", MTP, MTP_LINEARS)
    assert after["ignore"] == []


def test_a_pattern_that_means_more_keeps_the_rest():
    after = with_group(base("re:.*(lm_head|mtp|linear_attn).*"), "mtp", MTP, MTP_LINEARS)
    (pattern,) = after["ignore"]
    modules = (*MTP_LINEARS, "mtp.layers.0.self_attn.qkv_proj", "lm_head", f"{LAYER}.linear_attn.in_proj_a")
    assert [matches(pattern, module) for module in modules] == [False, False, False, True, True]


@pytest.mark.parametrize(("targets", "first"), [(["re:.*_proj$"], "mtp"), (["Linear"], "group_0")])
def test_a_target_of_the_base_does_not_take_the_linears(targets, first):
    after = with_group(base(targets=targets), "mtp", MTP, MTP_LINEARS)
    assert next(iter(after["config_groups"])) == first
    assert bits("mtp.layers.0.mlp.up_proj", after) == [8]


def test_a_part_of_the_mtp_head_is_named_where_the_rest_of_it_was_packed_before():
    whole = with_group(base(), "mtp", MTP, MTP_LINEARS)["config_groups"]["mtp"]
    assert whole == MTP
    part = with_group(base(), "mtp", MTP, MTP_LINEARS[1:])["config_groups"]["mtp"]
    assert part == MTP | {"targets": MTP_LINEARS[1:]}
