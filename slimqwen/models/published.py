"""The tensors of a published checkpoint, computed from its config.json and the names in its safetensors index."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import quantisation
from slimqwen.formats import PART, find_format
from slimqwen.formats.format import Format, UnsupportedFormatError
from slimqwen.models.shape import Shape, Tensors, parts_of, with_first_experts


def published_tensors(config: Mapping[str, Any], names: AbstractSet[str] | None = None) -> Tensors:
    """Compute every tensor of the language model and its MTP head, as a checkpoint stores them.

    The experts of a layer are one tensor, with its own name or that of the first expert. A draft head, which an index
    does not list, is included if config.json announces it and there is an MTP head.

    Args:
        config: config.json of a known family and format.
        names: tensor names that the checkpoint's index lists, which show what is quantised; None to go by config.json
            alone.

    Raises:
        FamilyError: the family is not known.
        UnsupportedFormatError: the sizes of tensors in the format are not known.
    """
    form, plain = find_format(quantisation(config)), Shape.of_config(config).tensors
    if not form.is_known:
        raise _unknown(form)
    if names is not None and any(name.startswith("mtp.") for name in names):
        names = names | {name for name in plain if name.startswith(draft_head.PREFIX)}
    first_experts = with_first_experts(plain)
    # Quantised mixtures store their experts one by one; others may store all of a layer in one tensor.
    if form.settings if names is None else not names & {name for name in plain if name not in first_experts}:
        plain = first_experts
    matches = map(PART.fullmatch, names or ())
    quantised = {match["module"] for match in matches if match and match["part"] != "weight"}
    stored: Tensors = {}
    for name, (dtype, dimensions) in plain.items():
        module = name.removesuffix(".weight")
        is_matrix = name != module and (len(dimensions) == 2 or ".experts." in name)
        if is_matrix and (form.packs(module) if names is None else module in quantised):
            if not (layouts := form.layouts_of(module)):
                raise _unknown(form)
            stored |= parts_of(name, dimensions, layouts[0])
        else:
            stored[name] = dtype, dimensions
    return stored if names is None else {name: stored[name] for name in stored if name in names}


def _unknown(form: Format) -> UnsupportedFormatError:
    found = f"in the format {form.method}" if form.method else "without a quant_method"
    return UnsupportedFormatError(
        f"config.json: the sizes of weights {found} are not known here; take a checkpoint in compressed-tensors, FP8, "
        "NVFP4, GPTQ or AWQ"
    )
