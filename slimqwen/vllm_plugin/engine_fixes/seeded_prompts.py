"""A request with a seed whose prompt takes several steps draws as if it had taken one, on a CPU.

While a step holds only a part of a prompt, vLLM samples a token after it all the same and throws it away; then it takes
back what the request's generator gave for it (`_bookkeeping_sync` in `vllm/v1/worker/gpu_model_runner.py`). It does so
by the generator's offset, which a CPU's has not: "CPU Generator does not use offset" ends the engine, at every prompt
with a seed that is longer than `max_num_batched_tokens`.

Here a token that will be thrown away is drawn without the request's generator, which so has nothing to take back.

Goes away when vLLM restores the generator of a CPU by its state, or draws nothing for such a token.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.engine_fixes.upstream import replace

_FIX = "seeded_prompts"
WHY = "a seed beside a prompt longer than max_num_batched_tokens ends the engine"


def install() -> bool:
    """Set generators aside in steps whose token is thrown away; False if that is done already."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample_tokens(stock: Callable[..., Any], self: Any, grammar_output: Any) -> Any:
        # The sampler's metadata holds this very dictionary.
        generators = self.input_batch.generators
        thrown_away = self.discard_request_mask.np[: self.input_batch.num_reqs]
        set_aside = {row: generators.pop(row) for row in list(generators) if thrown_away[row]}
        try:
            return stock(self, grammar_output)
        finally:
            generators.update(set_aside)

    return replace(_FIX, GPUModelRunner, "sample_tokens", sample_tokens)
