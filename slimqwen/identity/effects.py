"""The table of what a flag of vLLM or an own key of config.env may affect: tokens, speed or compiled graphs.

A flag that is not in the table may affect all of them.
"""

import enum
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from slimqwen.variant import OWN_KEYS


class Effect(enum.Flag):
    """What changes if the value of a flag changes."""

    NOTHING = 0
    TOKENS = enum.auto()
    """The tokens of a response."""
    SPEED = enum.auto()
    """Times, memory, and whether a request is accepted."""
    GRAPHS = enum.auto()
    """Compiled code, and everything that a plan says."""

    FIGURES = TOKENS | SPEED
    """Any figure of a measurement."""
    ALL = TOKENS | SPEED | GRAPHS


EFFECTS: Mapping[str, Effect] = MappingProxyType(
    {
        "host": Effect.NOTHING,
        "port": Effect.NOTHING,
        "uds": Effect.NOTHING,
        "shutdown-timeout": Effect.NOTHING,
        # They divide a response after it was made; quality switches both on where a task has tools.
        "enable-auto-tool-choice": Effect.NOTHING,
        "tool-call-parser": Effect.NOTHING,
        "served-model-name": Effect.NOTHING,
        # A record has its digest, too; a graph depends on its dimensions, which vLLM's own key has.
        "model": Effect.FIGURES,
        "chat-template": Effect.TOKENS,
        "default-chat-template-kwargs": Effect.TOKENS,
        "override-generation-config": Effect.TOKENS,
        "reasoning-parser": Effect.TOKENS,
        "max-num-queued-reqs": Effect.SPEED,
        "max-num-queued-tokens": Effect.SPEED,
    }
)
"""vLLM's flags that do not affect everything."""

OWN_EFFECTS: Mapping[str, Effect] = MappingProxyType(
    dict.fromkeys(OWN_KEYS, Effect.NOTHING)
    | {"PLATFORM": Effect.ALL, "THINKING_TOKEN_BUDGET": Effect.TOKENS, "MAX_BODY_BYTES": Effect.SPEED}
)
"""Keys of config.env that are neither a flag of vLLM nor an environment variable."""

ROUNDING = frozenset(
    {
        "dtype",
        "quantization",
        "kv-cache-dtype",
        "mamba-cache-dtype",
        "mamba-ssm-cache-dtype",
        "marlin-input-dtype",
    }
)
"""Flags and variables of vLLM that change its rounding, so that responses may differ by more than near ties."""


def affecting(effect: Effect, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Select the flags (by name without dashes) that may have any of these effects."""
    return {name: value for name, value in flags.items() if EFFECTS.get(name, Effect.ALL) & effect}


def is_of_machine(variable: str) -> bool:
    """Whether an environment variable describes only the machine: folders of caches, number of threads."""
    return variable.endswith(("OMP_NUM_THREADS", "CACHE_ROOT", "CACHE_DIR"))


def decisive_flags(flags: Mapping[str, Any]) -> dict[str, str]:
    """The flags on which a compiled graph or a plan may depend: name -> value as JSON."""
    return {
        name: json.dumps(value, sort_keys=True, default=str)
        for name, value in sorted(affecting(Effect.GRAPHS, flags).items())
    }


def flag_of(key: str) -> str:
    """The flag that a key VLLM_<FLAG> of config.env sets, without dashes in front."""
    return key.removeprefix("VLLM_").lower().replace("_", "-")


def may_affect(effect: Effect, key: str) -> bool:
    """Whether a config.env line with this key may have any of these effects."""
    return bool(OWN_EFFECTS.get(key, EFFECTS.get(flag_of(key), Effect.ALL)) & effect)


def may_round(key: str) -> bool:
    """Whether a config.env line with this key makes vLLM round differently, so that quality has to be checked."""
    return flag_of(key) in ROUNDING
