"""The stage `calibrate`: AWQ by llmcompressor, then weights of 2 to 8 bits by round-to-nearest or GPTQ.

AWQ (Lin et al., arXiv 2306.00978) moves scale from the inputs of the weights into the layer before, so that channels
with large activations lose least when the weights are rounded; llmcompressor searches the scales and rounds. It gets
one decoder layer at a time, as a model of its own, with the hidden states of the layer before; the changed layer is
packed into a file before the next one is loaded. Memory therefore grows with the size of a layer and of the text, not
of the model. The output is written tensor by tensor from the source: what was not calibrated stays byte for byte.

The MTP head, which llmcompressor does not know, is rounded to nearest, or by GPTQ with its inputs while it drafts on
the outputs that `sample_outputs` wrote (`slimqwen.models.mtp_rounding`). A worse draft costs time, never a response.
Neither needs a text of its own, so a recipe may do it after stages that train the head of an already packed checkpoint.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import quantised, write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, list_tensors, rewrite
from slimqwen.formats import find_format
from slimqwen.formats.compressed_tensors import ADDED, config_group, with_group
from slimqwen.models.calibrated_model import with_quantisation
from slimqwen.models.families import NORMS, SCALED_WITH, FamilyError, find_family
from slimqwen.models.outline import Outline
from slimqwen.progress import Progress
from slimqwen.recipe import head_rounding
from slimqwen.recipe.allocation import DRAWS, WIDTHS, Allocation, allocate_widths
from slimqwen.recipe.calibration_text import calibration_sequences
from slimqwen.recipe.layer_calibration import BATCH, calibrate_layers
from slimqwen.recipe.schemes import (
    HEALED_SEQUENCES,
    CalibrateParameters,
    config_groups,
    forms_of,
    packing_of,
)
from slimqwen.recipe.stage import (
    TORCH_ENVIRONMENT,
    D,
    Facts,
    Fault,
    Needs,
    Stage,
    StageError,
    require_fit,
)
from slimqwen.recipe.text_check import inspect_text

_CHECKED_TOKENS = 2048
"""Tokens on which layers are compared with round-to-nearest: few suffice, and their hidden states fill memory."""

_SEARCH_PASSES = 42
"""Forward passes of a target in about two AWQ searches, each with 20 grid points and the exact pass."""

_PASSES = 4
"""Other forward passes of a target."""

_STATES = 7
"""Hidden states in memory per token: inputs and outputs of a layer and of its two halves, and rounded outputs."""

_LAYER_COPIES = 4
"""Float32 copies of a layer's weights in memory: the layer, AWQ's copy to restore them, and the rounded weights."""

_HEALED_COPIES = 7
"""The same while a layer is healed: the layer, what it was, places, gradients and their products with the integers."""

_PACKED_BYTES = 1.25
"""Upper bound of bytes per packed weight: 8 bits, with scales and zero points of groups."""

_IMPORTS_BYTES = 1500 * 2**20
"""Measured resident memory of torch, transformers and llmcompressor, bytes."""


def calibrate_weights(
    source: Path, destination: Path, parameters: CalibrateParameters, progress: Progress
) -> Facts:
    """Calibrate source in float32; write it to destination with the targets packed and the rest in its own dtype.

    Raises:
        StageError: another model family, an already quantised checkpoint, a group size that does not divide the inputs
            of a target, weights or activations that are not finite, or a layer with a larger error than allowed.
        CorpusError: the calibration text is missing, malformed or too short.
        CorruptCheckpointError: a weight of the MTP head is not finite.
    """
    # Slow to import, and needed only in the process that calibrates.
    import torch

    from slimqwen.models.sensitivity import measure_divergence

    progress("loading", 0, 0)
    torch.set_num_threads(parameters.threads)
    torch.manual_seed(parameters.corpus.seed)
    outline = Outline.read(source)
    require_fit(inspect_calibration(outline, parameters))
    targets = _target_tensors(outline, parameters)
    config = checkpoint.read_config(source)
    facts: Facts = {"quantised_linears": sum(map(len, targets.values()))}
    head = targets.pop("mtp", {})
    changed: dict[str, Mapping[str, NewTensor]] = {}
    with TemporaryDirectory(dir=destination) as layers:
        if names := {name for weights in targets.values() for name in weights}:
            sequences, allocation = _allocated(source, targets, parameters, progress)
            facts |= {
                "calibration_tokens": sum(map(len, sequences)),
                **(allocation.facts if allocation else {}),
            }
            forms = forms_of(parameters.targets, parameters.group_size) + (
                allocation.targets if allocation else []
            )
            stored, patterns = list_tensors(source), changes(parameters)
            changeable = {
                name: info for name, info in stored.items() if any(re.search(each, name) for each in patterns)
            }
            quantization, changed, healed = calibrate_layers(
                source,
                names,
                config_groups(forms),
                parameters,
                sequences,
                changeable,
                Path(layers),
                progress,
            )
            facts |= healed
            config = with_quantisation(config, quantization, stored)
        if head:
            form = packing_of(parameters.targets.mtp, parameters.group_size)
            rounded = (
                head_rounding.round_head(source, form, Path(layers), progress)
                if parameters.searches_head
                else {}
            )
            for name, info in head.items():
                changed[name] = packing.rounded_to_nearest(
                    info, name, form.bits, form.group_size, rounded.get(name)
                )
            group = config_group(packing.LINEARS["mtp"], form.bits, form.group_size)
            modules = [name.removesuffix(".weight") for name in head]
            config = quantised(config, with_group(checkpoint.quantisation(config), "mtp", group, modules))
        rewrite(source, destination, lambda name, info: changed.get(name), progress)
        facts |= head_rounding.errors(rounded) if head else {}
    carry_side_files(source, destination)
    write_config(destination, config)
    if names:
        facts |= _checked_layers(source, destination, sequences, parameters.layer_error_ratio)
        if allocation:
            facts["measured_kl_nats"] = measure_divergence(source, destination, _first(sequences))
    facts["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        facts["peak_gpu_memory_bytes"] = torch.cuda.max_memory_allocated()
    return facts


def needs(outline: Outline, parameters: CalibrateParameters) -> Needs:
    """Needs: disk for the packed layers and the output; memory for a layer with copies, and activations."""
    if not parameters.targets.calibrated and not parameters.searches_head:
        memory = _IMPORTS_BYTES + 8 * packing.BLOCK_BYTES
        return Needs(outline.disk_bytes, memory, 20 * outline.num_weights_of("mtp"))
    if not parameters.targets.calibrated:
        return head_rounding.needs(outline, _IMPORTS_BYTES)
    text, corpus = outline.text, parameters.corpus
    hidden, inner, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    tokens = corpus.sequences * corpus.length
    targets = outline.num_weights_of(*parameters.targets.calibrated)
    layer, steps = outline.num_layer_weights, parameters.heal.steps
    # The Hessians, and the inverse of the largest one.
    rounding = 3 * (hidden**2 + inner**2) if parameters.rounding == "gptq" else 0
    numbers = max(_LAYER_COPIES * layer + rounding, _HEALED_COPIES * layer if steps else 0)
    numbers += tokens * (_STATES * hidden + inner)
    # Within a layer, only for one batch: intermediate states of MLP and Gated DeltaNet, and attention scores.
    numbers += BATCH * corpus.length * (8 * inner + 3 * heads * corpus.length)
    few = min(tokens, max(_CHECKED_TOKENS, corpus.length)) if parameters.bits else 0
    layers = outline.text["num_hidden_layers"]
    # Costs of widths are measured before.
    numbers = max(numbers, 2 * layer + few * (layers * hidden + (DRAWS + 1) * 4 * (hidden + inner)))
    passes = _PASSES + (_SEARCH_PASSES if parameters.scaling == "awq" else 0)
    operations = 2 * tokens * (passes * targets + 3 * outline.num_weights) + 2 * few * len(WIDTHS) * targets
    operations += 6 * steps * HEALED_SEQUENCES * corpus.length * targets
    disk_bytes = outline.disk_bytes + int(_PACKED_BYTES * targets)
    return Needs(disk_bytes, _IMPORTS_BYTES + 4 * numbers, operations, fixed_seconds=25)


def inspect_calibration(outline: Outline, parameters: CalibrateParameters) -> Iterator[Fault]:
    """Find faults: another model family, a quantised checkpoint, groups that do not divide, faults of the text."""
    try:
        family = find_family(outline.config)
    except FamilyError as error:
        yield Fault(f"{outline.name}: {error}")
        return
    if not family.is_calibrated:
        yield Fault(
            f"{outline.name} is of the family {family.name}, whose experts llmcompressor does not see; use a "
            "published checkpoint with quantised experts as the base"
        )
        return
    form = checkpoint.quantisation(outline.config)
    if parameters.targets.calibrated and set(form.get("config_groups", ["all"] if form else [])) - ADDED:
        yield Fault(
            f"{outline.name} is quantised already; calibrate needs the 16-bit checkpoint as its base",
            "targets",
        )
        return
    if fault := find_format(checkpoint.quantisation(outline.config)).refused_addition():
        yield Fault(f"{outline.name} {fault}")
        return
    for kind, linears in _target_tensors(outline, parameters).items():
        if not linears:
            packed = kind == "mtp" and f"mtp.fc{packing.PACKED}" in outline.tensors
            fault = "a packed MTP head already" if packed else f"no {kind} layers"
            yield Fault(f"{outline.name} has {fault}; remove {kind} from the targets", f"targets.{kind}")
        yield from islice(_inspect_linears(outline, kind, linears, parameters), 1)
    if parameters.searches_head:
        yield from head_rounding.inspect(outline)
    if parameters.targets.calibrated:
        tokens = parameters.corpus.sequences * parameters.corpus.length
        yield from inspect_text(outline, "corpus", parameters.corpus, least_bytes=tokens)


def _inspect_linears(
    outline: Outline, kind: str, linears: Mapping[str, TensorInfo], parameters: CalibrateParameters
) -> Iterator[Fault]:
    scheme = parameters.targets.schemes[kind]
    group_size = packing_of(scheme, parameters.group_size, parameters.bits).group_size
    for name, info in linears.items():
        if group_size and info.shape[1] % group_size:
            yield Fault(
                f"group_size {group_size} does not divide the {info.shape[1]} inputs of {name}; "
                "choose a smaller one",
                "group_size",
            )
        if info.dtype not in ("BF16", "F16", "F32"):
            yield Fault(
                f"{outline.name}: {name} is {info.dtype} already; remove {kind} from the targets", "targets"
            )


def data(parameters: CalibrateParameters) -> dict[str, str]:
    """Digests of the calibration text; empty if it is not read."""
    return parameters.corpus.digests("corpus") if parameters.targets.calibrated else {}


def changes(parameters: CalibrateParameters) -> tuple[str, ...]:
    """Regular expressions for names of tensors that may change: quantised linears, what AWQ scales, healed norms."""
    linears = map(packing.tensor_pattern, parameters.targets.schemes)
    kinds = parameters.targets.calibrated if parameters.scaling == "awq" else ()
    scaled = [module for kind in kinds for module in SCALED_WITH[kind]]
    norms = [NORMS] if parameters.heal.steps else []
    return (*linears, *(rf"(?<!mtp\.)layers\.\d+\.{re.escape(module)}\." for module in scaled), *norms)


def _target_tensors(outline: Outline, parameters: CalibrateParameters) -> dict[str, dict[str, TensorInfo]]:
    """The weights to quantise, by kind and name."""
    found = {kind: packing.linears(outline.tensors, kind) for kind in parameters.targets.schemes}
    is_budget = {kind: scheme == "budget" for kind, scheme in parameters.targets.schemes.items()}
    return {kind: linears for kind, linears in found.items() if linears or not is_budget[kind]}


def _allocated(
    source: Path, targets: Mapping[str, Any], parameters: CalibrateParameters, progress: Progress
) -> tuple[list[list[int]], Allocation | None]:
    """The calibration text in tokens, and the widths where a budget decides them."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    sequences = calibration_sequences(parameters.corpus, source, tokenizer)
    if parameters.bits is None:
        return sequences, None
    schemes = parameters.targets.schemes
    linears = {
        name: info for kind in targets if schemes[kind] == "budget" for name, info in targets[kind].items()
    }
    budget, size = parameters.bits, parameters.group_size
    return sequences, allocate_widths(source, linears, budget, size, _first(sequences), progress)


