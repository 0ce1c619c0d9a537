"""The tensors that a config.json promises, and checks that the stored ones are these."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slimqwen.checkpoint import draft_head, packing
from slimqwen.checkpoint.config import quantisation, read_config, text_config
from slimqwen.checkpoint.errors import CorruptCheckpointError, UnsupportedFormatError
from slimqwen.checkpoint.tensors import TensorInfo, list_tensors
from slimqwen.checkpoint.weights import Weight, group_parts, holds_mtp_head

Shapes = dict[str, tuple[int, ...]]

ExpectedTensors = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Tensor name -> its shape and the dtypes it may have."""

_FLOATING = ("BF16", "F16", "F32")
"""Dtypes that scales may have; engines convert between them as they load."""

_FP8 = ("F8_E4M3", "F8_E5M2")
_KNOWN_METHODS = {
    *("", "compressed-tensors", "gptq", "auto_gptq", "awq", "auto_awq", "auto-round", "inc", "fp8"),
}
_CACHE_SCALES = (".k_scale", ".v_scale")
"""Ends of the names of the scales of an 8-bit KV cache."""

_LINEAR = re.compile(r"(?:^|\.)(?:layers\.\d+\..*proj\w*|mtp\.fc|lm_head)$")
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<linear>gate_up_proj|down_proj)")


def check_form(folder: Path) -> None:
    """Check in milliseconds that vLLM would load the weights as they are stored.

    Raises:
        UnsupportedFormatError: a linear is quantised in config.json but not in the files, or the other way round; vLLM
            would use another output head than the stored one; the weights are in an order that vLLM does not read; or
            there are scales of a KV cache that it would not read.
        CorruptCheckpointError: as `list_tensors`, `holds_mtp_head` and `draft_head.refuse_lost`.
    """
    config = read_config(folder)
    form, stored = quantisation(config), list_tensors(folder)
    _check_output_head(folder, config, stored)
    holds_mtp_head(config, stored)
    draft_head.refuse_lost(folder, config, stored)
    settings = [form, *(group.get("weights") or {} for group in form.get("config_groups", {}).values())]
    for each in settings:
        is_ordered = each.get("desc_act") is True or each.get("actorder") in ("group", "dynamic", True)
        if is_ordered and each.get("group_size") != -1:
            raise UnsupportedFormatError(
                f"{folder} is quantised in activation order (desc_act=true or actorder=group), which vLLM no longer "
                "loads; use a checkpoint with desc_act=false or actorder=static"
            )
    scales = [name for name in stored if name.endswith(_CACHE_SCALES)]
    reads_any = form.get("quant_method", "compressed-tensors") != "compressed-tensors"
    if scales and not reads_any and not form.get("kv_cache_scheme"):
        raise UnsupportedFormatError(
            f"{folder} has scales of an 8-bit KV cache ({scales[0]}), which vLLM does not read without "
            "kv_cache_scheme in quantization_config of config.json; add that of the checkpoint that had it"
        )
    if form.get("quant_method") != "compressed-tensors":
        return
    for name, weight in group_parts(stored, form).items():
        module = name.removesuffix(".weight")
        is_linear = name.endswith(".weight") and _LINEAR.search(module)
        if is_linear and (packing.group_of(module, form) is not None) != weight.is_quantised:
            found, promised = (
                ("quantised", "in 16 bits") if weight.is_quantised else ("in 16 bits", "quantised")
            )
            raise UnsupportedFormatError(
                f"{folder}: {module} is stored {found}, but quantization_config of config.json (targets, ignore) says "
                f"that it is {promised}; use another checkpoint"
            )


