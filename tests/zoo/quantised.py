"""Edits that quantise a editable as published checkpoints are: real layouts, weights rounded to nearest."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tests.zoo.editable_checkpoint import Edit, EditableCheckpoint, Tensors

BODY = r"(?!mtp\.)(?!.*visual).*layers\.\d+\."
MLP = rf"{BODY}mlp\.(gate|up|down)_proj"
LINEARS = (
    rf"{BODY}(mlp\.(gate|up|down)_proj|self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))"
)
WIDE = rf"{BODY}(mlp\.down_proj|self_attn\.o_proj|linear_attn\.out_proj)"
"""Linears whose inputs are a multiple of 128."""
EXPERTS = rf"{BODY}mlp\.experts\.\d+\.(gate|up|down)_proj"
MTP_LAYER = r"mtp\.layers\.\d+\.(mlp|self_attn)\.\w+_proj"
HEAD = r"lm_head"
EMBEDDING = r"(?!mtp\.).*embed_tokens"

E4M3_MAX = 448.0
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Position in a word of AWQ's i-th nibble."""


def compressed_tensors(
    *groups: Mapping[str, Any],
    ignore: str = "names",
    prefix: str | None = None,
) -> Edit:
    """compressed-tensors: groups from `integers` and `floats`.

    Args:
        ignore: `names`: every linear that stays, by its name, as llmcompressor writes it; `patterns`: a few patterns;
            `anchored`: patterns with the whole name of the module.
        prefix: what the names of the text model's modules begin with in `ignore` (default: what the tensors do).
    """

    def edit(editable: EditableCheckpoint) -> None:
        packed: set[str] = set()
        for group in groups:
            for module in _modules(editable, group["pattern"]):
                weight = editable.tensors.pop(f"{module}.weight").float()
                packed.add(module)
                for part, tensor in group["parts"](weight).items():
                    editable.tensors[f"{module}.{part}"] = tensor
        left = [module for module in _linears(editable) if module not in packed]
        if prefix is not None:
            left = [re.sub(r"^model\.(language_model\.)?(?=layers)", prefix, module) for module in left]
        editable.config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": {
                f"group_{number}": {
                    "targets": [
                        *(["Linear"] if len(groups) == 1 else [f"re:{group['pattern']}$"]),
                        *(["re:.*lm_head$"] if "lm_head" in packed else []),
                        *(["re:.*embed_tokens$"] if any("embed" in module for module in packed) else []),
                    ],
                    "weights": group["weights"],
                    "input_activations": group.get("input_activations"),
                    "output_activations": None,
                    "format": group["format"],
                }
                for number, group in enumerate(groups)
            },
            "ignore": left
            if ignore == "names"
            else _ignore_patterns(left, packed, anchored=ignore == "anchored"),
        }

    return edit


def _ignore_patterns(left: Sequence[str], packed: set[str], *, anchored: bool) -> list[str]:
    if anchored:
        return [rf"re:^{re.escape(module)}$" for module in left]
    wide = [part for part in ("mtp", "visual", "lm_head") if not any(part in module for module in packed)]
    patterns = [f"re:.*{part}.*" for part in wide if any(part in module for module in left)]
    rest = [module for module in left if not any(part in module for part in wide)]
    return [*patterns, *dict.fromkeys(f"re:.*{module.split('.', 3)[-1]}$" for module in rest)]


def integers(
    pattern: str = LINEARS, bits: int = 4, group_size: int | None = 32, *, symmetric: bool = True
) -> dict[str, Any]:
    """A group of `compressed_tensors`: packed integers, a scale for each group or each row."""
    from compressed_tensors.compressors import pack_to_int32

    def parts(weight: torch.Tensor) -> Tensors:
        levels, scales, zeros = _rounded(weight, bits, group_size or weight.shape[1], symmetric)
        middle = 2 ** (bits - 1)
        packed = {
            "weight_packed": pack_to_int32((levels - middle).to(torch.int8), bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            points = (zeros - middle).to(torch.int8)
            packed["weight_zero_point"] = pack_to_int32(points, bits, packed_dim=0).contiguous()
        return packed

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    return {"pattern": pattern, "parts": parts, "weights": weights, "format": "pack-quantized"}


def floats(pattern: str = LINEARS) -> dict[str, Any]:
    """A group of `compressed_tensors`: FP8 weights, a scale for each row, inputs scaled by token."""

    def parts(weight: torch.Tensor) -> Tensors:
        scale = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).bfloat16()
        return {"weight": (weight / scale.float()).to(torch.float8_e4m3fn), "weight_scale": scale}

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "pattern": pattern,
        "parts": parts,
        "weights": weights,
        "input_activations": inputs,
        "format": "float-quantized",
    }


