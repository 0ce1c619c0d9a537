"""Weights of 4 bits meet activations of 16 bits, as their checkpoint says, on a CPU.

`VLLM_CPU_INT4_W4A8` is on by default: where a CPU has AMX, vLLM rounds the activations of every W4A16 linear to 8 bits
(`process_weights_after_loading` in `vllm/model_executor/kernels/linear/mixed_precision/cpu.py`) and says nothing. The
log-probabilities of one checkpoint then depend on the CPU that serves it.

A value that was set, for example in a config.env, stays.

Goes away when vLLM's default for the variable is 0.
"""

import os

_VARIABLE = "VLLM_CPU_INT4_W4A8"
WHY = "vLLM would round the activations of W4A16 linears to 8 bits where the CPU has AMX"


def is_needed() -> bool:
    """Whether the variable is unset."""
    return _VARIABLE not in os.environ


def install() -> bool:
    """Turn it off; False if the variable is set."""
    if _VARIABLE in os.environ:
        return False
    os.environ[_VARIABLE] = "0"
    return True
