"""Endpoint plugin of vLLM's API server: the vocabulary route, request limits and the thinking budget.

Routes that are added here are behind the API key like vLLM's own. vLLM loads such a plugin only where `VLLM_PLUGINS`
names it: `slimqwen.serving.command` does.
"""

from collections.abc import Mapping
from typing import Any

from slimqwen.vllm_plugin import policy, registration, request_limits, thinking_budget, token_ids

PLUGIN = "slimqwen_endpoints"


class Endpoints:
    """Endpoint plugin, by the protocol `EndpointPlugin` in vllm/plugins/endpoint_plugins/interface.py."""

    name = PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add the route to vLLM's application, and put the limits and the thinking budget in place.

        Raises:
            EngineFixError: this vLLM is not the one these were written for.
        """
        # Added before vLLM's own middleware, so behind the API key; the last one added is the outermost.
        app.add_middleware(request_limits.RefusedStreams)
        app.add_middleware(token_ids.OldTokenIds)
        app.add_middleware(request_limits.BodyLimit)
        app.add_api_route(token_ids.ROUTE, token_ids.vocabulary, methods=["GET"])
        request_limits.answer_overload(app)
        request_limits.refuse_unreadable_bodies(app)
        request_limits.refuse_longer_answers()
        request_limits.forget_unsent_requests()
        request_limits.refuse_chosen_logprobs_of_drafts()
        budget = policy.read().thinking_token_budget
        if budget is not None:
            thinking_budget.install(budget)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep no state."""


def require_registered(environment: Mapping[str, str]) -> None:
    """Check that a vLLM process with this environment will load this plugin.

    Raises:
        PluginError: it is not installed, or VLLM_PLUGINS leaves it out.
    """
    registration.require(PLUGIN, "vllm.endpoint_plugins", environment.get("VLLM_PLUGINS", ""))