def _check_output_head(folder: Path, config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    # vLLM builds the head by the inner flag of a nested config, and raises nothing if the head stays uninitialised.
    inner = config.get("text_config", config)
    stored = any(name.startswith("lm_head.") for name in tensors)
    ties = bool(inner.get("tie_word_embeddings")) and not (stored and config.get("tie_word_embeddings"))
    if ties is stored and any(name.endswith("embed_tokens.weight") for name in tensors):
        flag = "false" if stored else "true"
        raise UnsupportedFormatError(
            f"{folder} {'has an' if stored else 'has no'} lm_head of its own, but its config.json tells vLLM the "
            f"contrary; set tie_word_embeddings to {flag}{', in text_config too' if 'text_config' in config else ''}"
        )


def check_tensors(folder: Path) -> None:
    """Compare the stored tensors with those that config.json promises, quantised ones by the rules of their format.

    Raises:
        CorruptCheckpointError: a tensor is missing, unexpected or other than promised; or as `expected_tensors`.
    """
    expected, stored = expected_tensors(folder), list_tensors(folder)
    for name, (shape, dtypes) in expected.items():
        if name not in stored:
            raise CorruptCheckpointError(f"{folder} lacks the tensor {name}, which its config.json promises")
        if stored[name].shape != shape:
            actual = list(stored[name].shape)
            raise CorruptCheckpointError(
                f"{folder}: {name} has shape {actual}, config.json says {list(shape)}"
            )
        if stored[name].dtype not in dtypes:
            raise CorruptCheckpointError(
                f"{folder}: {name} is {stored[name].dtype}, not {' or '.join(dtypes)} as its config.json and the other "
                "tensors say"
            )
    for name in stored:
        if name not in expected:
            raise CorruptCheckpointError(
                f"{folder} has the tensor {name}, which its config.json does not promise"
            )


def unknown_format(folder: Path) -> str | None:
    """The quant_method of a checkpoint if it is unknown here, so that any tensors are accepted; None if it is known."""
    method = str(quantisation(read_config(folder)).get("quant_method", ""))
    return None if method in _KNOWN_METHODS else method


def expected_tensors(folder: Path) -> ExpectedTensors:
    """The tensors that config.json promises: those of the model class that it names, built on the meta device.

    The config of compressed-tensors says which linears are packed. In other formats a linear may be stored packed or
    unpacked. For a format that is not known here, the stored tensors count as promised.

    Raises:
        CorruptCheckpointError: config.json is unusable.
        UnsupportedFormatError: the installed transformers has no such model class.
    """
    # Slow to import, and only `checkpoint.verify` needs them.
    import torch
    import transformers

    config, stored = read_config(folder), list_tensors(folder)
    architecture = config["architectures"][0]
    if not hasattr(transformers, architecture):
        raise UnsupportedFormatError(
            f"{folder / 'config.json'}: the installed transformers has no class {architecture}; use a checkpoint of "
            "another model"
        )
    try:
        settings = transformers.AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise CorruptCheckpointError(
            f"transformers cannot use {folder / 'config.json'} ({' '.join(str(error).split())[:200]})"
        ) from None
    # The class is built without quantisation; the loop over `linears` below finds out how each is stored.
    settings.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(settings)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    text = text_config(config)
    if text.get("tie_word_embeddings") and not any(name.startswith("lm_head.") for name in stored):
        shapes.pop("lm_head.weight", None)
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    drafts = holds_mtp_head(config, stored)
    shapes |= _mtp_shapes(text, shapes) if drafts else {}
    shapes = dict(_with_single_experts(shapes, stored))
    linears += [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and (name.startswith("mtp.") or ".experts." in name)
    ]
    # All weights are of one 16-bit dtype, whatever config.json says: engines convert as they load.
    dtypes = Counter(info.dtype for info in stored.values() if info.dtype in ("BF16", "F16"))
    floating = (*(dtype for dtype, _ in dtypes.most_common(1)), "F32")
    expected: ExpectedTensors = {name: (shape, floating) for name, shape in shapes.items()}
    if drafts and (rows := text.get(draft_head.SIZE_KEY)):
        expected[draft_head.WEIGHT] = ((rows, text["hidden_size"]), floating)
        expected[draft_head.TOKEN_IDS] = ((rows,), ("I64",))
    if form := quantisation(config):
        weights = group_parts(stored, form)
        for module in linears:
            name = f"{module}.weight"
            if name in expected and (parts := _parts(module, expected[name][0], form, weights.get(name))):
                del expected[name]
                expected |= {f"{module}.{part}": promise for part, promise in parts.items()}
        expected |= {
            name: (info.shape, _FLOATING) for name, info in stored.items() if name.endswith(_CACHE_SCALES)
        }
    return expected


def _mtp_shapes(text: Mapping[str, Any], shapes: Shapes) -> Shapes:
    count, hidden = text.get("mtp_num_hidden_layers", 0), text["hidden_size"]
    if not count:
        return {}
    # An MTP layer has the shapes of the backbone's full-attention layers.
    prefix = f"layers.{text['layer_types'].index('full_attention')}."
    layer = {name.split(prefix)[1]: shape for name, shape in shapes.items() if prefix in name}
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{norm}.weight": (hidden,) for norm in norms},
        **{f"mtp.layers.{i}.{name}": shape for i in range(count) for name, shape in layer.items()},
    }


