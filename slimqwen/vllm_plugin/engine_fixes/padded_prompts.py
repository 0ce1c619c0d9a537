"""A prompt of one token that joins running requests begins from an empty state, beside drafts on a CPU.

While others run, vLLM's scheduler pads a request that has one token left to compute with K placeholder drafts, so that
all rows of a step are equally long (`schedule` in `vllm/v1/core/sched/scheduler.py`). Gated DeltaNet takes such a row
for one whose drafts are verified, and continues the state in its slot. A new prompt of one token has none there yet: it
continues what the slot's last request left, and its response depends on that request's text.

Here a request without computed tokens is not padded. vLLM computes its token as it does any prompt.

Goes away when vLLM pads no request without computed tokens, or begins its row with an empty state.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.engine_fixes.upstream import replace

_FIX = "padded_prompts"
WHY = "beside drafts a prompt of one token that joins running requests continues the state of an earlier request"


def install() -> bool:
    """Take placeholder drafts from requests without computed tokens; False if that is done already."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def update_after_schedule(stock: Callable[..., None], self: Any, scheduler_output: Any) -> None:
        # Called before the tokens of this step count as computed.
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request in [each for each in drafts if self.requests[each].num_computed_tokens == 0]:
            padding = len(drafts.pop(request))
            scheduler_output.num_scheduled_tokens[request] -= padding
            scheduler_output.total_num_scheduled_tokens -= padding
        stock(self, scheduler_output)

    return replace(_FIX, Scheduler, "_update_after_schedule", update_after_schedule)
