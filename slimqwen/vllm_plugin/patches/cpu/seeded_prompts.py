"""Support seeds in requests whose prompt takes several steps, on a CPU.

After a step with only a part of a prompt, vLLM samples a token that it discards, and then resets the request's random
generator to its state before (`_bookkeeping_sync` in `vllm/v1/worker/gpu_model_runner.py`). It does so by the
generator's offset, which a generator on a CPU does not have: "CPU Generator does not use offset" ends the engine, at
every request with a seed and a prompt longer than `max_num_batched_tokens`.

With this fix, vLLM samples such a token without the request's generator, so the generator needs no reset.

Remove this fix when vLLM resets the generator of a CPU by its state, or draws nothing for such a token.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "seeded_prompts"


def install() -> bool:
    """Make vLLM draw tokens that it discards without generators of requests.

    Returns:
        False if it is installed already in this process.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample_tokens(stock: Callable[..., Any], self: Any, grammar_output: Any) -> Any:
        # The sampler's metadata refers to the same dictionary.
        generators = self.input_batch.generators
        thrown_away = self.discard_request_mask.np[: self.input_batch.num_reqs]
        set_aside = {row: generators.pop(row) for row in list(generators) if thrown_away[row]}
        try:
            return stock(self, grammar_output)
        finally:
            generators.update(set_aside)

    return replace(_FIX, GPUModelRunner, "sample_tokens", sample_tokens)
