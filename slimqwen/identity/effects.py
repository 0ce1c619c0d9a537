"""What a flag of vLLM, or a key of config.env that is this project's own, may affect: the one table of what decides.

A flag that is not in the table may affect everything.
"""

import enum
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from slimqwen.variant import OWN_KEYS


class Effect(enum.Flag):
    """What may be another one under another value."""

    NOTHING = 0
    TOKENS = enum.auto()
    """What a request is answered with."""
    SPEED = enum.auto()
    """Times, memory, and whether a request is taken."""
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
"""Flags and variables of vLLM that round numbers otherwise: responses may differ by more than near ties."""


def affecting(effect: Effect, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags, by name without dashes, that may affect any of this."""
    return {name: value for name, value in flags.items() if EFFECTS.get(name, Effect.ALL) & effect}


def is_of_machine(variable: str) -> bool:
    """Whether an environment variable only says where caches lie or how many threads compute on a machine."""
    return variable.endswith(("OMP_NUM_THREADS", "CACHE_ROOT", "CACHE_DIR"))


def decisive_flags(flags: Mapping[str, Any]) -> dict[str, str]:
    """The flags on which a compiled graph or a plan may depend, each value as JSON."""
    return {
        name: json.dumps(value, sort_keys=True, default=str)
        for name, value in sorted(affecting(Effect.GRAPHS, flags).items())
    }


def flag_of(key: str) -> str:
    """The flag that a key VLLM_<FLAG> of config.env sets, without dashes in front."""
    return key.removeprefix("VLLM_").lower().replace("_", "-")


def may_affect(effect: Effect, key: str) -> bool:
    """Whether a line of config.env may affect any of this."""
    return bool(OWN_EFFECTS.get(key, EFFECTS.get(flag_of(key), Effect.ALL)) & effect)


def may_round(key: str) -> bool:
    """Whether a line of config.env rounds numbers otherwise, so that a quality check has to judge it."""
    return flag_of(key) in ROUNDING
