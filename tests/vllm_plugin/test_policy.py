"""What a config.env says about serving that vLLM has no flag for."""

import pytest

from slimqwen import variant
from slimqwen.serving import checks
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.server import free_port
from slimqwen.vllm_plugin import policy
from slimqwen.vllm_plugin.errors import PluginError

BASE = "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=2048\n"


def resolved(add_variant, tmp_path, *lines):
    if not (tmp_path / "weights").exists():
        (tmp_path / "weights").symlink_to(variant.load("tiny").weights.parent)
    add_variant("v", BASE + "".join(f"{line}\n" for line in lines))
    return ServerCommand.resolve(variant.load("v", tmp_path), port=free_port(), platform="cpu")


def test_a_variants_policy_reaches_the_server_and_nothing_said_is_the_default(
    add_variant, tmp_path, monkeypatch
):
    lines = ("MAX_BODY_BYTES=1000", "THINKING_TOKEN_BUDGET=0", "REQUIRE_WARMUP=1")
    command = resolved(add_variant, tmp_path, *lines)
    monkeypatch.setenv(policy.VARIABLE, command.process_environment()[policy.VARIABLE])
    assert policy.read() == policy.Policy(require_warmup=True, max_body_bytes=1000, thinking_token_budget=0)
    assert policy.variant_policy(variant.load("tiny")) == policy.Policy()


@pytest.mark.parametrize(
    "line",
    ["MAX_BODY_BYTES=0", "MAX_BODY_BYTES=1MB", "THINKING_TOKEN_BUDGET=-1", "THINKING_TOKEN_BUDGET=2.5"],
)
def test_what_is_no_number_is_refused_with_its_line(add_variant, tmp_path, line):
    with pytest.raises(variant.ConfigError, match=rf"config\.env:3: {line}: write a whole number"):
        resolved(add_variant, tmp_path, line)


def test_a_warm_up_is_required_by_a_1_only(add_variant, tmp_path):
    with pytest.raises(variant.ConfigError, match="REQUIRE_WARMUP=yes: write REQUIRE_WARMUP=1"):
        resolved(add_variant, tmp_path, "REQUIRE_WARMUP=yes")


def test_a_thinking_budget_needs_to_be_told_what_thinking_looks_like(add_variant, tmp_path):
    command = resolved(add_variant, tmp_path, "THINKING_TOKEN_BUDGET=8")
    with pytest.raises(ServingError, match=r"config\.env:3: .*VLLM_REASONING_PARSER=qwen3"):
        checks.check(command)


def test_a_thinking_budget_with_a_parser_is_taken(add_variant, tmp_path):
    checks.check(resolved(add_variant, tmp_path, "THINKING_TOKEN_BUDGET=8", "VLLM_REASONING_PARSER=qwen3"))


def test_a_broken_chat_template_is_refused_before_vllm_starts(add_variant, tmp_path):
    command = resolved(add_variant, tmp_path, "VLLM_CHAT_TEMPLATE=experiments/v/chat.jinja")
    (tmp_path / "experiments/v/chat.jinja").write_text("{{ messages")
    with pytest.raises(ServingError, match=r"chat\.jinja, line 1"):
        checks.check(command)


def test_a_list_of_plugins_that_leaves_out_the_limits_is_refused(add_variant, tmp_path):
    command = resolved(add_variant, tmp_path, "VLLM_PLUGINS=slimqwen_engine_fixes")
    with pytest.raises(PluginError, match="leaves out slimqwen_endpoints"):
        checks.check(command)


def test_a_key_in_a_config_is_refused_and_every_variant_is_behind_the_gate(add_variant, tmp_path):
    with pytest.raises(variant.ConfigError, match="VLLM_API_KEY is a secret"):
        resolved(add_variant, tmp_path, "VLLM_API_KEY=sesame")
    for name in variant.names():
        argv = ServerCommand.resolve(variant.load(name), platform="cpu").argv
        assert argv[-2:] == ("--middleware", "slimqwen.vllm_plugin.readiness.Readiness")


def test_bare_vllm_has_the_same_flags_and_neither_middleware_nor_routes(add_variant, tmp_path):
    command = resolved(add_variant, tmp_path)
    bare = command.without_middleware()
    assert "--middleware" not in bare.argv
    assert bare.argv == command.argv[: len(bare.argv)]
    assert bare.environment["VLLM_PLUGINS"] == "slimqwen_engine_fixes,slimqwen_compile_watch"
    checks.check(bare)
