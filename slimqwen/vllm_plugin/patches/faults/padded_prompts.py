"""Begin a prompt of one token that joins running requests from an empty state, with drafts.

While other requests run, vLLM's scheduler pads a request that has one token left to compute with K placeholder drafts,
so that all rows of a step are equally long (`schedule` in `vllm/v1/core/sched/scheduler.py`; a K that depends on the
load pads none). A new prompt of one token has no state of Gated DeltaNet yet:

- The V1 model runner (CPUs; GPUs by VLLM_USE_V2_MODEL_RUNNER=0) treats a padded row as one whose drafts are verified,
  and continues the state that the slot's last request left.
- The V2 model runner (GPUs) takes it for a prefill of K + 1 tokens, which begins empty and leaves the state after the
  prompt and K placeholders. A prefill is not rolled back (`vllm/v1/worker/gpu/model_states/mamba_hybrid.py`).

Either way the response is wrong. With this fix a request without computed tokens is not padded, and vLLM computes its
token like that of any prompt.

Remove this fix when vLLM pads no request without computed tokens, or begins its row with an empty state and rolls it
back.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "padded_prompts"


def install() -> bool:
    """Remove placeholder drafts from requests without computed tokens.

    Returns:
        False if it is installed already in this process.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def update_after_schedule(stock: Callable[..., None], self: Any, scheduler_output: Any) -> None:
        # vLLM calls this before it counts the tokens of this step as computed.
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request in [each for each in drafts if self.requests[each].num_computed_tokens == 0]:
            padding = len(drafts.pop(request))
            scheduler_output.num_scheduled_tokens[request] -= padding
            scheduler_output.total_num_scheduled_tokens -= padding
        stock(self, scheduler_output)

    return replace(_FIX, Scheduler, "_update_after_schedule", update_after_schedule)
