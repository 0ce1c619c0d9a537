"""Step d: stages on the GPU against the same stages on the CPU, and their speed on two layers of large models.

Nothing here needs vLLM, so that it runs with the host's own torch where vLLM cannot arrive: what a stage would ask of
vLLM comes from transformers. On the embedded model the two outputs are compared by their divergence from the original,
not byte by byte. Two layers of random weights, one of each kind of attention, tell how long a whole model takes.
"""

import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.tensors import NewTensor, from_torch, write_tensors
from slimqwen.models.outline import Outline
from slimqwen.models.shape import Shape
from slimqwen.plan import shapes
from slimqwen.processes import worker
from slimqwen.progress import Progress
from slimqwen.recipe import inspection
from slimqwen.recipe.calibration_text import CalibrationText, calibration_documents
from slimqwen.recipe.sampled_outputs import OUTPUTS
from slimqwen.recipe.stages import calibrate, quantise_lm_head, redistill_mtp
from slimqwen.recipe.stages.calibrate import CalibrateParameters
from slimqwen.recipe.stages.quantise_lm_head import QuantiseLmHeadParameters
from slimqwen.recipe.stages.redistill_mtp import CURVE, RedistillParameters
from slimqwen.text.prompts import documents
from tests.checkpoints import with_manifest
from tests.gpu.steps import Here

EXTRA = {"calibrate": "llmcompressor", "quantise_lm_head": "llmcompressor", "redistill_mtp": None}
"""Stage -> package that it needs beside torch and transformers."""

LAYERS = {"qwen3.5-4b": (16, 2048), "qwen3.5-27b": (4, 2048)}
"""Shape whose layers are calibrated -> sequences and their length, tokens."""

REHEARSED_LAYERS = {"tiny": (1, 32)}

_DIVERGENCE_RATIO = 1.25
"""The GPU's output may lie so many times as far from the original as the CPU's; both search with their own rounding."""

_ACCEPTANCE_SHARE = 0.05
"""Largest relative difference of two acceptance lengths: that of the stage itself between torch and vLLM."""

_TEXT = CalibrationText(path="tinyworld", sequences=8, length=128)
_VOCABULARY = 8192
_TIMEOUT_S = 120


def run(here: Here) -> str:
    """Compare each stage, then time the layers."""
    place = here.root / ".cache" / "gpu-check" / "stages"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for stage in EXTRA:
        here.part(stage, partial(needing(EXTRA[stage], compare_stage), here, stage, place))
    for name, text in (LAYERS if here.gpu else REHEARSED_LAYERS).items():
        source = place / name
        here.part(f"forward pass of {name}", partial(time_layers, here, name, source, text))
        timed = needing("llmcompressor", time_calibration)
        here.part(f"calibrate two layers of {name}", partial(timed, here, name, source, text))
    shutil.rmtree(place)
    found = here.parts
    left = [
        f"{name} ({each['left_out']} is not importable)" for name, each in found.items() if "left_out" in each
    ]
    lines = [f"{name}: {each['line']}" for name, each in found.items() if "line" in each]
    if importlib.util.find_spec("vllm") is None:
        left.append("all that asks vLLM")
    return "; ".join([*lines, *([f"left out: {', '.join(left)}"] if left else [])])