def int8(pattern: str = LINEARS) -> dict[str, Any]:
    """A group of `compressed_tensors`: a byte for each weight, a scale for each row, inputs scaled by token."""

    def parts(weight: torch.Tensor) -> Tensors:
        levels, scales, _ = _rounded(weight, 8, weight.shape[1], True)
        return {"weight": (levels - 128).to(torch.int8), "weight_scale": scales.bfloat16()}

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "pattern": pattern,
        "parts": parts,
        "weights": weights,
        "input_activations": inputs,
        "format": "int-quantized",
    }


def fp8_blocks(*, mtp: bool = True) -> Edit:
    """Official FP8: blocks of 128 x 128 with weight_scale_inv; of the MTP head its layer, not fc."""

    def edit(editable: EditableCheckpoint) -> None:
        for module in _modules(editable, f"{LINEARS}|{MTP_LAYER}" if mtp else LINEARS):
            weight = editable.tensors[f"{module}.weight"].float()
            whole = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128))
            blocks = whole.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scales = blocks.abs().amax((1, 3)).clamp_min(1e-12) / E4M3_MAX
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            cut = spread[: weight.shape[0], : weight.shape[1]]
            editable.tensors[f"{module}.weight"] = (weight / cut).to(torch.float8_e4m3fn)
            editable.tensors[f"{module}.weight_scale_inv"] = scales.bfloat16()
        editable.config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": _linears(editable),
        }

    return edit


def gptq(*, mtp: bool = False, act_order: bool = False) -> Edit:
    """GPTQ with 4 bits: nibbles along the inputs, zero points less one, a group index."""

    def edit(editable: EditableCheckpoint) -> None:
        _gptq_layout(editable, f"{MLP}|{MTP_LAYER}" if mtp else MLP, act_order=act_order)
        editable.config["quantization_config"] = {
            "bits": 4,
            "checkpoint_format": "gptq",
            "desc_act": act_order,
            "dynamic": {
                "-:.*attn.*": {},
                "-:.*visual.*": {},
                **({"-:.*mtp.fc": {}} if mtp else {"-:.*mtp.*": {}}),
            },
            "group_size": 32,
            "lm_head": False,
            "quant_method": "gptq",
            "sym": True,
            "true_sequential": True,
        }

    return edit


def auto_round(editable: EditableCheckpoint) -> None:
    """AutoRound in GPTQ's layout, 4 bits; what stays is listed one by one with 16 bits."""
    _gptq_layout(editable, MLP, act_order=False)
    editable.config["quantization_config"] = {
        "autoround_version": "0.9.0",
        "bits": 4,
        "block_name_to_quantize": "model.language_model.layers"
        if "text_config" in editable.config
        else "model.layers",
        "data_type": "int",
        "extra_config": {
            module: {"bits": 16, "data_type": "float"} for module in _linears(editable) if module != "lm_head"
        },
        "group_size": 32,
        "packing_format": "auto_round:auto_gptq",
        "quant_method": "auto-round",
        "sym": True,
    }


