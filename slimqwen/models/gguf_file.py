"""Converts a GGUF file to a checkpoint in 16 bits, tensor by tensor.

GGUF is the format of llama.cpp (ggml's docs/gguf.md). Names of tensors are those of the package gguf, which also
dequantises. What llama.cpp's convert_hf_to_gguf.py changed is undone: rows of queries and keys of Llama lie in another
order (`_stored_order`), and the rotary scaling of Llama 3.1 is a tensor of factors instead of settings.
"""

import importlib.metadata
import json
import math
import os
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import MANIFEST, file_records, publish
from slimqwen.checkpoint.tensors import NewTensor, from_torch, write_tensors
from slimqwen.errors import SlimqwenError
from slimqwen.models.families import FAMILIES, Family
from slimqwen.models.gguf_tokenizer import TokenizerError, build_tokenizer
from slimqwen.models.shape import Shape, Tensors
from slimqwen.progress import Progress, silent

_FAMILIES = {family.name: family for family in FAMILIES if family.linears == ("mlp", "attention")}
"""llama.cpp's names of these architectures are those of the families."""

_BLOCK_BYTES = 16 * 2**20
"""Bytes of float32 numbers that are dequantised at a time."""

_FLOATS = ("F32", "F16", "BF16")
_FACTORS = "rope_freqs.weight"
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rotary scaling as published with every Llama 3.1, 3.2 and 3.3, but for `factor`."""

_ORIGIN_KEYS = ("general.source.huggingface.repository", "general.source.repo_url", "general.repo_url")


class GgufError(SlimqwenError):
    """A GGUF file that cannot be converted to a checkpoint."""


class GgufFile:
    """A GGUF file: its settings and tensors, without their content.

    Args:
        path: the file.

    Raises:
        GgufError: it is no GGUF file, or one of several parts.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise GgufError(f"{path} is no GGUF file that can be read ({error}); download it anew") from None
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self.get("split.count", 1) > 1:
            raise GgufError(f"{path} is one part of several; merge them with llama.cpp's gguf-split --merge")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the file's metadata, else `default`; `{arch}` in a key is the architecture's name."""
        field = self._reader.fields.get(key.replace("{arch}", self.architecture) if "{" in key else key)
        return default if field is None else field.contents()

    @cached_property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.get("general.architecture", "unknown"))

    @property
    def origin(self) -> str | None:
        """Name of the model from which the file was made; None if the file does not state it."""
        for key in _ORIGIN_KEYS:
            if value := self.get(key):
                return str(value).removeprefix("https://huggingface.co/")
        name, owner = self.get("general.name"), self.get("general.organization")
        return f"{name} of {owner}" if name and owner else name

    @property
    def family(self) -> Family:
        """The family of the model.

        Raises:
            GgufError: the family cannot be converted.
        """
        family = _FAMILIES.get(self.architecture)
        if family is None or self.get("{arch}.expert_count", 0):
            experts = " with experts" if family else ""
            raise self.refused(
                f"is of the architecture {self.architecture}{experts}, not {', '.join(_FAMILIES)}"
            )
        return family

    def refused(self, fault: str) -> GgufError:
        """Make the error for a file that cannot be converted; it names the original model as the cure."""
        original = f"of {self.origin}" if self.origin else "that it was made from"
        return GgufError(f"{self.path} {fault}; take the safetensors checkpoint {original}")

    @property
    def types(self) -> str:
        """Types of the matrices with their numbers, such as `Q4_1 (210), Q8_0 (1)`; the type of most weights first."""
        counts, weights = Counter[str](), Counter[str]()
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.tensor_type.name] += 1
                weights[tensor.tensor_type.name] += int(tensor.n_elements)
        return ", ".join(f"{kind} ({counts[kind]})" for kind, _ in weights.most_common())

    @property
    def is_quantised(self) -> bool:
        """Whether a tensor has lost precision to a type of fewer than 16 bits."""
        return any(tensor.tensor_type.name not in _FLOATS for tensor in self.tensors.values())

    @property
    def dtype(self) -> str:
        """Dtype of the checkpoint: F16 if all matrices have it, so that nothing is lost; otherwise BF16."""
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values() if len(tensor.shape) > 1}
        return "F16" if kinds == {"F16"} else "BF16"

    def config(self) -> dict[str, Any]:
        """config.json of the checkpoint.

        Raises:
            GgufError: the family or the rotary scaling is not known, or a setting is missing.
        """
        family = self.family

        def required(key: str) -> Any:
            if (value := self.get(f"{{arch}}.{key}")) is None:
                raise self.refused(f"has no setting {self.architecture}.{key}")
            return value

        if "token_embd.weight" not in self.tensors:
            raise self.refused("lacks the tensor token_embd.weight")
        heads, hidden = required("attention.head_count"), required("embedding_length")
        if self.get("{arch}.attention.sliding_window"):
            raise self.refused("has sliding-window attention, which is not converted")
        is_biased = family.name == "llama" and "blk.0.attn_output.bias" in self.tensors
        settings = {
            "architectures": [family.architectures[0]],
            "model_type": family.name,
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": required("feed_forward_length"),
            "num_hidden_layers": required("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("{arch}.attention.head_count_kv", heads),
            "head_dim": self.get("{arch}.attention.key_length", hidden // heads),
            "hidden_act": "silu",
            "max_position_embeddings": required("context_length"),
            "rms_norm_eps": _rounded(required("attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rotary(),
            "attention_bias": is_biased,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._ends(),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
            "dtype": {"BF16": "bfloat16", "F16": "float16"}[self.dtype],
        }
        return {key: value for key, value in settings.items() if value is not None}

    def _ends(self) -> int | list[int] | None:
        """Ids of the tokens that end a response: of a text and, where it is another one, of a turn."""
        ids = [self.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        found = list(dict.fromkeys(token for token in ids if token is not None))
        return found if len(found) > 1 else next(iter(found), None)

    def _rotary(self) -> dict[str, Any]:
        theta = _rounded(self.get("{arch}.rope.freq_base", 10000.0))
        kind = self.get("{arch}.rope.scaling.type", "none")
        plain = {"rope_theta": theta, "rope_type": "default"}
        if _FACTORS in self.tensors:
            factors = self.tensors[_FACTORS].data
            scaling = {**_LLAMA3_SCALING, "factor": float(factors.max())}
            if np.allclose(factors, _llama3_factors(theta, len(factors), scaling), rtol=1e-4):
                return {"rope_theta": theta, **scaling}
            raise self.refused("has a scaling of rotary positions that is not Llama 3's")
        if kind in ("linear", "yarn"):
            length = self.get("{arch}.rope.scaling.original_context_length")
            original = {"original_max_position_embeddings": length} if length else {}
            factor = _rounded(self.get("{arch}.rope.scaling.factor", 1.0))
            return {**plain, "rope_type": kind, "factor": factor, **original}
        if kind != "none":
            raise self.refused(f"has the rotary scaling {kind}, which is not converted")
        return plain

    def new_tensors(self, expected: Tensors) -> dict[str, NewTensor]:
        """The tensors to write, by name.

        Args:
            expected: names and shapes that config.json promises.

        Raises:
            GgufError: a tensor is missing, has another shape, or a type that gguf does not dequantise; or there is one
                that the family does not have.
        """
        import gguf

        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        names = gguf.get_tensor_name_map(kind, self.get("{arch}.block_count"))
        left = self.tensors.keys() - {_FACTORS}
        found = {}
        for name, (_, shape) in expected.items():
            module, _, part = name.rpartition(".")
            stored = f"{names.get_name(module)}.{part}"
            if (tensor := self.tensors.get(stored)) is None:
                raise self.refused(f"lacks the tensor {stored}")
            if tuple(reversed(tensor.shape.tolist())) != shape:
                raise self.refused(f"has {stored} in another shape than its settings say")
            left -= {stored}
            found[name] = self._new_tensor(tensor, shape, self._stored_order(module, shape[0]))
        if left:
            raise self.refused(f"has the tensor {min(left)}, which is unknown for {self.architecture}")
        return found

    def _stored_order(self, module: str, rows: int) -> npt.NDArray[np.int64] | None:
        """Positions in the file of the rows of a linear; None where they are in order.

        llama.cpp rotates neighbouring rows of a head of Llama, where transformers rotates those of its two halves
        (`permute` in convert_hf_to_gguf.py).
        """
        key = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(module.rpartition(".")[2])
        if self.architecture != "llama" or key is None:
            return None
        heads = self.get(f"{{arch}}.attention.{key}") or self.get("{arch}.attention.head_count")
        order: npt.NDArray[np.int64] = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return order

    def _new_tensor(
        self, tensor: Any, shape: tuple[int, ...], order: npt.NDArray[np.int64] | None
    ) -> NewTensor:
        import gguf

        try:
            gguf.dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            raise self.refused(
                f"has {tensor.name} in {tensor.tensor_type.name}, which the package gguf cannot read"
            ) from None
        step = max(1, _BLOCK_BYTES // (4 * math.prod(shape[1:])))

        def chunks() -> Iterator[bytes | memoryview]:
            import torch

            for first in range(0, shape[0], step):
                rows = slice(first, first + step) if order is None else order[first : first + step]
                numbers = gguf.dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float32)
                if not np.isfinite(numbers).all():
                    raise GgufError(f"{self.path}: {tensor.name} has NaN or infinity; download the file anew")
                yield from from_torch(torch.from_numpy(numbers), self.dtype).chunks()

        return NewTensor(self.dtype, shape, chunks)


def make_checkpoint(file: GgufFile, target: Path, progress: Progress = silent) -> Manifest:
    """Make a new folder with the 16-bit checkpoint of a GGUF file, and return its manifest.

    Args:
        target: the folder; nothing may be there yet.

    Raises:
        GgufError: `target` exists, the file cannot be converted, or the disk is too small.
    """
    if os.path.lexists(target):
        raise GgufError(f"{target} exists already; move it away")
    started = time.monotonic()
    with publish(target) as folder:
        facts = convert_gguf(file, folder, progress)
        return write_manifest(folder, "convert_gguf", facts, time.monotonic() - started)


def write_manifest(
    folder: Path, stage: str, facts: Mapping[str, str | bool], wall_seconds: float
) -> Manifest:
    """Write and return the manifest of a folder that holds a converted GGUF file.

    Args:
        stage: how the folder came here, such as convert_gguf.
        facts: facts about the GGUF file, from `convert_gguf`.
        wall_seconds: time that it took.
    """
    manifest = Manifest(
        stage=stage,
        files=file_records(folder),
        wall_seconds=wall_seconds,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        versions={"gguf": importlib.metadata.version("gguf")},
        facts=dict(facts),
    )
    manifest.write(folder)
    return manifest


def convert_gguf(file: GgufFile, folder: Path, progress: Progress = silent) -> dict[str, str | bool]:
    """Write the 16-bit checkpoint of a GGUF file into a folder: config.json, tokenizer files and safetensors.

    Args:
        progress: receives (activity, done, total) in bytes.

    Returns:
        Facts about the file for the manifest, such as its name, its types and the original model.

    Raises:
        GgufError: the file cannot be converted, or the disk is too small.
    """
    config = file.config()
    try:
        tokenizer = build_tokenizer(file.get)
    except TokenizerError as error:
        raise file.refused(str(error)) from None
    tensors = file.new_tensors(Shape.of_config(config).tensors)
    total, done = sum(tensor.bytes for tensor in tensors.values()), 0
    if shutil.disk_usage(folder).free < total:
        raise GgufError(f"{folder.parent} has no room for {total / 1e9:.1f} GB of weights; free disk space")

    def counted(tensor: NewTensor) -> Iterator[bytes | memoryview]:
        nonlocal done
        for chunk in tensor.chunks():
            yield chunk
            done += len(chunk)
            progress("converting", done, total)

    written = {name: replace(tensor, chunks=partial(counted, tensor)) for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", written)
    write_config(folder, config)
    ends = {key: value for key, value in config.items() if key.endswith("_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")
    for name, content in tokenizer.files(config["max_position_embeddings"]).items():
        (folder / name).write_text(content, encoding="utf-8")
    return {
        "gguf": file.path.name,
        "types": file.types,
        "quantised": file.is_quantised,
        "origin": file.origin or "unknown",
    }


def describe_origin(folder: Path) -> str | None:
    """Say from which GGUF file a checkpoint was made, and with what loss; None if it was not made from one."""
    facts = Manifest.read(folder).facts if (folder / MANIFEST).is_file() else {}
    if "gguf" not in facts:
        return None
    loss = "with the loss of its own quantisation" if facts["quantised"] else "without loss"
    return f"{facts['gguf']} ({facts['types']}) in 16 bits, {loss}; original: {facts['origin']}"


def _rounded(number: float) -> float:
    """A float32 in the fewest digits that a config.json would have."""
    return float(f"{number:.7g}")


def _llama3_factors(theta: float, count: int, scaling: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """What Llama 3.1's scaling divides each frequency by, as transformers' `_compute_llama3_parameters` does."""
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = scaling["original_max_position_embeddings"] * theta ** (-np.arange(count) / count) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return divisors
