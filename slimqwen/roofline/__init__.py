"""Roofline of decoding and prefill: the fastest a variant could run on a GPU, from tensor shapes and a data sheet.

A forward pass takes at least max(bytes / memory bandwidth, FLOPs / peak FLOP/s): the roofline model of Williams,
Waterman and Patterson (CACM 52, 2009). A decode step is one verify pass over K + 1 tokens per sequence (the last token
and K drafts) and K sequential passes of the MTP head. The model counts

- every weight once per pass, at its stored size. Rows of an embedding are gathered, but one that is tied to the output
  head is read whole. Packed weights are multiplied in 16 bits: packing saves bytes, not FLOPs;
- the KV cache of full-attention layers;
- the states of Gated DeltaNet layers (Yang, Kautz and Hatamizadeh, arXiv:2412.06464), read and written once per step;
- one multiply-add as two FLOPs.

Activations, norms, sampling, kernel launches and the host are not counted, so a real server is slower.
"""

from slimqwen.errors import SlimqwenError


class RooflineError(SlimqwenError):
    """No roofline can be computed for a checkpoint, flags or figures, or a model does not fit on a GPU."""