def _gptq_layout(editable: EditableCheckpoint, pattern: str, *, act_order: bool) -> None:
    for module in _modules(editable, pattern):
        weight = editable.tensors.pop(f"{module}.weight").float()
        inputs = weight.shape[1]
        order = torch.arange(inputs).flip(0) if act_order else torch.arange(inputs)
        levels, scales, zeros = _rounded(weight[:, order], 4, 32, True)
        levels = levels[:, order.argsort()]
        editable.tensors |= {
            f"{module}.qweight": _words(levels.T.unflatten(0, (-1, 8)).movedim(1, -1)),
            f"{module}.qzeros": _words((zeros.T - 1).unflatten(1, (-1, 8))),
            f"{module}.scales": scales.T.half(),
            f"{module}.g_idx": (order.argsort() // 32).to(torch.int32),
        }


def awq(editable: EditableCheckpoint) -> None:
    """AWQ (AutoAWQ's gemm layout) with 4 bits and zero points: nibbles along the outputs, interleaved."""
    for module in _modules(editable, MLP):
        weight = editable.tensors.pop(f"{module}.weight").float()
        levels, scales, zeros = _rounded(weight, 4, 32, False)
        editable.tensors |= {
            f"{module}.qweight": _words(levels.T.unflatten(1, (-1, 8))[..., _AWQ_ORDER]),
            f"{module}.qzeros": _words(zeros.T.unflatten(1, (-1, 8))[..., _AWQ_ORDER]),
            f"{module}.scales": scales.T.half(),
        }
    editable.config["quantization_config"] = {
        "bits": 4,
        "group_size": 32,
        "modules_to_not_convert": ["linear_attn", "self_attn", "mtp", "visual"],
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }


def nvfp4(editable: EditableCheckpoint) -> None:
    """ModelOpt's NVFP4: two E2M1 numbers in a byte, an E4M3 scale for sixteen, one scale for the weight."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for module in _modules(editable, LINEARS):
        weight = editable.tensors[f"{module}.weight"].float()
        groups = weight.unflatten(1, (-1, 16))
        largest = groups.abs().amax(2)
        whole = largest.max() / (6 * E4M3_MAX)
        scales = (largest / 6 / whole).clamp_min(2**-9).to(torch.float8_e4m3fn)
        scaled = (groups / (scales.float() * whole)[:, :, None]).flatten(1)
        nearest = (scaled.abs()[:, :, None] - numbers).abs().argmin(2)
        halves = (nearest + 8 * (scaled < 0)).to(torch.uint8)
        editable.tensors |= {
            f"{module}.weight": halves[:, ::2] | halves[:, 1::2] << 4,
            f"{module}.weight_scale": scales,
            f"{module}.weight_scale_2": whole,
            f"{module}.input_scale": torch.tensor(1.0),
        }
    editable.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        "ignore": ["lm_head", "mtp*", "*linear_attn.in_proj_a", "*linear_attn.in_proj_b"],
        "kv_cache_scheme": None,
        "producer": {"name": "modelopt", "version": "0.39.0"},
    }


def _rounded(
    weight: torch.Tensor, bits: int, group_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels from 0 to 2^bits - 1 as int64 [rows, columns], scales and zero points [rows, groups]."""
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    top = 2**bits - 1
    if symmetric:
        scales = (torch.maximum(-low, high) * 2 / top).clamp_min(1e-8).bfloat16().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((high - low) / top).clamp_min(1e-8).bfloat16().float()
        zeros = (-low / scales).round().clamp(0, top)
    levels = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, top)
    return levels.flatten(1).long(), scales, zeros.long()


def _words(nibbles: torch.Tensor) -> torch.Tensor:
    """int64 [..., 8], the lowest bits first, as int32 [...]."""
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _modules(editable: EditableCheckpoint, pattern: str) -> list[str]:
    tables = [
        name.removesuffix(".weight") for name in editable.tensors if name.endswith("embed_tokens.weight")
    ]
    return [module for module in [*_linears(editable), *tables] if re.fullmatch(pattern, module)]


def _linears(editable: EditableCheckpoint) -> list[str]:
    return list(dict.fromkeys([*_matrices(editable), "lm_head"]))


def _matrices(editable: EditableCheckpoint) -> Iterator[str]:
    for name, tensor in editable.tensors.items():
        module = name.removesuffix(".weight")
        is_floating = tensor.is_floating_point() and tensor.element_size() > 1
        if name.endswith(".weight") and tensor.dim() == 2 and is_floating and "embed" not in module:
            yield module
