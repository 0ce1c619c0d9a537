"""The settings of config.env that are no flags of vLLM reach its processes."""

from slimqwen import variant
from slimqwen.vllm_plugin import policy


def test_a_variants_policy_reaches_the_server_and_nothing_said_is_the_default(servable, monkeypatch):
    lines = ("MAX_BODY_BYTES=1000", "THINKING_TOKEN_BUDGET=0", "REQUIRE_WARMUP=1")
    command = servable(*lines)
    monkeypatch.setenv(policy.VARIABLE, command.process_environment()[policy.VARIABLE])
    assert policy.read_policy() == policy.Policy(
        require_warmup=True, max_body_bytes=1000, thinking_token_budget=0
    )
    assert policy.variant_policy(variant.load("tiny")) == policy.Policy()
