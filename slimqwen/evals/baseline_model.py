"""A baseline's next-token distributions, computed by transformers in float32 from hidden states that are kept."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slimqwen import checkpoint
from slimqwen.identity import digest_of
from slimqwen.models.language_model import load_in_float32
from slimqwen.serving.in_process import return_freed_memory

KEPT_STATES = Path(".cache") / "baseline_states"
"""Folder with the kept hidden states of baselines, relative to the repository; deleted states are computed again."""

_STATES = "hidden_states"


class BaselineModel:
    """The baseline in transformers and float32: activations are not quantised, even if quantization_config asks for it.

    On a CPU transformers has no fused kernel for Gated DeltaNet and reads texts slowly. The hidden states of each text
    (inputs of lm_head, tokens x hidden size x 4 bytes) are therefore kept on disk and used for all variants of the
    baseline, by digests of checkpoint and text.
    """

    def __init__(self, weights: Path, cache: Path) -> None:
        """Load a checkpoint and dequantise its weights.

        Args:
            weights: folder of the checkpoint.
            cache: folder of the kept hidden states.

        Raises:
            UnsupportedFormatError: a weight is quantised in a form that is not read here.
            CorruptCheckpointError: transformers has no such model, or a tensor is missing or has another shape.
        """
        self._model: Any = load_in_float32(weights)
        self._head = self._model.get_output_embeddings()
        self._weights, self._cache = weights, cache
        self._origin = (
            checkpoint.digest(weights),
            transformers.__version__,
            torch.__version__,
            torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else torch.backends.cpu.get_cpu_capability(),
        )

    def log_probabilities(self, ids: Sequence[int]) -> Tensor:
        """Log-probabilities over the vocabulary at each position, given the tokens before it; the first token has none.

        Args:
            ids: token IDs of a text.

        Returns:
            float32 [len(ids) - 1, vocabulary], in main memory.
        """
        file = self._cache / f"{digest_of([self._origin, list(ids)])}.safetensors"
        with torch.inference_mode():
            states = _read(file)
            if states is None:
                states = self._hidden_states(ids[:-1])
                _write(file, states)
            logits = self._head(states.to(self._head.weight.device))[0]
            return logits.float().log_softmax(-1).cpu()

    def free_layers(self) -> None:
        """Free the layers; the output head, kept, suffices for texts with kept states. Others load the layers again."""
        self._model = None
        return_freed_memory()

    def _hidden_states(self, ids: Sequence[int]) -> Tensor:
        """Input of the output head: float32 [1, len(ids), hidden size], in main memory."""
        if self._model is None:
            self._model = load_in_float32(self._weights)
        output = self._model.model(torch.tensor([list(ids)], device=self._model.device), use_cache=False)
        return output.last_hidden_state.cpu()


def _read(file: Path) -> Tensor | None:
    """Read the kept states of one text; None if the file is missing or incomplete."""
    try:
        return load_file(file)[_STATES]
    except (FileNotFoundError, SafetensorError, KeyError):
        return None


def _write(file: Path, states: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Published by rename, because another evaluation may read or write the same text's states at the same time.
    unfinished = file.with_suffix(f".{os.getpid()}")
    save_file({_STATES: states.contiguous()}, unfinished)
    unfinished.rename(file)
