"""What the endpoint plugin puts in place, and that it does so in no vLLM whose functions have changed."""

import dataclasses

import pytest
from fastapi import FastAPI

from slimqwen.vllm_plugin import endpoints, policy
from slimqwen.vllm_plugin.endpoints import Endpoints
from slimqwen.vllm_plugin.patches import upstream
from slimqwen.vllm_plugin.patches.serving import request_limits
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


@pytest.mark.parametrize("budget", [None, 100])
def test_thoughts_have_a_limit_where_there_is_a_budget(
    monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    limits: list[int | None] = []
    _, _, *functions = endpoints._PATCHES
    for name in functions:
        monkeypatch.setattr(request_limits, name, lambda *_: None)
    monkeypatch.setattr(request_limits, "limit_thinking", limits.append)
    monkeypatch.setenv(policy.VARIABLE, Policy(thinking_token_budget=budget).model_dump_json())
    Endpoints().attach_router(FastAPI())
    assert limits == ([] if budget is None else [budget])