def needing(package: str | None, find: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A part that is left out where a package is missing."""
    if package is None or importlib.util.find_spec(package):
        return find
    return lambda *_: {"left_out": package}


def run_apart(
    function: Callable[..., Any], source: Path, destination: Path, task: Any, log: Path, *, gpu: bool
) -> Any:
    """Call function(source, destination, task, progress) in a process that sees the GPU, or only the CPU.

    Returns:
        What the function returns, with the seconds and the peak of main memory, GB.

    Raises:
        AssertionError: the function failed.
    """
    environment = {**os.environ, **redistill_mtp.STAGE.environment}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    with log.open("ab") as output, worker.started(environment, output) as (process, messages):
        worker.give(process, log.parent, function, source, destination, task)
        while True:
            assert messages.poll(_TIMEOUT_S), f"nothing heard for {_TIMEOUT_S} s"
            kind, *content = messages.recv()
            if kind == "done":
                found, peak = content
                return {**found, "seconds": time.monotonic() - began, "memory_gb": peak / 1e9}
            assert kind == "progress", f"{kind}: {content[0]}"


def compare_stage(here: Here, stage: str, place: Path) -> dict[str, Any]:
    """Run a stage on the embedded model on both devices; judge how far its outputs lie from the original."""
    source, log = sampled_tiny(here.root, place), here.root / "logs" / f"gpu-check-d-{stage}.log"
    found: dict[str, Any] = {}
    for device, gpu in (("gpu", True), ("cpu", False)) if here.gpu else (("cpu", False),):
        destination = place / f"{stage}-{device}"
        destination.mkdir()
        found[device] = run_apart(run_stage, source, destination, stage, log, gpu=gpu)
    first, second = next(iter(found)), "cpu"  # the same in a rehearsal
    if stage == "redistill_mtp":
        lengths = {name: each["facts"]["acceptance_length_after"] for name, each in found.items()}
        difference = abs(lengths[first] / lengths[second] - 1)
        seen = ", ".join(f"{name} {length:.3f}" for name, length in lengths.items())
        assert difference <= _ACCEPTANCE_SHARE, f"acceptance length after training: {seen}"
        return {"line": f"acceptance length after training {seen}", **found}
    outputs = {name: place / f"{stage}-{name}" for name in found}
    divergences = run_apart(measure_divergences, source, place, outputs, log, gpu=False)["nats"]
    seen = ", ".join(f"{name} {nats:.5f}" for name, nats in divergences.items())
    assert divergences[first] <= _DIVERGENCE_RATIO * divergences[second] + 1e-5, (
        f"nats a token from the original: {seen}"
    )
    return {"line": f"{seen} nats a token from the original", "divergences": divergences, **found}


def sampled_tiny(root: Path, place: Path) -> Path:
    """The embedded model with texts in place of what it says itself, which would take vLLM."""
    import transformers

    folder = place / "tiny"
    if folder.exists():
        return folder
    shutil.copytree(root / "weights" / "tiny", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in documents("tinyworld_passages", 0, root):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:48]
        if len(ids) == 48:
            rows.append({"prompt": ids[:16], "continuation": ids[16:], "held_out": len(rows) < 16})
        if len(rows) == 64:
            break
    (folder / OUTPUTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_stage(source: Path, destination: Path, stage: str, progress: Progress) -> dict[str, Any]:
    """Run a stage in this process without vLLM; its facts and the peak of the GPU's memory, GB."""
    if stage == "calibrate":
        targets = {"mlp": "W4A16", "attention": "W8A16", "linear_attention": "W4A16"}
        facts = calibrate.calibrate_weights(
            source, destination, CalibrateParameters(targets=targets, corpus=_TEXT), progress
        )
    elif stage == "quantise_lm_head":
        quantise_lm_head._second_moments = moments_by_transformers
        parameters = QuantiseLmHeadParameters(rounding="gptq", corpus=_TEXT)
        facts = quantise_lm_head.quantise_output_head(source, destination, parameters, progress)
    else:
        redistill_mtp._served = lambda *_: 1.0
        redistill_mtp._check_agreement = lambda *_: None
        unfinished = destination.with_name(f"{destination.name}-unfinished")
        unfinished.mkdir()
        facts = redistill_mtp.redistill_head(
            source,
            destination,
            RedistillParameters(steps=8, validate_every=4),
            progress,
            unfinished=unfinished,
        )
        facts["kept"] = json.loads((destination / CURVE).read_text())["kept"]
    return {"facts": facts, "gpu_memory_gb": gpu_peak_gb()}


def moments_by_transformers(source: Path, parameters: QuantiseLmHeadParameters, progress: Progress) -> Any:
    """Stands in for vLLM's reading of the head's inputs: the same sum from transformers in float32."""
    import torch
    import transformers

    from slimqwen.models.language_model import load_in_float32

    tokenizer, model = transformers.AutoTokenizer.from_pretrained(source), load_in_float32(source)
    moments = 0
    for text in calibration_documents(parameters.corpus, source)[: parameters.corpus.sequences]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: parameters.corpus.length]
        with torch.no_grad():
            states = model.model(torch.tensor([ids], device=model.device))[0][0]
        moments = moments + states.T @ states
    return moments.cpu()


def measure_divergences(
    source: Path, destination: Path, outputs: Mapping[str, Path], progress: Progress
) -> dict[str, Any]:
    """Mean KL divergence of the next token from a checkpoint to others on a text, nats, in float32 on the CPU."""
    import torch
    import transformers

    from slimqwen.models.language_model import load_language_model

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    texts = calibration_documents(CalibrationText(path="tinyworld_passages"), source)[:16]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][:64] for text in texts]

    def read(folder: Path) -> list[Any]:
        model = load_language_model(folder)
        with torch.no_grad():
            return [model(torch.tensor([each])).logits[0].log_softmax(-1) for each in ids]

    exact, nats = read(source), {}
    for name, folder in outputs.items():
        pairs = zip(exact, read(folder), strict=True)
        nats[name] = float(torch.stack([(p.exp() * (p - q)).sum(-1).mean() for p, q in pairs]).mean())
    return {"nats": nats}


def shape_of(name: str, root: Path) -> Shape:
    """A shape of eval/shapes, or of a variant."""
    return shapes.published_shape(root, name) or shapes.variant_shape(variants.load(name, root))


def two_layers(name: str, root: Path) -> Shape:
    """A shape with one layer of each kind of attention, a small vocabulary and no MTP head."""
    shape = shape_of(name, root)
    text = {
        **shape.text,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "vocab_size": _VOCABULARY,
        "mtp_num_hidden_layers": 0,
        "eos_token_id": 0,
    }
    return Shape({"architectures": ["Qwen3_5ForCausalLM"], "text_config": text}, {}, name)


