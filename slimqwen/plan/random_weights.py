"""A checkpoint of published dimensions with seeded random weights: a real model's shape without a download.

Every stage and vLLM accept it, so it serves to measure speed and memory. Its answers mean nothing: config.json carries
the mark `slimqwen.checkpoint.RANDOM_WEIGHTS`, which stages pass on and evaluations of quality refuse.

It is a language model without vision (`Qwen3_5ForCausalLM`), with its MTP head. Its tokenizer is that of the embedded
model: no text has ids above the size of that tokenizer.
"""

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slimqwen import checkpoint
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import file_records, publish
from slimqwen.checkpoint.shape import Shape, ShapeError
from slimqwen.checkpoint.tensors import NewTensor, write_tensors
from slimqwen.plan import shapes
from slimqwen.progress import Progress, silent

Size = Literal["0.8b", "4b"]

_DEVIATION = 0.02
"""Standard deviation of weights: `initializer_range` of the published configs."""

_CHUNK = 2**22
"""Numbers drawn at a time."""

_ROPE_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def make(size: Size, root: Path, *, progress: Progress = silent) -> Path:
    """Write weights/shape-<size>, which the variant of that name serves: the same bytes at every call.

    Args:
        size: size of the published model, Qwen3.5-<size>.
        progress: receives (activity, done, total) in tensors.

    Returns:
        The checkpoint's folder. One that exists and is complete is kept.

    Raises:
        ShapeError: the dimensions are not in eval/shapes/, or the disk is too full.
        CorruptCheckpointError: the folder holds something else.
    """
    published = f"qwen3.5-{size}"
    shape = shapes.published_shape(root, published)
    if shape is None:
        raise ShapeError(
            f"{shapes.FOLDER}/{published}.json is missing; `git checkout {shapes.FOLDER}` restores it"
        )
    folder = root / "weights" / f"shape-{size}"
    if folder.exists():
        checkpoint.check(folder, f"delete {folder.relative_to(root)} and run the command again")
        return folder
    write(shape, folder, root / "weights" / "tiny", seed=0, progress=progress)
    return folder


def write(shape: Shape, folder: Path, tokenizer: Path, *, seed: int, progress: Progress = silent) -> None:
    """Write a checkpoint of these dimensions with random weights, published by one rename.

    Matrices and embeddings are normal with deviation 0.02, norms are the identity, the decay rates of Gated DeltaNet
    are uniform in 1 to 16 as in a new model.

    Args:
        shape: unquantised dimensions.
        folder: must not exist.
        tokenizer: checkpoint whose tokenizer files are copied.
        progress: receives (activity, done, total) in tensors.

    Raises:
        ShapeError: the disk is too full.
    """
    started = time.monotonic()
    tensors = {key.replace("model.language_model.", "model."): form for key, form in shape.tensors.items()}
    counter = itertools.count()

    def report() -> None:
        progress("drawing weights", next(counter), len(tensors))

    contents = {
        key: NewTensor(dtype, dimensions, _random_chunks(key, number, dtype, dimensions, seed, report))
        for number, (key, (dtype, dimensions)) in enumerate(tensors.items())
    }
    needed = sum(tensor.bytes for tensor in contents.values())
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise ShapeError(
            f"{folder.name} needs {needed / 2**30:.1f} GiB of disk and {free / 2**30:.1f} GiB are free; free some, for "
            "instance with `slimqwen recipe clean`"
        )
    with publish(folder) as staging:
        write_config(staging, _config(shape, seed))
        for file in shapes.TOKENIZER_FILES:
            shutil.copyfile(tokenizer / file, staging / file)
        write_tensors(staging / "model.safetensors", contents)
        Manifest(
            stage="shape",
            files=file_records(staging, progress),
            wall_seconds=round(time.monotonic() - started, 3),
            peak_memory_bytes=0,
            versions={"numpy": np.__version__},
            facts={"random_weights": True, "seed": seed, "dimensions": shape.source},
        ).write(staging)


def _config(shape: Shape, seed: int) -> dict[str, Any]:
    """config.json of the language model, with the mark of random weights."""
    text = {key: value for key, value in shape.text.items() if key not in ("bos_token_id", "eos_token_id")}
    # A text model has no positions of images; with them vLLM's rotary kernel on a CPU writes past its buffers.
    rope = {key: value for key, value in text["rope_parameters"].items() if key not in _ROPE_OF_IMAGES}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        **text,
        "eos_token_id": 2,
        "rope_parameters": rope,
        checkpoint.RANDOM_WEIGHTS: seed,
    }


def _random_chunks(
    key: str, number: int, dtype: str, dimensions: tuple[int, ...], seed: int, report: Callable[[], None]
) -> Callable[[], Iterator[bytes]]:
    """Function that reports and yields a tensor's random bytes; each tensor has its own rng."""
    import torch  # slow

    count = math.prod(dimensions)

    def chunks() -> Iterator[bytes]:
        report()
        rng = np.random.default_rng([seed, number])
        for offset in range(0, count, _CHUNK):
            length = min(_CHUNK, count - offset)
            if key.endswith("A_log"):
                numbers = np.log(rng.uniform(1, 16, length).astype(np.float32))
            elif key.endswith(("linear_attn.norm.weight", "dt_bias")):
                numbers = np.ones(length, dtype=np.float32)
            elif key.endswith("norm.weight") or "layernorm" in key or "pre_fc_norm" in key:
                # Stored as the difference from 1.
                numbers = np.zeros(length, dtype=np.float32)
            else:
                numbers = rng.standard_normal(length, dtype=np.float32) * np.float32(_DEVIATION)
            tensor = torch.from_numpy(numbers)
            yield (tensor if dtype == "F32" else tensor.bfloat16()).view(torch.uint8).numpy().tobytes()

    return chunks
