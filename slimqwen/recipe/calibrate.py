"""The stage `calibrate`: AWQ, then 4-bit weights with 16-bit activations, by llmcompressor.

AWQ (Lin et al., arXiv 2306.00978) moves scale from the weights' inputs into the layer before, so that the channels
with large activations lose least when weights are rounded; llmcompressor searches the scales and rounds. The output
is written here, tensor by tensor from the source, because only so everything that was not calibrated (the MTP head,
a vision tower, embeddings, rope settings) is certain to stay byte for byte what it was.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.checkpoint import NewTensor, TensorInfo
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress
from slimqwen.recipe.corpus import CorpusError, TextSource, digests
from slimqwen.recipe.stage import Facts, Needs, Parameters, Stage

_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
_MODULES = {
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    # in_proj_a and in_proj_b have one row a head: nothing to gain, and they steer the state's decay.
    "linear_attention": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"),
}
_END_OF_TEXT = "<|endoftext|>"
_BATCH = 8
"""Sequences that pass through the model together."""

_IMPORTS_BYTES = 1500 * 2**20
"""Resident size of torch, transformers and llmcompressor themselves, measured."""


class WrongArchitectureError(SlimqwenError):
    """The checkpoint is not one that this stage knows how to calibrate."""


class NotFiniteError(SlimqwenError):
    """Calibration met NaN or infinity."""


class Corpus(TextSource):
    """The text that activations are measured on.

    Attributes:
        source: tinyworld generates documents of the embedded world's training distribution; file reads `path`.
        path: a .txt file (one document) or .jsonl file (one {"text": …} a line), relative to the recipe.
        sequences: how many sequences.
        length: tokens in each, all of them filled.
        seed: of the generator, or of the order in which a file's documents are taken.
    """

    sequences: Annotated[int, Field(ge=1)] = 64
    length: Annotated[int, Field(ge=16)] = 256


class CalibrateParameters(Parameters):
    """What a recipe may say of this stage.

    Attributes:
        scheme: W4A16 is symmetric, W4A16_ASYM has a zero point per group.
        group_size: weights of a row that share a scale.
        rounding: nearest, or gptq (Frantar et al., arXiv 2210.17323), which lets later columns make up for the error
            of earlier ones; after AWQ's scales, as llm-compressor's own Qwen3.5 recipe has it.
        targets: the kinds of linears to quantise, in all layers; the MTP head stays as it is, and so does lm_head,
            which has a stage of its own (quantise_lm_head).
        corpus: the calibration text.
        threads: of the CPU arithmetic; a part of the recipe because it decides the order of summation.
    """

    scheme: Literal["W4A16", "W4A16_ASYM"] = "W4A16"
    group_size: Literal[32, 64, 128] = 32
    rounding: Literal["nearest", "gptq"] = "nearest"
    targets: Annotated[tuple[Literal["mlp", "attention", "linear_attention"], ...], Field(min_length=1)] = (
        "mlp",
    )
    corpus: Corpus = Corpus()
    threads: Annotated[int, Field(ge=1)] = 2


def run(source: Path, destination: Path, parameters: CalibrateParameters, progress: Progress) -> Facts:
    """Calibrate source in float32 and write it to destination in its own dtype, the targets packed to 4 bits.

    Raises:
        WrongArchitectureError: another model family, an already quantised checkpoint, or a group size that does
            not divide the inputs of a target.
        CorpusError: the calibration text is missing, malformed or too short.
        NotFiniteError: weights or activations are not finite.
    """
    # Heavy: paid by the process that calibrates, not by whoever asks for a recipe's status.
    import torch
    import transformers

    progress("loading", 0, 0)
    torch.set_num_threads(parameters.threads)
    torch.manual_seed(parameters.corpus.seed)
    targets = _target_tensors(source, parameters)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    sequences = torch.tensor(_sequences(parameters.corpus, tokenizer))
    config = checkpoint.read_config(source)
    model = getattr(transformers, config["architectures"][0]).from_pretrained(source, dtype=torch.float32)
    modules = {name.removesuffix(".weight") for name in targets}
    with torch.no_grad():
        _calibrate(model, tokenizer, modules, sequences, parameters, progress)
    quantization = _pack(model, config)
    checkpoint.rewrite(source, destination, _replacements(model, targets), progress)
    checkpoint.carry_side_files(source, destination)
    checkpoint.write_config(destination, {**config, "quantization_config": quantization})
    facts: Facts = {
        "quantised_linears": len(targets),
        "calibration_tokens": sequences.numel(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    if torch.cuda.is_available():
        facts["peak_gpu_memory_bytes"] = torch.cuda.max_memory_allocated()
    return facts


def needs(source: Path, parameters: CalibrateParameters) -> Needs:
    """Weights and their copies in float32, activations of all sequences between two layers, and the libraries."""
    _target_tensors(source, parameters)
    stored = checkpoint.tensors(source)
    text = checkpoint.text_config(checkpoint.read_config(source))
    tokens = parameters.corpus.sequences * parameters.corpus.length
    # Kept at a time: each sequence's input of a layer, and AWQ's exact and rounded outputs of its MLP.
    activations = (
        4 * tokens * (2 * text["hidden_size"] + 2 * max(text["hidden_size"], text["intermediate_size"]))
    )
    weights = sum(4 * info.elements for info in stored.values())
    return Needs(
        disk_bytes=checkpoint.bytes_on_disk(source),
        memory_bytes=_IMPORTS_BYTES + weights + activations,
    )


def data(parameters: CalibrateParameters) -> dict[str, str]:
    """The digests that decide the calibration text."""
    return digests(parameters.corpus)


def _target_tensors(source: Path, parameters: CalibrateParameters) -> dict[str, TensorInfo]:
    """The weights to quantise, by name; refuses what cannot be quantised before anything heavy starts."""
    config = checkpoint.read_config(source)
    architecture = config["architectures"][0]
    if architecture not in _ARCHITECTURES:
        raise WrongArchitectureError(
            f"{source} is a {architecture}, calibrate knows {' and '.join(_ARCHITECTURES)}; choose another base"
        )
    if "quantization_config" in config:
        raise WrongArchitectureError(
            f"{source} is quantised already; calibrate needs the 16-bit checkpoint as its base"
        )
    suffixes = tuple(f".{module}.weight" for target in parameters.targets for module in _MODULES[target])
    found = {
        name: info
        for name, info in checkpoint.tensors(source).items()
        if name.endswith(suffixes) and not name.startswith("mtp.")
    }
    for target in parameters.targets:
        if not any(f".{module}.weight" in name for module in _MODULES[target] for name in found):
            raise WrongArchitectureError(f"{source} has no {target} layers; take {target} off the targets")
    for name, info in found.items():
        if info.shape[1] % parameters.group_size:
            raise WrongArchitectureError(
                f"group_size {parameters.group_size} does not divide the {info.shape[1]} inputs of {name}; "
                "choose a smaller one"
            )
    return found


def _sequences(corpus: Corpus, tokenizer: Any) -> list[list[int]]:
    """Documents one after the other, cut into sequences without a gap."""
    wanted = corpus.sequences * corpus.length
    tokens: list[int] = []
    for document in documents(corpus):
        tokens += tokenizer(document, add_special_tokens=False)["input_ids"]
        if len(tokens) >= wanted:
            starts = range(0, wanted, corpus.length)
            return [tokens[start : start + corpus.length] for start in starts]
    raise CorpusError(
        f"the calibration text {corpus.path} has {len(tokens)} tokens, {corpus.sequences} sequences of "
        f"{corpus.length} need {wanted}; add text or ask for fewer sequences"
    )


def documents(corpus: Corpus) -> Iterable[str]:
    """The calibration text, document by document, as the model would meet it; the tiny world's never ends.

    Raises:
        CorpusError: the file cannot be read or is malformed.
    """
    if corpus.path is None:
        return _tinyworld_documents(corpus.seed)
    try:
        text = corpus.path.read_text(encoding="utf-8")
        if corpus.path.suffix != ".jsonl":
            return [text + _END_OF_TEXT]
        texts = [json.loads(line)["text"] + _END_OF_TEXT for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f'{corpus.path}: not usable as calibration text ({error!r}); give UTF-8 text, or {{"text": …}} a line'
        ) from None
    random.Random(corpus.seed).shuffle(texts)
    return texts


def _tinyworld_documents(seed: int) -> Iterator[str]:
    # Its tokenizer module imports transformers.
    from slimqwen.tinyworld.documents import LONG_MIX, DocumentSampler
    from slimqwen.tinyworld.tasks import left_out_texts
    from slimqwen.tinyworld.world import World

    world = World()
    sampler = DocumentSampler(world, left_out_texts(world), LONG_MIX)
    return (document.text for document in sampler.stream(seed))


def _calibrate(
    model: Any,
    tokenizer: Any,
    modules: set[str],
    sequences: Any,
    parameters: CalibrateParameters,
    progress: Progress,
) -> None:
    """Scale and round the modules in place, layer by layer on the GPU if there is one."""
    import torch
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        # There is nothing to copy to, and without an accelerator torch cannot pin.
        IntermediatesCache.pin_memory = lambda *_, **__: None
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NotFiniteError(f"{model.name_or_path}: {name} is not finite; make that checkpoint anew")
    batches = [{"input_ids": batch} for batch in sequences.split(_BATCH)]
    awq = AWQModifier()
    hooks = _watch(model, modules, len(batches), awq.n_grid, progress)
    scheme: QuantizationScheme = preset_name_to_scheme(parameters.scheme, ["Linear"])
    scheme.weights.group_size = parameters.group_size
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    described = {
        "config_groups": {"group_0": scheme},
        "ignore": [name for name in linears if name not in modules],
    }
    gptq = parameters.rounding == "gptq"
    quantise = GPTQModifier(**described) if gptq else QuantizationModifier(**described)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    # The processor is never asked, but without it llmcompressor looks for that of the images.
    oneshot(model=model, processor=tokenizer, recipe=[awq, quantise], dataset=loader, pipeline="sequential")
    for hook in hooks:
        hook.remove()


def _watch(model: Any, modules: set[str], batches: int, grid: int, progress: Progress) -> list[Any]:
    """Hooks that count the targets' forward passes, and raise where a layer's output is not finite.

    llmcompressor only logs a layer that it skips because of NaN: its result would be silently worse.
    """
    import torch

    # Each batch goes through a target once to be measured and once after rounding; for every set of scales that
    # AWQ searches, once exactly and once per grid point. Down projections are in two searches: the MLP's and theirs;
    # output projections take part in the search of their attention's inputs.
    searches = {name: 2 if name.endswith("down_proj") else 1 for name in modules}
    total = batches * sum(2 + searches[name] * (1 + grid) for name in modules)
    done = 0

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        progress("calibrating", done, total)

    def refuse_not_finite(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not torch.isfinite(tensor).all():
                raise NotFiniteError(
                    f"{name} gave NaN or infinity on the calibration text; its input checkpoint is damaged"
                )

        return hook

    hooks = []
    for name, module in model.named_modules():
        if name in modules:
            hooks.append(module.register_forward_hook(count))
        elif name.rpartition(".")[0].endswith("layers"):
            hooks.append(module.register_forward_hook(refuse_not_finite(name)))
    return hooks


def _pack(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Turn rounded weights into packed integers in place; the quantization_config that describes them."""
    import torch
    from compressed_tensors import ModelCompressor, __version__

    dtype = getattr(torch, checkpoint.text_config(config).get("dtype") or config["dtype"])
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            # Rounded first, so that the integers are chosen for the very scale that is stored.
            module.weight_scale.data = module.weight_scale.data.to(dtype).float()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    described: dict[str, Any] = compressor.quantization_config.model_dump(
        mode="json", exclude={"quant_method"}
    )
    # Engines build the MTP head from the same config: without this they would look for packed weights there.
    described["ignore"] = [*described["ignore"], "re:^mtp.*"]
    return {"quant_method": "compressed-tensors", "version": __version__, **described}


