"""The stage `quantise_embedding`: packs the input embedding to 8 or 4 bits with a scale per group, rounded to nearest.

A forward pass reads one row of the embedding for each token, so packing saves memory and no time: what it frees becomes
KV cache. vLLM looks packed rows up without unpacking the others; `slimqwen.vllm_plugin.patches.faults.embedding_config`
makes Qwen3.5 and its MTP head load them. An output head that is tied to the embedding keeps the 16-bit rows and becomes
a tensor of its own, so a tied model grows unless `quantise_lm_head` packs that too, before or after. Rows pass through
in blocks.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import quantised, untied, write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, rewrite
from slimqwen.formats import find_format
from slimqwen.formats.compressed_tensors import config_group, with_group
from slimqwen.models.outline import Outline
from slimqwen.models.shape import Packing
from slimqwen.progress import Progress
from slimqwen.recipe.stage import D, Facts, Fault, Needs, Parameters, Stage, require_fit
from slimqwen.recipe.stages.quantise_lm_head import inspect_table

_HEAD = "lm_head.weight"
_IMPORTS_BYTES = 700 * 2**20
"""Resident memory of torch and compressed-tensors, bytes."""


class QuantiseEmbeddingParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        bits: bits of a weight.
        group_size: number of weights in a row that share a scale.
    """

    bits: Literal[8, 4] = 8
    group_size: Literal[32, 64, 128] = 32

    @property
    def packing(self) -> Packing:
        """How the embedding is packed."""
        return Packing(bits=self.bits, group_size=self.group_size)


def quantise_embedding(
    source: Path, destination: Path, parameters: QuantiseEmbeddingParameters, progress: Progress
) -> Facts:
    """Write source to destination with its embedding packed, and its output head untied.

    Raises:
        StageError: the checkpoint is quantised in another format than compressed-tensors, the embedding is packed
            already, or its rows do not divide into groups.
        CorruptCheckpointError: the embedding is not finite.
    """
    config, outline = checkpoint.read_config(source), Outline.read(source)
    require_fit(inspect_embedding(outline, parameters))
    [(embedding, info)] = packing.linears(outline.tensors, "embed_tokens").items()
    packed = packing.rounded_to_nearest(info, embedding, parameters.bits, parameters.group_size)
    head = {} if _has_own_head(outline) else {_HEAD: info.unchanged()}

    def change(name: str, _: TensorInfo) -> Mapping[str, NewTensor] | None:
        return {**packed, **head} if name == embedding else None

    rewrite(source, destination, change, progress)
    carry_side_files(source, destination)
    group = config_group(packing.LINEARS["embed_tokens"], parameters.bits, parameters.group_size)
    module = embedding.removesuffix(".weight")
    form = with_group(checkpoint.quantisation(config), "embed_tokens", group, [module])
    write_config(destination, quantised(untied(config), form))
    return {
        "embedding_bytes_before": info.end - info.start,
        "embedding_bytes_after": sum(tensor.bytes for tensor in packed.values()),
        "head_bytes_added": sum(tensor.bytes for tensor in head.values()),
    }


def _has_own_head(outline: Outline) -> bool:
    return any(name.startswith("lm_head.") for name in outline.tensors)


def needs(outline: Outline, parameters: QuantiseEmbeddingParameters) -> Needs:
    """Needs: disk for the packed embedding beside the input's tensors; memory for blocks of rows."""
    table = outline.text["vocab_size"] * outline.text["hidden_size"]
    return Needs(outline.disk_bytes + 2 * table, _IMPORTS_BYTES + 8 * packing.BLOCK_BYTES, 20 * table)


def inspect_embedding(outline: Outline, parameters: QuantiseEmbeddingParameters) -> Iterator[Fault]:
    """Find faults: an embedding that is packed already, rows that do not divide into groups."""
    if fault := find_format(checkpoint.quantisation(outline.config)).refused_addition():
        yield Fault(f"{outline.name} {fault}")
        return
    tables = list(packing.linears(outline.tensors, "embed_tokens"))
    if len(tables) != 1:
        yield Fault(
            f"{outline.name} has {len(tables)} embeddings in 16 bits instead of one; remove quantise_embedding from "
            "the recipe"
        )
        return
    yield from inspect_table(outline, tables[0], parameters.group_size)


def summarise(facts: Facts) -> str:
    """Say how large the embedding is, and whether the checkpoint grows because its output head was tied to it."""
    before, after, added = (
        int(facts[name]) / 1e6  # type: ignore[arg-type]
        for name in ("embedding_bytes_before", "embedding_bytes_after", "head_bytes_added")
    )
    text = f"the embedding takes {after:.1f} instead of {before:.1f} MB"
    if not added:
        return text
    return (
        f"{text}, and the output head, which was tied to it, {added:.1f} MB of its own: "
        f"{after + added - before:.1f} MB more until quantise_lm_head packs it"
    )


def reshape(shape: D, parameters: QuantiseEmbeddingParameters, /) -> D:
    """The dimensions with the embedding packed, and an output head of its own."""
    return shape.with_packing({"embed_tokens": parameters.packing})


STAGE = Stage(
    name="quantise_embedding",
    parameters=QuantiseEmbeddingParameters,
    run=quantise_embedding,
    needs=needs,
    inspect=inspect_embedding,
    summarise=summarise,
    reshape=reshape,
    changes=lambda _: (packing.tensor_pattern("embed_tokens"), re.escape(_HEAD)),
)
