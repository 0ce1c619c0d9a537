"""Step g: kernels of 2 to 8 bits, a packed embedding and a packed draft head, each against its own values in 16 bits.

Two layers of random weights are packed in each width, and unpacked again (the stage `unpack`). An engine reads the same
prompts with both: a right kernel differs from its twin by no more than the arithmetic of 16 bits does, which an engine
on the original weights shows against transformers in float32. The distance of the twin from the original says whether a
wrong kernel could be seen at all. The table of the embedded model is packed the same way; its packed draft head has to
have the acceptance length of one in 16 bits.
"""

import shutil
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from slimqwen.progress import Progress, silent
from slimqwen.recipe.calibration_text import CalibrationText
from slimqwen.recipe.sampled_outputs import read_outputs
from slimqwen.recipe.schemes import CalibrateParameters
from slimqwen.recipe.stage import Parameters
from slimqwen.recipe.stages import calibrate, quantise_embedding, trim_draft_vocab, unpack
from tests.checkpoints import with_manifest
from tests.gpu.stages import run_apart, sampled_tiny, write_random
from tests.gpu.steps import Here

WIDTHS = (3, 4, 2, 5, 6, 8)
REHEARSED_WIDTHS = (4, 8)  # those that a CPU serves

_NOISE_FACTOR = 16.0
"""A kernel may differ from its twin so many times as far as 16-bit arithmetic does from float32.

A CPU's 4-bit kernel was 4.2 times as far, for it does not round each weight to 16 bits; rounding was 900 times as far.
"""

_ACCEPTANCE_SHARE = 0.05
"""Largest share of the acceptance length of a draft head in 16 bits that a packed one may lose."""

_PROMPTS, _LENGTH, _TOKENS, _DEPTH = 4, 96, 48, 4


def run(here: Here) -> str:
    """Compare each width, then the packed tables; every part is a process of its own."""
    place = here.root / ".cache" / "gpu-check" / "kernels"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    log = here.root / "logs" / "gpu-check-g.log"
    layers = write_random("qwen3.5-4b" if here.gpu else "tiny", here.root, place / "layers")
    tiny = with_manifest(sampled_tiny(here.root, place))

    def find(function: Any, source: Path, task: Any) -> dict[str, Any]:
        found: dict[str, Any] = run_apart(function, source, place, task, log, gpu=here.gpu is not None)
        assert not found.get("fault"), found["fault"]
        return found

    for width in WIDTHS if here.gpu else REHEARSED_WIDTHS:
        here.part(f"W{width}A16", partial(find, compare_width, layers, width))
    for bits in (8, 4):
        here.part(f"embedding of {bits} bits", partial(find, compare_embedding, tiny, bits))
    here.part("draft head of 4 bits", partial(find, compare_draft_heads, tiny, 4))
    shutil.rmtree(place)
    return "; ".join(f"{name}: {found['line']}" for name, found in here.parts.items() if "line" in found)


def compare_width(source: Path, place: Path, width: int, progress: Progress) -> dict[str, Any]:
    """Pack every linear of a checkpoint in a width, by round-to-nearest, and compare it with its twin."""
    scheme = f"W{width}A16"
    parameters = CalibrateParameters.model_validate(
        {
            "targets": {"mlp": scheme, "attention": scheme, "linear_attention": scheme},
            "scaling": "none",
            "group_size": 64,
            "corpus": CalibrationText(path="tinyworld", sequences=1, length=32),
            "layer_error_ratio": 1e9,  # random weights: nothing is searched for
        }
    )
    packed = folder(place, scheme)
    calibrate.calibrate_weights(source, packed, parameters, progress)
    return compare_with_twin(source, with_manifest(packed), place)


def compare_embedding(source: Path, place: Path, bits: int, progress: Progress) -> dict[str, Any]:
    """Pack the embedding of a checkpoint, and compare it with its twin."""
    packed = folder(place, f"embedding-{bits}")
    parameters = quantise_embedding.QuantiseEmbeddingParameters.model_validate({"bits": bits})
    quantise_embedding.quantise_embedding(source, packed, parameters, progress)
    return compare_with_twin(source, with_manifest(packed), place)


