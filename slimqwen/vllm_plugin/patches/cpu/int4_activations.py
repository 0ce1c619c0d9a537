"""Keep activations of W4A16 linears in 16 bits on a CPU, as the checkpoint says.

`VLLM_CPU_INT4_W4A8` is on by default: on a CPU with AMX, vLLM silently rounds the activations of every W4A16 linear to
8 bits (`process_weights_after_loading` in `vllm/model_executor/kernels/linear/mixed_precision/cpu.py`). The
log-probabilities of a checkpoint then depend on the CPU that serves it.

A value that was set, for example in a config.env, is kept.

Remove this fix when vLLM's default for the variable is 0.
"""

import os

_VARIABLE = "VLLM_CPU_INT4_W4A8"


def is_needed() -> bool:
    """Whether VLLM_CPU_INT4_W4A8 is unset."""
    return _VARIABLE not in os.environ


def install() -> bool:
    """Set VLLM_CPU_INT4_W4A8 to 0; False if the variable is set already."""
    if _VARIABLE in os.environ:
        return False
    os.environ[_VARIABLE] = "0"
    return True
