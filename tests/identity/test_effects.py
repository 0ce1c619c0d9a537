"""One table says what a flag or a key of config.env may affect."""

import pytest

from slimqwen.identity.effects import EFFECTS, OWN_EFFECTS, Effect, affecting, decisive_flags, may_affect
from slimqwen.serving.flags import options
from slimqwen.variant import OWN_KEYS


def test_the_table_names_flags_that_vllm_has_and_all_own_keys() -> None:
    known = {key.removeprefix("VLLM_").lower().replace("_", "-") for key in options()}
    assert EFFECTS.keys() - known == set()
    assert OWN_EFFECTS.keys() == OWN_KEYS.keys()


@pytest.mark.parametrize(
    ("effect", "kept"),
    [
        (Effect.FIGURES, {"max-num-queued-reqs", "chat-template", "max-model-len", "unknown"}),
        (Effect.TOKENS, {"chat-template", "max-model-len", "unknown"}),
        (Effect.GRAPHS, {"max-model-len", "unknown"}),
    ],
)
def test_an_unknown_flag_may_affect_everything_and_an_address_nothing(effect: Effect, kept: set[str]) -> None:
    names = ("port", "max-num-queued-reqs", "chat-template", "max-model-len", "unknown")
    assert affecting(effect, dict.fromkeys(names, 1)).keys() == kept


def test_decisive_flags_are_json_by_name() -> None:
    assert decisive_flags({"b": {"y": 1, "x": None}, "a": True, "host": "::"}) == {
        "a": "true",
        "b": '{"x": null, "y": 1}',
    }


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("VLLM_PORT", False),
        ("VLLM_MAX_NUM_SEQS", True),
        ("VLLM_CPU_KVCACHE_SPACE", True),
        ("PLATFORM", True),
        ("THINKING_TOKEN_BUDGET", False),
    ],
)
def test_a_line_of_config_env_is_judged_by_its_flag_or_own_key(key: str, expected: bool) -> None:
    assert may_affect(Effect.GRAPHS, key) is expected