def compare_draft_heads(source: Path, place: Path, bits: int, progress: Progress) -> dict[str, Any]:
    """The acceptance length at K = 4 of a packed draft head and of one in 16 bits, on the same prompts."""
    from slimqwen.serving.draft_counts import count_drafts_in_vllm

    prompts = [[*output.prompt, *output.continuation][:32] for output in read_outputs(source)][:24]
    lengths = {}
    for width in (16, bits):
        made = folder(place, f"draft-{width}")
        parameters = trim_draft_vocab.TrimDraftVocabParameters.model_validate({"size": "25%", "bits": width})
        trim_draft_vocab.trim_draft_vocabulary(source, made, parameters, silent)
        lengths[width] = count_drafts_in_vllm(with_manifest(made), prompts, _TOKENS, _DEPTH).mean_length
    loss = 1 - lengths[bits] / lengths[16]
    line = f"acceptance length {lengths[bits]:.3f}, with 16 bits {lengths[16]:.3f}"
    return {"line": line, "fault": line if loss > _ACCEPTANCE_SHARE else "", "lengths": lengths}


def compare_with_twin(source: Path, packed: Path, place: Path) -> dict[str, Any]:
    """Nats a token between a packed checkpoint and its twin in 16 bits, beside noise and rounding; their times."""
    twin = folder(place, f"{packed.name}-twin")
    unpack.unpack_weights(packed, twin, Parameters(), silent)
    exact = read_in_float32(source)
    original, _ = read_and_time(source)
    unpacked, twin_ms = read_and_time(with_manifest(twin))
    kernel, packed_ms = read_and_time(packed)
    noise, rounding, distance = (
        divergence(exact, original),
        divergence(original, unpacked),
        divergence(unpacked, kernel),
    )
    seen = (
        f"{distance:.2g} nats a token from the same values in 16 bits, where 16 bits alone make {noise:.2g} and "
        f"rounding {rounding:.2g}"
    )
    return {
        "line": f"{seen}; a token {packed_ms:.2f} ms, in 16 bits {twin_ms:.2f} ms",
        "fault": f"the kernel is wrong: {seen}" if distance > _NOISE_FACTOR * noise else "",
        "nats": {"kernel": distance, "noise": noise, "rounding": rounding},
        "ms_per_token": {"packed": packed_ms, "in 16 bits": twin_ms},
    }


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Random prompts, the same for every checkpoint of a vocabulary."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (_PROMPTS, _LENGTH), generator=generator).tolist()


def read_in_float32(folder: Path) -> Any:
    """Log-probabilities after each token of the prompts but the last, [positions, vocabulary], by transformers."""
    import torch

    from slimqwen.models.language_model import load_language_model

    model = load_language_model(folder)
    ids = torch.tensor(prompts_of(model.config.get_text_config().vocab_size), device=model.device)
    with torch.no_grad():
        return model(ids).logits[:, :-1].float().log_softmax(-1).flatten(0, 1).cpu()


def read_and_time(folder: Path) -> tuple[Any, float]:
    """Log-probabilities as `read_in_float32` has them, by vLLM; and the median time of a token of one request, ms."""
    import torch
    from vllm import SamplingParams

    from slimqwen import checkpoint
    from slimqwen.serving import in_process

    prompts = prompts_of(checkpoint.text_config(checkpoint.read_config(folder))["vocab_size"])
    read: list[list[Any]] = []
    times = []
    with in_process.engine(folder, max_num_seqs=1) as llm:
        for prompt in prompts:
            read.append([])
            in_process.read_prompts(llm, [prompt], lambda scores, _: read[-1].append(scores))
        settings = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
        for _ in range(4):
            began = time.monotonic()
            llm.generate([{"prompt_token_ids": prompts[0][:8]}], settings, use_tqdm=False)
            times.append(1e3 * (time.monotonic() - began) / _TOKENS)
    # The engine's own rows: one for each token of a prompt that has a token after it.
    return torch.cat([torch.cat(rows)[: _LENGTH - 1] for rows in read]), statistics.median(times[1:])


def divergence(p: Any, q: Any) -> float:
    """Mean Kullback-Leibler divergence of rows of log-probabilities, nats."""
    width = min(p.shape[1], q.shape[1])
    p, q = p[:, :width].double(), q[:, :width].double()
    return float((p.exp() * (p - q)).sum(-1).mean())


def folder(place: Path, name: str) -> Path:
    """An empty folder."""
    made = place / name
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    return made
