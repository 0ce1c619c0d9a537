"""Converts layers that llmcompressor has calibrated to tensors and settings of a checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import quantisation, quantised
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, from_torch, torch_dtype
from slimqwen.checkpoint.weights import TEXT_PART, text_name
from slimqwen.formats.compressed_tensors import METHOD, matches, with_group


@contextmanager
def released_session() -> Iterator[None]:
    """Free the model at the end of a `with` block: drop llmcompressor's global references to it."""
    from llmcompressor import reset_session
    from torch.fx import _symbolic_trace

    # This registry keeps every namespace with a wrapped function, and those of llmcompressor's traces have the model.
    namespaces = _symbolic_trace._wrapped_fns_to_patch
    known = dict(namespaces)
    try:
        yield
    finally:
        namespaces.clear()
        namespaces.update(known)
        reset_session()


def describe_quantisation(model: Any, settings: Any, stored: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The quantization_config of a model whose linears are packed as llmcompressor's settings say.

    Args:
        model: the whole model, whose parameters may be on the meta device (`build_empty_model`).
        settings: a QuantizationConfig of compressed-tensors.
        stored: tensors of the checkpoint by name.
    """
    from compressed_tensors import ModelCompressor, __version__
    from compressed_tensors.quantization import QuantizationStatus, apply_quantization_config

    apply_quantization_config(model, settings)
    form = ModelCompressor.from_pretrained_model(model).quantization_config
    form.quantization_status = QuantizationStatus.COMPRESSED
    quantization: dict[str, Any] = form.model_dump(mode="json", exclude={"quant_method"})
    ignore = [*quantization["ignore"], packing.UNPACKED_MTP]
    if any(name.startswith(TEXT_PART) for name in stored):
        ignore = [name.replace("model.", TEXT_PART, 1) for name in ignore] + [packing.VISION_TOWER]
    return {"quant_method": METHOD, "version": __version__, **quantization, "ignore": ignore}


def with_quantisation(
    config: Mapping[str, Any], quantization: dict[str, Any], stored: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """Return a config with the layers' quantisation added; that of the KV cache and of linears packed before is kept.

    Args:
        config: config.json before calibration.
        quantization: quantization_config of the layers, from `describe_quantisation`.
        stored: tensors of the checkpoint by name.
    """
    packed = [name.removesuffix(packing.PACKED) for name in stored if name.endswith(packing.PACKED)]
    scheme = quantisation(config).get("kv_cache_scheme")
    changed = quantised(config, {**quantization, **({"kv_cache_scheme": scheme} if scheme else {})})
    for kind, group in quantisation(config).get("config_groups", {}).items():
        modules = [module for module in packed if any(matches(target, module) for target in group["targets"])]
        changed = quantised(config, with_group(quantisation(changed), kind, group, modules))
    return changed


def pack_layer(layer: Any, stored: Mapping[str, TensorInfo]) -> dict[str, dict[str, NewTensor]]:
    """Pack the rounded weights of a calibrated layer in place, and return the tensors that replace stored ones.

    Args:
        layer: a layer from `load_layer` that llmcompressor has calibrated.
        stored: tensors of the checkpoint by name.

    Returns:
        Name of a stored tensor of this layer -> its replacements by name; empty if no weight of the layer is rounded.
    """
    from compressed_tensors import ModelCompressor

    infos = {text_name(name): info for name, info in stored.items()}
    packed = set()
    for name, module in layer.named_modules():
        if hasattr(module, "weight_scale"):
            packed.add(f"{name}.weight")
            # The scale is rounded first, so that the integers fit the scale that is stored.
            dtype = torch_dtype(infos[f"{name}.weight"].dtype)
            module.weight_scale.data = module.weight_scale.data.to(dtype).float()
    if not packed:
        return {}
    ModelCompressor.from_pretrained_model(layer).compress_model(layer)
    state = layer.model.layers.state_dict(prefix="model.layers.")
    replacements: dict[str, dict[str, NewTensor]] = {}
    for name, info in stored.items():
        text = text_name(name)
        if text in packed:
            parts = {part: tensor for part, tensor in state.items() if part.startswith(f"{text}_")}
        else:
            parts = {text: state[text]} if text in state else {}
        if parts:
            replacements[name] = {
                part.replace(text, name): from_torch(tensor, info.dtype) for part, tensor in parts.items()
            }
    return replacements
