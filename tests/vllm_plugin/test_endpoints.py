"""The endpoint plugin is not put into a vLLM whose functions have changed that it would replace."""

import dataclasses

import pytest
from fastapi import FastAPI

from slimqwen.vllm_plugin import policy
from slimqwen.vllm_plugin.endpoints import Endpoints
from slimqwen.vllm_plugin.patches import upstream
from slimqwen.vllm_plugin.patches.table import PATCHES
from slimqwen.vllm_plugin.patches.upstream import PatchError
from slimqwen.vllm_plugin.policy import Policy


@pytest.mark.parametrize("budget", [None, 100])
def test_every_changed_function_of_what_is_replaced_is_named(
    monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    places = {"BodyLimit": "textwrap:dedent", "limit_thinking": "textwrap:fill"}
    changed = {
        name: dataclasses.replace(PATCHES[name], places={place: "0" * 12}) for name, place in places.items()
    }
    monkeypatch.setattr(upstream, "PATCHES", {**PATCHES, **changed})
    monkeypatch.setenv(policy.VARIABLE, Policy(thinking_token_budget=budget).model_dump_json())
    with pytest.raises(PatchError, match="textwrap:dedent has another body") as caught:
        Endpoints().attach_router(FastAPI())
    assert ("textwrap:fill" in str(caught.value)) == (budget is not None)
