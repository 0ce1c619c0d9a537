"""What a config.env says about serving that vLLM has no flag for."""

import pytest

from slimqwen import variant
from slimqwen.serving import checks
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.vllm_plugin import policy, registration
from slimqwen.vllm_plugin.errors import PluginError


def test_a_variants_policy_reaches_the_server_and_nothing_said_is_the_default(servable, monkeypatch):
    lines = ("MAX_BODY_BYTES=1000", "THINKING_TOKEN_BUDGET=0", "REQUIRE_WARMUP=1")
    command = servable(*lines)
    monkeypatch.setenv(policy.VARIABLE, command.process_environment()[policy.VARIABLE])
    assert policy.read_policy() == policy.Policy(
        require_warmup=True, max_body_bytes=1000, thinking_token_budget=0
    )
    assert policy.variant_policy(variant.load("tiny")) == policy.Policy()


def test_a_thinking_budget_with_a_parser_is_taken(servable):
    checks.check_command(servable("THINKING_TOKEN_BUDGET=8", "VLLM_REASONING_PARSER=qwen3"))


def test_a_broken_chat_template_is_refused_before_vllm_starts(servable, tmp_path):
    command = servable("VLLM_CHAT_TEMPLATE=experiments/v/chat.jinja")
    (tmp_path / "experiments/v/chat.jinja").write_text("{{ messages")
    with pytest.raises(ServingError, match=r"chat\.jinja, line 1"):
        checks.check_command(command)


@pytest.mark.parametrize("plugin", registration.PLUGINS)
def test_a_list_that_leaves_out_one_of_the_plugins_is_refused(servable, plugin):
    others = ",".join(name for name in registration.PLUGINS if name != plugin)
    with pytest.raises(PluginError, match=f"VLLM_PLUGINS={others} leaves out {plugin}; add this name"):
        checks.check_command(servable(f"VLLM_PLUGINS={others}"))


def test_a_plugin_that_is_not_installed_is_refused(servable, monkeypatch):
    monkeypatch.setattr(registration, "entry_points", lambda group: ())
    with pytest.raises(PluginError, match="slimqwen_engine_fixes is not installed; `make install`"):
        checks.check_command(servable())


def test_every_variant_is_behind_the_gate():
    for name in variant.names():
        argv = ServerCommand.resolve(variant.load(name), platform="cpu").argv
        assert argv[-2:] == ("--middleware", "slimqwen.vllm_plugin.readiness.Readiness")
