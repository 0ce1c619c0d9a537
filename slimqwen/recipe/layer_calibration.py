"""Calibration of the layers one at a time: each is scaled, rounded, healed and packed before the next one is loaded."""

import gc
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, list_tensors, torch_dtype, write_tensors
from slimqwen.checkpoint.weights import text_name
from slimqwen.models.calibrated_model import describe_quantisation, pack_layer, released_session
from slimqwen.progress import Progress
from slimqwen.recipe.schemes import HEALED_SEQUENCES, CalibrateParameters
from slimqwen.recipe.stage import Facts, StageError

BATCH = 8
"""Sequences per forward pass."""


def calibrate_layers(
    source: Path,
    names: Collection[str],
    groups: Mapping[str, Any],
    parameters: CalibrateParameters,
    sequences: Sequence[Sequence[int]],
    changeable: Mapping[str, TensorInfo],
    folder: Path,
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, Mapping[str, NewTensor]], Facts]:
    """Calibrate and pack the named weights, layer by layer, into files of a folder.

    Args:
        source: checkpoint that is not quantised.
        names: names of the weights.
        groups: config groups of llmcompressor, from `schemes.config_groups`.
        sequences: token ids of the calibration text, in sequences of equal length.
        changeable: tensors of source that may change, by name.
        folder: folder for the packed layers.

    Returns:
        The quantization_config, the tensors to write instead of each changed tensor, and what healing did.
    """
    import torch
    import transformers
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.awq.dynamic_mappings import get_layer_mappings_from_model

    from slimqwen.models.language_model import build_empty_model, read_embeddings

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    whole = build_empty_model(source)
    targets = {text_name(name).removesuffix(".weight") for name in names}
    linears = [name for name, module in whole.named_modules() if isinstance(module, torch.nn.Linear)]
    options = {
        "config_groups": groups,
        "ignore": [name for name in linears if name not in targets],
    }
    rounding = GPTQModifier if parameters.rounding == "gptq" else QuantizationModifier
    # A single layer does not show which kinds of attention the whole model has.
    mappings = get_layer_mappings_from_model(whole)
    count = 1 + max(int(name.split(".")[2]) for name in targets)
    changed: dict[str, Mapping[str, NewTensor]] = {}
    errors: list[tuple[float, float]] = []
    states = list(read_embeddings(source, torch.tensor(sequences)).split(BATCH))
    for number in range(count):
        progress("layers", number, count)
        scaling = [AWQModifier(mappings=mappings)] if parameters.scaling == "awq" else []
        recipe = [*scaling, rounding(**options)]
        states, replaced, healed = _calibrate_layer(
            source, number, tokenizer, states, recipe, changeable, parameters.heal.steps
        )
        errors += [healed] if healed else []
        changed |= _moved_to_disk(replaced, folder / str(number))
        del replaced
        # Modules and llmcompressor's hooks refer to each other; without a collection the layer would stay in memory.
        gc.collect()
    progress("layers", count, count)
    settings = rounding(**options).resolved_config
    facts: Facts = {}
    if errors:
        facts = {
            "unhealed_errors": [each for each, _ in errors],
            "healed_errors": [each for _, each in errors],
        }
    return describe_quantisation(whole, settings, list_tensors(source)), changed, facts


def _calibrate_layer(
    source: Path,
    number: int,
    tokenizer: Any,
    states: Sequence[Any],
    recipe: Sequence[Any],
    stored: Mapping[str, TensorInfo],
    steps: int,
) -> tuple[list[Any], dict[str, dict[str, NewTensor]], tuple[float, float] | None]:
    """Scale, round, heal and pack a layer, on the GPU if there is one.

    Args:
        states: batches of the layer's inputs, float32 [sequences, tokens, hidden] each.
        recipe: llmcompressor's modifiers.
        stored: tensors of the model that may change.
        steps: steps of healing.

    Returns:
        The layer's outputs with the changed weights, the tensors to write instead of each tensor of the layer, and the
        error of its output before and after healing; None if it was not healed.

    Raises:
        StageError: a weight or an output is not finite. llmcompressor would only log a NaN and skip the layer, and the
            result would be silently worse.
    """
    import torch
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache

    from slimqwen.models.healing import heal_layer
    from slimqwen.models.language_model import load_layer, run_layer

    if not torch.accelerator.is_available():
        # Without an accelerator torch cannot pin memory, and there is no device to copy to.
        IntermediatesCache.pin_memory = lambda *_, **__: None
    layer = load_layer(source, number)
    for name, parameter in layer.named_parameters():
        if not torch.isfinite(parameter).all():
            raise StageError(f"{source}: {name} has NaN or infinity; make or download that checkpoint again")
    wanted = [run_layer(layer, batch) for batch in states] if steps else []
    # llmcompressor runs the layer twice; the second outputs, which are kept, are those of the changed weights.
    outputs: deque[Any] = deque(maxlen=len(states))

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        if not torch.isfinite(output).all():
            raise StageError(
                f"layer {number} of {source} gave NaN or infinity on the calibration text; make or download that "
                "checkpoint again"
            )
        outputs.append(output.cpu())

    hook = next(iter(layer.model.layers)).register_forward_hook(keep)
    loader = torch.utils.data.DataLoader([{"inputs_embeds": batch} for batch in states], batch_size=None)
    healed = None
    with torch.no_grad(), released_session():
        # The processor is not used, but without one llmcompressor would look for an image processor.
        oneshot(model=layer, processor=tokenizer, recipe=list(recipe), dataset=loader, pipeline="sequential")
        hook.remove()
        if steps and any(hasattr(module, "weight_scale") for module in layer.modules()):
            dtype = next(
                torch_dtype(info.dtype) for name, info in stored.items() if not name.endswith("norm.weight")
            )
            healed = heal_layer(
                layer, torch.cat(list(states)), torch.cat(wanted), steps, HEALED_SEQUENCES, dtype
            )
            outputs.extend(run_layer(layer, batch) for batch in states)
        return list(outputs), pack_layer(layer, stored), healed


def _moved_to_disk(
    tensors: Mapping[str, Mapping[str, NewTensor]], folder: Path
) -> dict[str, Mapping[str, NewTensor]]:
    """Write tensors into a new file; return them as tensors that are read from that file when they are needed."""
    if not tensors:
        return {}
    folder.mkdir()
    contents = {part: tensor for parts in tensors.values() for part, tensor in parts.items()}
    write_tensors(folder / "model.safetensors", contents)
    stored = list_tensors(folder)
    return {name: {part: stored[part].unchanged() for part in parts} for name, parts in tensors.items()}
