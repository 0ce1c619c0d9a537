"""A model that llmcompressor has calibrated in memory, as tensors and settings of a checkpoint."""

from collections.abc import Collection, Mapping
from typing import Any

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import quantisation, quantised
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, from_torch, torch_dtype
from slimqwen.checkpoint.weights import TEXT_PART, text_name


def pack_model(model: Any, stored: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Pack the rounded weights into integers in place; the quantization_config that describes them as stored."""
    from compressed_tensors import ModelCompressor, __version__

    infos = {text_name(name): info for name, info in stored.items()}
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            # The scale is rounded first, so that the integers are chosen for the scale that is stored.
            dtype = torch_dtype(infos[f"{name}.weight"].dtype)
            module.weight_scale.data = module.weight_scale.data.to(dtype).float()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    quantization: dict[str, Any] = compressor.quantization_config.model_dump(
        mode="json", exclude={"quant_method"}
    )
    ignore = [*quantization["ignore"], packing.UNPACKED_MTP]
    if any(name.startswith(TEXT_PART) for name in stored):
        ignore = [name.replace("model.", TEXT_PART, 1) for name in ignore] + [packing.VISION_TOWER]
    return {"quant_method": "compressed-tensors", "version": __version__, **quantization, "ignore": ignore}


def with_quantisation(
    config: Mapping[str, Any], quantization: dict[str, Any], stored: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """The config with the layers' quantisation, and with that of what was packed beside them before."""
    packed = [name.removesuffix(packing.PACKED) for name in stored if name.endswith(packing.PACKED)]
    changed = quantised(config, quantization)
    for kind, group in quantisation(config).get("config_groups", {}).items():
        modules = [module for module in packed if module.startswith(kind)]
        changed = quantised(config, packing.with_group(changed, kind, group, modules))
    return changed


def stored_replacements(
    model: Any, targets: Collection[str], stored: Mapping[str, TensorInfo]
) -> dict[str, Mapping[str, NewTensor]]:
    """What the calibrated model has in the stead of each stored tensor; the others stay as they are."""
    state = model.state_dict()
    replacements: dict[str, Mapping[str, NewTensor]] = {}
    for name, info in stored.items():
        text = text_name(name)
        if name in targets:
            parts = {part: tensor for part, tensor in state.items() if part.startswith(f"{text}_")}
        else:
            parts = {text: state[text]} if text in state else {}
        if parts:
            replacements[name] = {
                part.replace(text, name): from_torch(tensor, info.dtype) for part, tensor in parts.items()
            }
    return replacements
