"""The hidden states of texts, computed layer by layer and kept in files; only one layer is in memory at a time."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slimqwen.models.language_model import load_layer, read_embeddings, read_text_config, run_layer
from slimqwen.progress import Progress


def store_hidden_states(
    checkpoint: Path, texts: Sequence[Sequence[int]], folder: Path, dtype: torch.dtype, progress: Progress
) -> list[Tensor]:
    """Compute the language model's output after its final norm for each text, layer by layer.

    A killed run continues with the layer at which it stopped; in a finished folder nothing is computed.

    Args:
        texts: token ids of each text.
        folder: folder of the states, for this checkpoint, these texts and this dtype only.

    Returns:
        For each text [1, tokens, hidden], mapped from a file of `folder`, so that the states take no memory.

    Raises:
        OSError: the disk is full.
    """
    config, lengths = read_text_config(checkpoint), list(map(len, texts))
    folder.mkdir(parents=True, exist_ok=True)
    partial, last = folder / "partial", config.num_hidden_layers

    def states_of(file: Path) -> Tensor:
        size = sum(lengths) * config.hidden_size
        with file.open("a+b") as stream:  # a full disk is an error here, and would be a SIGBUS in the mapping
            os.posix_fallocate(stream.fileno(), 0, size * dtype.itemsize)
        states: Tensor = torch.from_file(str(file), shared=True, size=size, dtype=dtype)
        return states.view(-1, config.hidden_size)

    # The number in a file's name is the number of layers that its states have passed.
    done = max((int(file.name) for file in folder.glob("[0-9]*")), default=-1)
    for number in range(done + 1, last + 1):
        progress("computing hidden states", number, last + 1)
        outputs = states_of(partial)
        if number:
            inputs = states_of(folder / str(number - 1))
            layer = load_layer(checkpoint, number - 1, dtype, final_norm=number == last)
            for given, made in zip(inputs.split(lengths), outputs.split(lengths), strict=True):
                made.copy_(run_layer(layer, given[None])[0])
            del layer  # frees its memory before the next is loaded
        else:
            ids = torch.tensor([token for text in texts for token in text])
            read_embeddings(checkpoint, ids, outputs)
        partial.rename(folder / str(number))
        (folder / str(number - 1)).unlink(missing_ok=True)
    return [states[None] for states in states_of(folder / str(last)).split(lengths)]
