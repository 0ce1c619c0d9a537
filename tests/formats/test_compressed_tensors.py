"""compressed-tensors: which weights its groups mean, and groups that are added to those of a checkpoint."""

import re
from fractions import Fraction

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
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


CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.fixture
def choose(monkeypatch):
    """vLLM's own choice of a kernel on a GPU of a compute capability, which this host need not have."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
    from vllm.model_executor.kernels.linear.mixed_precision import humming
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16 as wna16,
    )
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    monkeypatch.setattr(humming, "has_humming", lambda: True)
    platform = type(current_platform)

    def choose(form, capability):
        for name in ("is_cuda", "is_cpu"):
            monkeypatch.setattr(platform, name, lambda self, name=name: name == "is_cuda")
        monkeypatch.setattr(platform, "_enum", PlatformEnum.CUDA)
        own = classmethod(lambda cls, device_id=0: DeviceCapability(*capability))
        monkeypatch.setattr(platform, "get_device_capability", own)
        names = wna16.WNA16_SUPPORTED_TYPES_MAP if form.symmetric else wna16.WNA16_ZP_SUPPORTED_TYPES_MAP
        size = form.group_size or -1
        shape = (1024, 2048)
        config = MPLinearLayerConfig(shape, shape, names[form.bits], torch.bfloat16, size, not form.symmetric)
        return choose_mp_linear_kernel(config).__name__.removesuffix("LinearKernel")

    return choose


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_vllm_has_a_gpu_kernel_for_every_width(choose, capability):
    for width in range(2, 9):
        for symmetric in (True, False):
            chosen = choose(PackedIntegers(width, 32, symmetric), capability)
            common = width == 4 or (width == 8 and symmetric)
            expected = {"Marlin"} if common else {"Humming"}
            assert chosen in expected | ({"Humming"} if capability == (9, 0) else set())


@pytest.mark.parametrize(
    ("module", "served"),
    [
        ("model.layers.0.mlp.up_proj", {(4, 32, True), (4, 32, False), (4, None, True), (8, None, True)}),
        ("model.embed_tokens", {(width, size, True) for width in (2, 4, 8) for size in (32, None)}),
    ],
)  # fmt: skip
def test_a_cpu_has_kernels_for_few_forms(module, served):
    forms = [
        (width, size, symmetric)
        for width in range(2, 9)
        for size in (32, None)
        for symmetric in (True, False)
    ]
    found = {form for form in forms if PackedIntegers(*form).has_cpu_kernel(module)}
    assert found - {(4, None, False)} == served


@pytest.mark.parametrize("width", range(2, 9))
def test_vllm_reads_the_rows_and_zero_points_that_are_packed(monkeypatch, width):
    """Two linears that vLLM fuses, loaded by its own parameters; their bits are read one by one."""
    from vllm.model_executor import parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    rows, columns, generator = (64, 32), 96, torch.Generator().manual_seed(width)
    layout = PackedIntegers(width, 32, symmetric=False)
    first = -(2 ** (width - 1))
    integers = [
        torch.randint(first, -first, (each, columns), generator=generator).to(torch.int8) for each in rows
    ]
    zeros = [
        torch.randint(first, -first, (each, columns // 32), generator=generator).to(torch.int8)
        for each in rows
    ]

    def load(parts, packed_dim, size):
        """Into one parameter, made as by vLLM's CompressedTensorsWNA16.create_weights."""
        data = torch.zeros(size, dtype=torch.int32)
        fused = parameter.PackedvLLMParameter(
            packed_factor=Fraction(32, width), packed_dim=packed_dim, input_dim=1, output_dim=0, data=data,
            weight_loader=lambda *_: None,
        )  # fmt: skip
        offset = 0
        for part, count in zip(parts, rows, strict=True):
            fused.load_merged_column_weight(part, shard_offset=offset, shard_size=count)
            offset += count
        return fused.data

    def read_bits(words):
        """Rows of stored numbers, from the bits of little-endian words, lowest first."""
        bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
        stored = bits.flatten(1).unflatten(1, (-1, width))
        return (stored * 2 ** torch.arange(width)).sum(-1) + first

    packed = [pack_to_int32(each, width) for each in integers]
    expected = layout.parts(sum(rows), columns)
    fused = load(packed, 1, expected["weight_packed"][0])
    assert torch.equal(read_bits(fused), torch.cat(integers).long())
    points = [pack_to_int32(each, width, packed_dim=0) for each in zeros]
    fused = load(points, 0, expected["weight_zero_point"][0])
    assert torch.equal(read_bits(fused.t()), torch.cat(zeros).t().long())
    if 32 % width == 0:
        from vllm.model_executor.layers.quantization.utils.quant_utils import (
            unpack_quantized_values_into_int32,
        )
        from vllm.scalar_type import ScalarType

        found = unpack_quantized_values_into_int32(packed[0], ScalarType.uint(width, None), 1)
        assert torch.equal(found + first, integers[0].int())
