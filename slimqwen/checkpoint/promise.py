"""The tensors that a config.json promises, and checks that the stored ones are these."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import quantisation, read_config, text_config
from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.tensors import TensorInfo, list_tensors
from slimqwen.checkpoint.weights import Weight, group_parts, holds_mtp_head
from slimqwen.formats import find_format
from slimqwen.formats.format import FLOATING, Format, Parts, UnsupportedFormatError

Shapes = dict[str, tuple[int, ...]]

_CACHE_SCALES = (".k_scale", ".v_scale")
"""Ends of the names of the scales of an 8-bit KV cache."""

_PACKABLE = re.compile(r"(?:^|\.)(?:layers\.\d+\..*proj\w*|mtp\.fc|lm_head|embed_tokens|draft_head)$")
"""Linears and tables, of which config.json says how they are stored."""

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<linear>gate_up_proj|down_proj)")


def check_form(folder: Path) -> None:
    """Check in milliseconds that vLLM would load the weights as they are stored.

    Raises:
        UnsupportedFormatError: a linear is quantised in config.json but not in the files, or the other way round; vLLM
            would use another output head than the stored one; the weights are in an order that vLLM does not read; or
            there are scales of a KV cache that it would not read.
        CorruptCheckpointError: config.json, index or a header is missing or damaged, or only a part of the MTP head or
            draft head that config.json announces is there.
    """
    config = read_config(folder)
    form, stored = find_format(quantisation(config)), list_tensors(folder)
    _check_output_head(folder, config, stored)
    holds_mtp_head(config, stored)
    draft_head.refuse_lost(folder, config, stored)
    if fault := form.refused():
        raise UnsupportedFormatError(f"{folder} {fault}")
    scales = [name for name in stored if name.endswith(_CACHE_SCALES)]
    if scales and form.needs_cache_scheme and not form.settings.get("kv_cache_scheme"):
        raise UnsupportedFormatError(
            f"{folder} has scales of an 8-bit KV cache ({scales[0]}), which vLLM does not read without "
            "kv_cache_scheme in quantization_config of config.json; copy kv_cache_scheme from the original checkpoint"
        )
    if not form.is_exact:
        return
    for name, weight in group_parts(stored, form.settings).items():
        module = name.removesuffix(".weight")
        is_packable = name.endswith(".weight") and _PACKABLE.search(module)
        if is_packable and form.packs(module) != weight.is_quantised:
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
    packed = [
        name for name in tensors if ".embed_tokens." in name and not name.endswith("embed_tokens.weight")
    ]
    if ties and packed:
        # vLLM's tie_weights takes the `weight` of the embedding, which a packed one does not have.
        raise UnsupportedFormatError(
            f"{folder} ties its output head to a packed embedding ({packed[0]}), which vLLM cannot do; make it "
            "anew from the checkpoint in 16 bits with the stage quantise_embedding, which stores lm_head.weight, too"
        )
    if ties is stored and any(name.endswith("embed_tokens.weight") for name in tensors):
        flag = "false" if stored else "true"
        raise UnsupportedFormatError(
            f"{folder} {'has an' if stored else 'has no'} lm_head of its own, but its config.json tells vLLM the "
            f"contrary; set tie_word_embeddings to {flag}{', in text_config too' if 'text_config' in config else ''}"
        )


def check_tensors(folder: Path) -> None:
    """Compare the stored tensors with those that config.json promises, quantised ones by the rules of their format.

    Raises:
        CorruptCheckpointError: config.json is unusable, or a tensor is missing, unexpected or other than promised.
        UnsupportedFormatError: the installed transformers has no such model class.
    """
    expected, stored = expected_tensors(folder), list_tensors(folder)
    for name, (shape, dtypes) in expected.items():
        if name not in stored:
            raise CorruptCheckpointError(f"{folder} lacks the tensor {name}, which its config.json promises")
        actual = list(stored[name].shape)
        if (actual or [1]) != list(shape or (1,)):  # a single number may be a scalar
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


def expected_tensors(folder: Path) -> Parts:
    """The tensors that config.json promises: those of the model class that it names, built on the meta device.

    Where the format is not exact (`Format.is_exact`), a weight may be stored packed or unpacked. In a layout that is
    not known here, the stored tensors count as promised.

    Returns:
        Name of the tensor -> its shape, and the dtypes that it may have.

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
    # The class is built without quantisation; the loop over `packable` below finds out how each is stored.
    settings.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(settings)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    text = text_config(config)
    if text.get("tie_word_embeddings") and not any(name.startswith("lm_head.") for name in stored):
        shapes.pop("lm_head.weight", None)
    packable = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or name.endswith("embed_tokens")
    ]
    drafts = holds_mtp_head(config, stored)
    shapes |= _mtp_shapes(text, shapes) if drafts else {}
    if drafts and (rows := text.get(draft_head.SIZE_KEY)):
        shapes[draft_head.WEIGHT] = (rows, text["hidden_size"])
    shapes = dict(_with_single_experts(shapes, stored))
    packable += [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and (name.startswith("mtp.") or ".experts." in name)
    ]
    # All weights are of one 16-bit dtype, whatever config.json says: engines convert as they load.
    dtypes = Counter(info.dtype for info in stored.values() if info.dtype in ("BF16", "F16"))
    floating = (*(dtype for dtype, _ in dtypes.most_common(1)), "F32")
    expected: Parts = {name: (shape, floating) for name, shape in shapes.items()}
    if draft_head.WEIGHT in shapes:
        expected[draft_head.TOKEN_IDS] = (shapes[draft_head.WEIGHT][:1], ("I64",))
    form = find_format(quantisation(config))
    if form.settings:
        weights = group_parts(stored, form.settings)
        for module in packable:
            name = f"{module}.weight"
            if name in expected and (parts := _parts(module, expected[name][0], form, weights.get(name))):
                del expected[name]
                expected |= {f"{module}.{part}": promise for part, promise in parts.items()}
        expected |= {
            name: (info.shape, FLOATING) for name, info in stored.items() if name.endswith(_CACHE_SCALES)
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


def _parts(module: str, shape: tuple[int, ...], form: Format, weight: Weight | None) -> Parts:
    """The tensors as which a quantised weight has to be stored; empty for a weight that is not quantised."""
    stored = {} if weight is None else weight.parts
    as_stored: Parts = {part: (info.shape, (info.dtype,)) for part, info in stored.items()}
    if not (form.packs(module) if form.is_exact else weight is not None and weight.is_quantised):
        return {}
    layout = next(iter(form.layouts_of(module)), None)
    if layout is None:
        return as_stored
    optional = {part: as_stored[part] for part in layout.optional if part in stored}
    return optional | {
        part: each for part, each in layout.parts(*shape).items() if part not in layout.optional
    }
