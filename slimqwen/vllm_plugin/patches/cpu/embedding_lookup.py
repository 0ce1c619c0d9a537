"""Look rows of a packed embedding up with torch, where Triton's kernels cannot run.

vLLM reads a packed embedding (`CompressedTensorsEmbeddingWNA16Int` in
`vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_embedding.py`) with one Triton kernel,
which gathers the rows of the tokens and unpacks only these. Without Triton the first step ends the engine ("module
'triton' has no attribute 'next_power_of_2'"). With this patch the packed rows are gathered and unpacked by torch, by
the same arithmetic: integers times scales in float32, rounded once to the dtype of the scales.

Remove this patch when vLLM has a lookup for CPUs.
"""

from collections.abc import Callable
from typing import Any

import torch

from slimqwen.vllm_plugin.patches import upstream

_PATCH = "embedding_lookup"


def is_needed() -> bool:
    """Whether Triton's kernels cannot run."""
    return upstream.lacks_triton()


def install() -> bool:
    """Replace vLLM's kernel by `look_up`; False if it is replaced already."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_embedding

    def look(
        stock: Callable[..., Any],
        ids: torch.Tensor,
        weight_packed: torch.Tensor,
        weight_scale: torch.Tensor,
        hidden: int,
        num_bits: int,
    ) -> torch.Tensor:
        return look_up(ids, weight_packed, weight_scale, hidden, num_bits)

    return upstream.replace(_PATCH, compressed_tensors_embedding, "_dequant_gather_triton", look)


def look_up(
    ids: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, columns: int, bits: int
) -> torch.Tensor:
    """Gather and unpack rows: ids [tokens] -> [tokens, columns] in the dtype of the scales.

    Args:
        packed: int32 [rows, columns * bits / 32], the lowest bits first; a stored number is value + 2^(bits - 1).
        scales: [rows, groups].
        bits: 2, 4 or 8.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    words = packed[ids].unsqueeze(-1)
    values = ((words >> shifts) & (2**bits - 1)).flatten(1)[:, :columns] - 2 ** (bits - 1)
    rows = scales[ids]
    grouped = values.unflatten(1, (rows.shape[1], -1)).float() * rows.float().unsqueeze(2)
    return grouped.to(scales.dtype).flatten(1)
