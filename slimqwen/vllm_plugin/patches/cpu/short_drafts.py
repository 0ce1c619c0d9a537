"""Keep the state of Gated DeltaNet's convolution right when a step has fewer than K drafted tokens, on a CPU.

Near the end of its context a request gets fewer than K drafted tokens. `_spec_forward` in
`vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py` assumes K for every request, in both of its branches:

- The torch branch puts fewer tokens in the wrong columns of the buffer, so that the next step reads a wrong history. If
  the step before accepted more tokens than this step has, the engine dies: "The size of tensor a (7) must match the
  size of tensor b (3)".
- The native kernel, which CPUs with AMX and ARM CPUs with bfloat16 use for steps of equal length, dies in the same
  situation: "num_accepted_tokens must be in [1, seqlen]".

The buffer of a sequence has `width - 1 + K` columns. The next step reads `width - 1` of them, beginning at column
`accepted - 1`: so the new tokens have to begin at column `width - 2`, whatever their number. Steps in which every
sequence has K drafted tokens are left to vLLM.

Remove this fix with support for vLLM 0.32: in 0.33 `_spec_forward` places the new tokens by `width`, and gives the
native kernel only steps in which every sequence has K drafted tokens.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from slimqwen.vllm_plugin.patches.upstream import expect, replace

_FIX = "short_drafts"


def roll(row: torch.Tensor, new: torch.Tensor, accepted: int, width: int) -> torch.Tensor:
    """Append the tokens of a step to the convolution's history of one sequence, in place.

    Args:
        row: [channels, width - 1 + K], the history; its valid `width - 1` columns begin at column `accepted - 1`.
        new: [channels, tokens], 1 to K + 1 new tokens.
        accepted: number of tokens of the step before that were kept, at least 1.
        width: width of the convolution.

    Returns:
        [channels, width - 1 + tokens], the input of the convolution over the new tokens.
    """
    prior = row[:, accepted - 1 : accepted + width - 2].clone()
    row[:, : width - 2] = prior[:, 1:]
    row[:, width - 2 : width - 2 + new.shape[1]] = new
    return torch.cat([prior, new], dim=1)


def install() -> bool:
    """Replace vLLM's steps in which a sequence has fewer than K drafted tokens.

    Returns:
        False if it is installed already in this process.
    """
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
        # K + 1 tokens: the token that was sampled and K drafted ones.
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
