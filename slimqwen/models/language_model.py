"""The language model of a checkpoint in transformers, text-only whatever form the checkpoint has."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from slimqwen.checkpoint import CorruptCheckpointError
from slimqwen.checkpoint.weights import Weight, read_weights, text_name


def load_language_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a text-only or multimodal checkpoint into its text-only class, on the CPU and in evaluation mode.

    Quantised weights are dequantised. The output head is tied to the embedding where none is stored: configs of
    multimodal checkpoints say it in two places, which can differ.

    Raises:
        CorruptCheckpointError: transformers has no such model, or a tensor of it is missing or has another shape.
        UnsupportedFormatError: a weight is quantised in a form that `Weight` does not read.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (KeyError, ValueError, OSError) as error:
        raise CorruptCheckpointError(
            f"{folder / 'config.json'}: transformers has no language model for it ({_one_line(error)}); choose another "
            "checkpoint"
        ) from None
    weights = {text_name(name): _ReadWhenAsked(weight) for name, weight in read_weights(folder).items()}
    config.tie_word_embeddings = "lm_head.weight" not in weights
    # transformers' own dequantisation does not find a multimodal checkpoint's `quantization_config`.
    config.__dict__.pop("quantization_config", None)
    with quiet_loading():
        try:
            model, found = architecture.from_pretrained(
                None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
            )
        except RuntimeError as error:
            raise CorruptCheckpointError(
                f"{folder}: its tensors do not fit its config.json ({_one_line(error)}); make that checkpoint anew"
            ) from None
    if found["missing_keys"]:
        raise CorruptCheckpointError(
            f"{folder} lacks the tensor {min(found['missing_keys'])}, which its config.json promises; make that "
            "checkpoint anew"
        )
    model.name_or_path = model.config.name_or_path = str(folder)
    return model


def load_in_float32(folder: Path) -> Any:
    """Load a checkpoint's language model as `load_language_model` does, onto the GPU if there is one."""
    return load_language_model(folder).to("cuda" if torch.cuda.is_available() else "cpu")


def read_plain(weight: Weight) -> Tensor:
    """A whole weight in the dtype in which it is stored, in float32 where it is quantised."""
    if weight.is_quantised:
        return torch.cat(list(weight.blocks()))
    tensor: Tensor = weight.carrier.unchanged().read()
    return tensor


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Disable transformers' own progress bars and reports."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


@dataclass(frozen=True)
class _ReadWhenAsked:
    """A weight as transformers takes a tensor of a file: it is read when transformers takes `[...]` of it."""

    weight: Weight

    def __getitem__(self, _: Any) -> Tensor:
        return read_plain(self.weight)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
