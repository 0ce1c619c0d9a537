"""Speculation with fewer drafts than K keeps the state of Gated DeltaNet's convolution, on a CPU.

Near the end of its context a request gets fewer than K drafts. `_spec_forward` in
`vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py` takes it that there are always K, in both of its ways:

- By torch it puts fewer tokens in the wrong columns of the buffer, so that the next step reads a wrong history. Where
  more drafts were accepted just before than come now, the engine dies: "The size of tensor a (7) must match the size
  of tensor b (3)".
- By the native kernel, which CPUs with AMX and ARM CPUs with bfloat16 have for steps of equal length, it dies in the
  same place: "num_accepted_tokens must be in [1, seqlen]".

The buffer of a sequence has `width - 1 + K` columns. The next step reads `width - 1` of them, beginning at the column
`accepted - 1`: so the new tokens have to begin at column `width - 2`, however many they are. Steps in which every
sequence has K drafts are left to vLLM.

Goes away with vLLM 0.32: in 0.33 `_spec_forward` places the new tokens by `width`, and gives the native kernel only
steps in which every sequence has K drafts.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from slimqwen.vllm_plugin.engine_fixes.upstream import expect, replace

_FIX = "short_drafts"
WHY = "vLLM takes it that every sequence always has K drafts, which is not so near the end of a context"
FIXED_IN = "0.33.0"


def roll(row: torch.Tensor, new: torch.Tensor, accepted: int, width: int) -> torch.Tensor:
    """Append a step's tokens to the convolution's history of one sequence, in place.

    Args:
        row: [channels, width - 1 + K], the history; its last `width - 1` valid columns end where `accepted` says.
        new: [channels, tokens], 1 to K + 1 of them.
        accepted: tokens of the step before that stayed, at least 1.
        width: of the convolution.

    Returns:
        [channels, width - 1 + tokens]: what the convolution over the new tokens reads.
    """
    prior = row[:, accepted - 1 : accepted + width - 2].clone()
    row[:, : width - 2] = prior[:, 1:]
    row[:, width - 2 : width - 2 + new.shape[1]] = new
    return torch.cat([prior, new], dim=1)


def install() -> bool:
    """Take over the steps in which a sequence has fewer drafts than K; False if that was done before."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as upstream

    for name in ("_unpacked_conv_weight", "ops", "F"):
        expect(_FIX, hasattr(upstream, name), f"{upstream.__name__} has no {name}")

    def spec_forward(
        stock: Callable[..., torch.Tensor],
        layer: Any,
        attn_metadata_i: Any,
        mixed_qkv_spec: torch.Tensor,
        b_spec: torch.Tensor,
        a_spec: torch.Tensor,
        conv_buf: torch.Tensor,
        ssm_state: torch.Tensor,
        width: int,
        state_len: int,
    ) -> torch.Tensor:
        metadata = attn_metadata_i
        count = metadata.num_spec_decodes
        starts = metadata.spec_query_start_loc[: count + 1].tolist()
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        # K + 1 tokens: the one that was sampled and K drafts.
        if all(length == state_len - width + 2 for length in lengths):
            return stock(
                layer, metadata, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, width, state_len
            )
        weight = upstream._unpacked_conv_weight(layer).unsqueeze(1)
        slots = metadata.spec_state_indices_tensor[:count, 0].tolist()
        accepted = metadata.num_accepted_tokens[:count].tolist()
        convolved = torch.empty_like(mixed_qkv_spec)
        for slot, stayed, start, length in zip(slots, accepted, starts, lengths, strict=False):
            if not length:
                continue
            new = mixed_qkv_spec[start : start + length].T.to(conv_buf.dtype)
            read = roll(conv_buf[slot], new, stayed, width).unsqueeze(0)
            out = upstream.F.conv1d(read, weight, layer.conv1d.bias, groups=new.shape[0])[0]
            out = upstream.F.silu(out) if layer.activation == "silu" else out
            convolved[start : start + length] = out.T.to(convolved.dtype)
        query, key, value = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(convolved))
        return upstream.ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            q=query,
            k=key,
            v=value,
            a=a_spec,
            b=b_spec,
            initial_state_source=ssm_state,
            spec_state_indices=metadata.spec_state_indices_tensor[:count].to(torch.int32).contiguous(),
            num_accepted_tokens=metadata.num_accepted_tokens[:count].to(torch.int32).contiguous(),
            cu_seqlens=metadata.spec_query_start_loc[: count + 1].to(torch.int32).contiguous(),
            use_qk_l2norm_in_kernel=True,
        )

    return replace(_FIX, upstream, "_spec_forward", spec_forward)
