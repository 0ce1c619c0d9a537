"""Context length of a server, as vLLM resolves it from checkpoint and flags."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.serving import in_process
from slimqwen.serving.errors import ServingError

_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_FLAGS = ("max-model-len", "hf-overrides", "hf-config-path", "disable-sliding-window", "trust-remote-code")
"""Flags that affect the context length, in addition to the checkpoint."""


def resolve_context(weights: Path, flags: Mapping[str, Any], variables: Mapping[str, str]) -> int:
    """Context length in tokens, prompt and output together; with "auto" vLLM may lower it to what fits in memory.

    Args:
        flags: values by flag name, without dashes.
        variables: environment variables of the config.env.

    Raises:
        ServingError: vLLM would refuse it; the caller puts the location of the line before the message.
    """
    config = checkpoint.text_config(checkpoint.read_config(weights))
    deciding = {name: flags[name] for name in _FLAGS if name in flags}
    positions, limit = config.get("max_position_embeddings"), deciding.get("max-model-len", -1)
    is_plain = deciding.keys() <= {"max-model-len"} and _LONGER not in variables and _is_unscaled(config)
    if not is_plain or not isinstance(positions, int):
        return _ask_vllm(weights, json.dumps(deciding), variables.get(_LONGER, "0"))
    # The same result without importing vLLM, which would take longer than all other checks of a start.
    if limit > positions:
        raise ServingError(
            f"VLLM_MAX_MODEL_LEN={limit}, but the checkpoint has {positions} positions; set at most {positions}"
        )
    return int(limit) if limit > 0 else positions


def _is_unscaled(config: Mapping[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type", rope.get("type", "default")) == "default" and not any(
        isinstance(value, dict)
        for value in rope.values()  # one set of parameters for each kind of layer
    )


@functools.cache
def _ask_vllm(weights: Path, deciding: str, may_be_longer: str) -> int:
    flags = {name.replace("-", "_"): value for name, value in json.loads(deciding).items()}
    with in_process.environment({_LONGER: may_be_longer}):
        from vllm.engine.arg_utils import EngineArgs

        try:
            model = EngineArgs(model=str(weights), skip_tokenizer_init=True, **flags).create_model_config()
        except ValueError as error:
            from pydantic import ValidationError  # pydantic's ValidationError is a ValueError

            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            first_sentence = " ".join(reason.removeprefix("Value error, ").split()).partition(". ")[0]
            raise ServingError(
                f"vLLM refuses the context: {first_sentence}; lower VLLM_MAX_MODEL_LEN or correct VLLM_HF_OVERRIDES"
            ) from None
    return int(model.max_model_len)
