"""The language model of a checkpoint in transformers' text-only class, even if the checkpoint is multimodal.

It is loaded whole, or layer by layer to need little memory; a layer's input is the output of the layer before.
"""

import contextlib
from collections.abc import Iterator, Mapping
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

_EMBEDDING, _LAYERS, _NORM = "model.embed_tokens.weight", "model.layers.", "model.norm.weight"


def load_language_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a text-only or multimodal checkpoint into its text-only class, on the CPU and in evaluation mode.

    Quantised weights are dequantised. The output head is tied to the embedding if none is stored, whatever the config
    says, because a multimodal checkpoint states it in two places that can differ.

    Raises:
        CorruptCheckpointError: transformers has no such model, or a tensor is missing or has another shape.
        UnsupportedFormatError: a weight is quantised in a form that `Weight` does not read.
    """
    return _load_part(folder, read_text_config(folder), _read_text_weights(folder), dtype)


def load_without_layers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load the model without its decoder layers: embedding, final norm and output head, on the CPU.

    It is otherwise loaded as by `load_language_model`, with the same exceptions.
    """
    weights = _read_text_weights(folder)
    around = {name: weight for name, weight in weights.items() if not name.startswith(_LAYERS)}
    return _load_part(folder, _with_layers(read_text_config(folder), 0, 0), around, dtype)


def load_layer(
    folder: Path, number: int, dtype: torch.dtype = torch.float32, *, final_norm: bool = False
) -> Any:
    """Load one decoder layer as a language model of one layer, on the CPU.

    Its input and output are hidden states (`run_layer`), and its vocabulary has one token. The modules have the same
    names as in the whole model.

    Args:
        number: index of the layer, from 0.
        final_norm: whether the model's final norm follows the layer.

    Raises:
        CorruptCheckpointError: transformers has no such model, or a tensor is missing or has another shape.
        UnsupportedFormatError: a weight is quantised in a form that `Weight` does not read.
    """
    config = _with_layers(read_text_config(folder), number, 1)
    config.vocab_size, config.pad_token_id = 1, None
    prefix = f"{_LAYERS}{number}."
    weights: dict[str, Any] = {
        name.replace(prefix, f"{_LAYERS}0."): weight
        for name, weight in _read_text_weights(folder).items()
        if name.startswith((prefix, _NORM))
    }
    weights[_EMBEDDING] = torch.zeros(1, config.hidden_size)
    model = _load_part(folder, config, weights, dtype)
    if not final_norm:
        model.model.norm = torch.nn.Identity()
    model.model.layers.add_module(str(number), model.model.layers.pop(0))
    return model


def run_layer(layer: Any, states: Tensor) -> Tensor:
    """Run a layer from `load_layer`: hidden states [batch, tokens, hidden] -> [batch, tokens, hidden], in main memory.

    The layer is moved to the GPU if there is one.
    """
    with torch.no_grad():
        output: Tensor = layer.to(compute_device()).model(
            inputs_embeds=states.to(compute_device()), use_cache=False
        )[0]
    return output.cpu()


def read_embeddings(folder: Path, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """The embeddings of token ids, which are the hidden states before the first layer: [...] -> [..., hidden].

    Args:
        ids: token ids, each below the number of stored rows; the embeddings of others stay undefined.
        out: tensor to write the embeddings to; None for a new one in float32.

    Raises:
        CorruptCheckpointError: the embedding is missing, or one of its numbers is not finite.
        UnsupportedFormatError: the embedding is quantised in a form that `Weight` does not read.
    """
    stored = _read_text_weights(folder).get(_EMBEDDING)
    if stored is None:
        raise CorruptCheckpointError(f"{folder} lacks the tensor {_EMBEDDING}")
    embeddings = torch.empty(*ids.shape, stored.weight.shape[1]) if out is None else out
    first = 0
    for rows in stored.weight.blocks():
        if not torch.isfinite(rows).all():
            raise CorruptCheckpointError(f"{folder}: {_EMBEDDING} has NaN or infinity")
        found = (ids >= first) & (ids < first + len(rows))
        embeddings[found] = rows[ids[found] - first].to(embeddings.dtype)
        first += len(rows)
    return embeddings


def build_empty_model(folder: Path) -> Any:
    """The language model without values: its parameters are on torch's meta device."""
    config = read_text_config(folder)
    with torch.device("meta"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def read_text_config(folder: Path) -> Any:
    """The config of a checkpoint's text-only class, without its quantization_config.

    Raises:
        CorruptCheckpointError: transformers has no such language model.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (KeyError, ValueError, OSError) as error:
        raise CorruptCheckpointError(
            f"transformers has no language model for {folder / 'config.json'} ({_one_line(error)})",
            "choose another checkpoint",
        ) from None
    # transformers' own dequantisation does not find a multimodal checkpoint's `quantization_config`.
    config.__dict__.pop("quantization_config", None)
    return config


def load_in_float32(folder: Path) -> Any:
    """Load a checkpoint's language model in float32, onto the GPU if there is one.

    Raises:
        CorruptCheckpointError: transformers has no such model, or a tensor is missing or has another shape.
        UnsupportedFormatError: a weight is quantised in a form that `Weight` does not read.
    """
    return load_language_model(folder).to(compute_device())


def read_plain(weight: Weight) -> Tensor:
    """A whole weight: in its stored dtype if it is not quantised, else in float32."""
    if weight.is_quantised:
        return torch.cat(list(weight.blocks()))
    tensor: Tensor = weight.carrier.unchanged().read()
    return tensor


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Disable transformers' own progress bars and warnings for the length of a `with` block."""
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
    """Stand-in for a tensor of a file that transformers loads: the weight is read when transformers indexes it."""

    weight: Weight

    def __getitem__(self, _: Any) -> Tensor:
        return read_plain(self.weight)


def _read_text_weights(folder: Path) -> dict[str, _ReadWhenAsked]:
    return {text_name(name): _ReadWhenAsked(weight) for name, weight in read_weights(folder).items()}


def _with_layers(config: Any, first: int, count: int) -> Any:
    """The config with `count` of its layers, from the one with the index `first`."""
    # Families with one kind of attention, as Llama, may not list their layers.
    if types := getattr(config, "layer_types", None):
        config.layer_types = types[first : first + count]
    config.num_hidden_layers = count
    return config


def _load_part(folder: Path, config: Any, weights: Mapping[str, Any], dtype: torch.dtype) -> Any:
    config.tie_word_embeddings = "lm_head.weight" not in weights
    with quiet_loading():
        try:
            model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None, config=config, state_dict=dict(weights), dtype=dtype, output_loading_info=True
            )
        except RuntimeError as error:
            raise CorruptCheckpointError(
                f"the tensors of {folder} do not fit its config.json ({_one_line(error)})"
            ) from None
    if found["missing_keys"]:
        raise CorruptCheckpointError(
            f"{folder} lacks the tensor {min(found['missing_keys'])}, which its config.json promises"
        )
    model.name_or_path = model.config.name_or_path = str(folder)
    return model


def compute_device() -> str:
    """The device for whole layers: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
