"""The tensors of a published checkpoint, computed from its config.json and the names in its safetensors index."""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from slimqwen.checkpoint import draft_head, packing
from slimqwen.checkpoint.config import quantisation
from slimqwen.checkpoint.errors import UnsupportedFormatError
from slimqwen.checkpoint.promise import compressed_parts
from slimqwen.models.shape import Shape, Tensors, with_first_experts

_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2")
_NVFP4_GROUP = 16


def published_tensors(config: Mapping[str, Any], names: AbstractSet[str] | None = None) -> Tensors:
    """Every tensor of the language model and its MTP head, as a checkpoint stores them.

    All experts of a layer are one tensor, with the name that it has or that of the first expert.

    Args:
        config: config.json of a known family and format.
        names: names that the checkpoint's index lists; None: config.json alone says which linears are quantised, and
            all tensors that it promises are returned. An index does not list a draft head: it counts where config.json
            announces it and the names have an MTP head.

    Raises:
        FamilyError: the family is not known.
        UnsupportedFormatError: the sizes of tensors in the format are not known.
    """
    form, plain = quantisation(config), Shape.of_config(config).tensors
    if names is not None and any(name.startswith("mtp.") for name in names):
        names = names | {name for name in plain if name.startswith(draft_head.PREFIX)}
    first_experts = with_first_experts(plain)
    # Quantised mixtures store their experts one by one; others may store all of a layer in one tensor.
    if form if names is None else not names & {name for name in plain if name not in first_experts}:
        plain = first_experts
    stored: Tensors = {}
    for name, (dtype, dimensions) in plain.items():
        module = name.removesuffix(".weight")
        is_expert = ".experts." in name
        is_linear = name != module and (len(dimensions) == 2 or is_expert) and "embed_tokens" not in name
        if form and is_linear and _is_quantised(module, form, names):
            *experts, rows, columns = dimensions
            stored |= {
                f"{module}.{part}": (kind, (*experts, *size))
                for part, (kind, size) in _parts(rows, columns, module, form).items()
            }
        else:
            stored[name] = dtype, dimensions
    return stored if names is None else {name: stored[name] for name in stored if name in names}


def _is_quantised(module: str, form: Mapping[str, Any], names: AbstractSet[str] | None) -> bool:
    if names is not None:
        return f"{module}.weight" not in names or any(f"{module}.{scale}" in names for scale in _SCALES)
    if form.get("quant_method") == "compressed-tensors":
        return packing.group_of(module, form) is not None
    if module == "lm_head":
        return bool(form.get("lm_head"))
    return not any(re.search(pattern, module) for pattern in _left_patterns(form))


def _left_patterns(form: Mapping[str, Any]) -> Iterator[str]:
    """Regular expressions for the modules that FP8, AWQ, GPTQ, AutoRound and modelopt leave in 16 bits."""
    for key in ("modules_to_not_convert", "ignore", "exclude_modules"):
        for entry in form.get(key) or ():
            yield rf"(^|\.){re.escape(entry).replace(re.escape('*'), '.*')}(\.|$)"
    for pattern in form.get("dynamic") or ():
        if pattern.startswith("-:"):
            yield f"^{pattern[2:]}"
    for module, settings in (form.get("extra_config") or {}).items():
        if settings.get("bits", 0) >= 16:
            yield rf"^{re.escape(module)}$"


def _parts(rows: int, columns: int, module: str, form: Mapping[str, Any]) -> Tensors:
    """The tensors of a quantised linear: end of the name -> dtype and shape."""
    method = form.get("quant_method")
    if method == "compressed-tensors":
        groups = [group for group in form["config_groups"].values() if group.get("weights")]
        group = packing.group_of(module, form) or groups[0]
        promised = compressed_parts((rows, columns), group, str(group.get("format") or form.get("format")))
        parts = {part: (dtypes[0], size) for part, (size, dtypes) in promised.items()}
    elif method == "fp8":
        height, width = form.get("weight_block_size") or (rows, columns)
        scale = "weight_scale_inv" if form.get("weight_block_size") else "weight_scale"
        parts = {
            "weight": ("F8_E4M3", (rows, columns)),
            scale: ("BF16", (-(-rows // height), -(-columns // width))),
        }
    elif method == "modelopt" and str(form.get("quant_algo", "NVFP4")) == "NVFP4":
        parts = {
            "weight": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", (rows, columns // _NVFP4_GROUP)),
            "weight_scale_2": ("F32", (1,)),
            "input_scale": ("F32", (1,)),
        }
    elif method == "modelopt" and form.get("quant_algo") == "FP8":
        parts = {
            "weight": ("F8_E4M3", (rows, columns)),
            "weight_scale": ("F32", (1,)),
            "input_scale": ("F32", (1,)),
        }
    elif method in ("awq", "gptq", "auto-round"):
        per_word, size = 32 // form["bits"], form["group_size"]
        groups_of_row = columns // size if size > 0 else 1
        words = (columns, rows // per_word) if method == "awq" else (columns // per_word, rows)
        parts = {
            "qweight": ("I32", words),
            "qzeros": ("I32", (groups_of_row, rows // per_word)),
            "scales": ("F16", (groups_of_row, rows)),
            **({} if method == "awq" else {"g_idx": ("I32", (columns,))}),
        }
    else:
        parts = {}
    if not parts:
        found = f"in the format {method}" if method else "without a quant_method"
        raise UnsupportedFormatError(
            f"config.json: the sizes of weights {found} are not known here; take "
            "a checkpoint in compressed-tensors, FP8, NVFP4, GPTQ or AWQ"
        )
    return parts