def _first(sequences: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    return sequences[: max(1, _CHECKED_TOKENS // len(sequences[0]))]


def _checked_layers(
    source: Path, destination: Path, sequences: Sequence[Sequence[int]], limit: float
) -> Facts:
    """Errors of each quantised layer and of its RTN, on the first `_CHECKED_TOKENS` tokens of the calibration text.

    Raises:
        StageError: a layer's error is more than `limit` times that of RTN.
    """
    from slimqwen.models.layer_error import measure_layer_errors

    layers = measure_layer_errors(destination, source, _first(sequences))
    worst = max(layers, key=lambda row: row.ratio)
    if worst.ratio > limit:
        raise StageError(
            f"calibrated layer {worst.layer} has {worst.ratio:.2f} times the error of round-to-nearest, "
            f"{limit:g} is allowed; use another calibration text, or raise layer_error_ratio"
        )
    return {
        "layers": [row.layer for row in layers],
        "layer_errors": [row.error for row in layers],
        "rounded_layer_errors": [row.rounded_error for row in layers],
    }


def reshape(shape: D, parameters: CalibrateParameters, /) -> D:
    """The dimensions with the targets packed; under a budget, each kind counts with the width nearest to it."""
    size, budget = parameters.group_size, parameters.bits
    given = parameters.targets.schemes.items()
    return shape.with_packing({kind: packing_of(scheme, size, budget) for kind, scheme in given})


def summarise(facts: Facts) -> str | None:
    """Say what the widths within the budget cost by estimate, and what the calibrated weights cost by measurement."""
    if "stored_bits" not in facts:
        return None
    return (
        f"{facts['stored_bits']:.3f} stored bits a weight; divergence {facts['predicted_kl_nats']:.4f} nats a token "
        f"estimated for rounding to nearest, {facts['measured_kl_nats']:.4f} measured"
    )


STAGE = Stage(
    name="calibrate",
    parameters=CalibrateParameters,
    run=calibrate_weights,
    needs=needs,
    inspect=inspect_calibration,
    data=data,
    own_tokens=lambda parameters: parameters.corpus.own_tokens if parameters.targets.calibrated else 0,
    reshape=reshape,
    changes=changes,
    summarise=summarise,
    environment=TORCH_ENVIRONMENT,
)