def _with_single_experts(
    shapes: Shapes, stored: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes, split by expert where the checkpoint stores its experts one by one, as quantised ones do."""
    for name, shape in shapes.items():
        match = _EXPERT.fullmatch(name)
        if match is None or name in stored:
            yield name, shape
            continue
        count, rows, columns = shape
        split = ("gate_proj", "up_proj") if match["linear"] == "gate_up_proj" else ("down_proj",)
        for expert in range(count):
            for linear in split:
                yield f"{match['experts']}.{expert}.{linear}.weight", (rows // len(split), columns)


def _parts(
    module: str, shape: tuple[int, ...], form: Mapping[str, Any], weight: Weight | None
) -> ExpectedTensors:
    """The tensors as which a quantised linear has to be stored; empty for a linear that is not quantised."""
    stored = {} if weight is None else weight.parts
    as_stored: ExpectedTensors = {part: (info.shape, (info.dtype,)) for part, info in stored.items()}
    if form.get("quant_method") == "compressed-tensors":
        group = packing.group_of(module, form)
        if group is None:
            return {}
        required = compressed_parts(shape, group, str(group.get("format") or form.get("format")))
        # Parts that may be there although the config does not promise them: order of groups, scales of inputs.
        optional = {part for part in stored if part.startswith("input_") or part == "weight_g_idx"}
        return {part: as_stored[part] for part in optional} | required if required else as_stored
    if weight is None or not weight.is_quantised:
        return {}
    if weight.shape != shape:
        raise CorruptCheckpointError(
            f"{weight.carrier.file}: quantised {module} has shape {list(weight.shape)}, config.json says {list(shape)}"
        )
    if weight.block is not None:
        scales = tuple(-(-size // side) for size, side in zip(shape, weight.block, strict=True))
        as_stored["weight_scale_inv"] = (scales, _FLOATING)
    elif "weight" in stored:
        as_stored.setdefault("weight_scale", ((1,), _FLOATING))
    return as_stored


def compressed_parts(shape: tuple[int, ...], group: Mapping[str, Any], form: str) -> ExpectedTensors:
    """The tensors of a linear in a format of compressed-tensors; none for an unknown format.

    Args:
        shape: [rows, columns] of the unquantised weight.
        group: config group of the linear.
        form: name of the format.
    """
    rows, columns = shape
    weights = group["weights"]
    bits, size = weights["num_bits"], weights.get("group_size") or -1
    scale: tuple[int, ...] = (rows, -(-columns // size) if size > 0 else 1)
    if weights.get("strategy") == "tensor":
        scale = (1,)
    elif weights.get("strategy") == "block":
        scale = tuple(-(-side // part) for side, part in zip(shape, weights["block_structure"], strict=True))
    scales: ExpectedTensors = {"weight_scale": (scale, _FLOATING)}
    if form in ("int-quantized", "float-quantized", "naive-quantized"):
        return {"weight": (shape, ("I8",) if weights.get("type") == "int" else _FP8), **scales}
    if form == "nvfp4-pack-quantized":
        words = {"weight_packed": ((rows, columns // 2), ("U8",)), "weight_global_scale": ((1,), _FLOATING)}
        return {**words, "weight_scale": (scale, _FP8)}
    if form != "pack-quantized":
        return {}
    per_word = 32 // bits
    scales["weight_packed"] = ((rows, -(-columns // per_word)), ("I32",))
    scales["weight_shape"] = ((2,), ("I64", "I32"))
    if not weights["symmetric"]:
        scales["weight_zero_point"] = ((-(-rows // per_word), scale[1]), ("I32",))
    return scales