def write_random(name: str, root: Path, folder: Path) -> Path:
    """Write a checkpoint of two layers with random weights, unless it lies there."""
    import torch

    if folder.exists():
        return folder
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    shape = two_layers(name, root)

    def random(dtype: str, size: tuple[int, ...], tensor: str) -> NewTensor:
        values = 0.02 * torch.randn(size, generator=generator) if len(size) > 1 else torch.zeros(size)
        if tensor.endswith("linear_attn.norm.weight"):  # the only norm that is not stored as 1 + w
            values = torch.ones(size)
        return from_torch(values, dtype)

    tensors = {tensor: random(*kind, tensor) for tensor, kind in shape.tensors.items()}
    write_tensors(folder / "model.safetensors", tensors)
    write_config(folder, shape.config_json)
    for file in shapes.TOKENIZER_FILES:
        shutil.copyfile(root / "weights" / "tiny" / file, folder / file)
    return with_manifest(folder)


def time_layers(here: Here, name: str, source: Path, text: tuple[int, int]) -> dict[str, Any]:
    """Time the forward pass of both layers over a batch, in float32 as stages compute."""
    write_random(name, here.root, source)
    log = here.root / "logs" / "gpu-check-d-layers.log"
    found = run_apart(run_layers, source, source, text, log, gpu=here.gpu is not None)
    shown = ", ".join(
        f"{kind} {rate / 1e3:.1f}k tokens/s" for kind, rate in found["tokens_per_second"].items()
    )
    return {"line": shown, **found}


def run_layers(source: Path, destination: Path, text: tuple[int, int], progress: Progress) -> dict[str, Any]:
    """Tokens a second of each layer of a checkpoint, the second of two passes."""
    import torch

    from slimqwen.models.language_model import load_layer, read_text_config, run_layer

    states = 0.02 * torch.randn(min(8, text[0]), text[1], read_text_config(source).hidden_size)
    rates: dict[str, float] = {}
    for number, kind in enumerate(("linear attention", "full attention")):
        layer = load_layer(source, number)
        run_layer(layer, states)
        began = time.monotonic()
        finite = bool(torch.isfinite(run_layer(layer, states)).all())
        rates[kind] = states[..., 0].numel() / (time.monotonic() - began)
        assert finite, f"{kind}: NaN or infinity"
    return {"tokens_per_second": rates}


def time_calibration(here: Here, name: str, source: Path, text: tuple[int, int]) -> dict[str, Any]:
    """Calibrate two layers, and tell from their operations how long all layers take, beside what a dry run says."""
    write_random(name, here.root, source)
    destination = source.with_name(f"{name}-calibrated")
    destination.mkdir()
    log = here.root / "logs" / "gpu-check-d-layers.log"
    found = run_apart(calibrate_layers, source, destination, text, log, gpu=here.gpu is not None)
    parameters = calibration_of(text)
    needs = calibrate.needs(Outline.read(source), parameters)
    as_in_recipes = calibration_of((256, 2048))
    whole = calibrate.needs(Outline.of_shape(shape_of(name, here.root), source), as_in_recipes)
    seconds = (
        found["seconds"] - needs.fixed_seconds
        if found["seconds"] > 2 * needs.fixed_seconds
        else found["seconds"]
    )
    hours = whole.operations / (needs.operations / seconds) / 3600
    dry_run, _ = inspection._seconds("calibrate", whole, ())
    memory = f"{found['gpu_memory_gb']:.1f} GB of the GPU" if here.gpu else f"{found['memory_gb']:.1f} GB"
    line = f"{found['seconds']:.0f} s, {memory}; the whole model {hours:.1f} h, by a dry run {dry_run / 3600:.1f} h"
    return {"line": line, "hours": hours, "dry_run_hours": dry_run / 3600, **found}


def calibration_of(text: tuple[int, int]) -> CalibrateParameters:
    """The calibration of every linear, as in the recipes of large models, over so many sequences of a length."""
    return CalibrateParameters(
        targets={"mlp": "W4A16", "attention": "W4A16", "linear_attention": "W4A16"},
        corpus=CalibrationText(path="tinyworld", sequences=text[0], length=text[1]),
        layer_error_ratio=1e9,  # random weights have no outliers that a search could find
    )


def calibrate_layers(
    source: Path, destination: Path, text: tuple[int, int], progress: Progress
) -> dict[str, Any]:
    """Calibrate in this process; the peak of the GPU's memory, GB."""
    facts = calibrate.calibrate_weights(source, destination, calibration_of(text), progress)
    return {"errors": facts["layer_errors"], "gpu_memory_gb": gpu_peak_gb()}


def gpu_peak_gb() -> float | None:
    """Peak of the GPU's memory that this process took, GB; None without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
