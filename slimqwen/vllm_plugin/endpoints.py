"""Endpoint plugin of vLLM's API server: request limits and the thinking budget.

vLLM loads such a plugin only if `VLLM_PLUGINS` names it; `slimqwen.serving.command` sets that variable.
"""

from typing import Any

from slimqwen.vllm_plugin import policy
from slimqwen.vllm_plugin.patches import upstream
from slimqwen.vllm_plugin.patches.serving import request_limits

_PATCHES = (
    "RefusedStreams",
    "BodyLimit",
    "answer_overload",
    "refuse_unreadable_bodies",
    "refuse_longer_answers",
    "forget_unsent_requests",
    "refuse_chosen_logprobs_of_drafts",
)


class Endpoints:
    """Plugin of vLLM's API server that limits requests and sets the thinking budget.

    It follows the protocol `EndpointPlugin` in vllm/plugins/endpoint_plugins/interface.py; vLLM makes the instance.
    """

    name = "slimqwen_endpoints"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Put the limits and the thinking budget in place.

        Raises:
            PatchError: the installed vLLM is not the one for which these were written.
        """
        budget = policy.read_policy().thinking_token_budget
        upstream.require(*_PATCHES, *(() if budget is None else ("limit_thinking",)), of="requests")
        # The last middleware added is the outermost: these come before vLLM's own, so they run after its key check.
        app.add_middleware(request_limits.RefusedStreams)
        app.add_middleware(request_limits.BodyLimit)
        request_limits.answer_overload(app)
        request_limits.refuse_unreadable_bodies(app)
        request_limits.refuse_longer_answers()
        request_limits.forget_unsent_requests()
        request_limits.refuse_chosen_logprobs_of_drafts()
        if budget is not None:
            request_limits.limit_thinking(budget)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep no state."""