def _replacements(
    model: Any, targets: dict[str, TensorInfo]
) -> Callable[[str, TensorInfo], dict[str, NewTensor] | None]:
    import torch

    state = model.state_dict()
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

    def change(name: str, info: TensorInfo) -> dict[str, NewTensor] | None:
        if name in targets:
            prefix = name.removesuffix("weight")
            parts = {part: tensor for part, tensor in state.items() if part.startswith(f"{prefix}weight_")}
            return {part: _new_tensor(tensor, dtypes[info.dtype]) for part, tensor in parts.items()}
        if name in state:
            return {name: _new_tensor(state[name], dtypes[info.dtype])}
        if name.startswith("mtp."):
            return None
        raise WrongArchitectureError(f"{info.file}: the tensor {name} belongs to no part of the model")

    return change


def _new_tensor(tensor: Any, dtype: Any) -> NewTensor:
    """A torch tensor to be written, floating-point ones as dtype; converted when its turn comes."""
    import torch

    stored = {torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16", torch.float16: "F16"}
    kept = dtype if tensor.is_floating_point() else tensor.dtype

    def chunks() -> Iterator[memoryview]:
        yield memoryview(tensor.to("cpu", kept).contiguous().view(torch.uint8).numpy()).cast("B")

    return NewTensor({**stored, torch.float32: "F32"}[kept], tuple(tensor.shape), chunks)


STAGE = Stage(
    name="calibrate",
    parameters=CalibrateParameters,
    run=run,
    needs=needs,
    data=data,
    packages=("torch", "transformers", "llmcompressor", "compressed-tensors", "tokenizers"),
    # Nothing here asks a network; the tokenizer's own threads get in the way of the data loader's; and threads that
    # spin while they wait for each other are six times slower on a shared machine.
    environment={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"},
)
