"""Variants that are measured for speed and memory only.

Their weights are random, or their flags set the acceptance length (synthetic acceptance).
"""

from collections.abc import Mapping
from typing import Any

from slimqwen import checkpoint
from slimqwen.serving import flags as vllm_flags
from slimqwen.serving.errors import ServingError
from slimqwen.variant import Variant


def refuse(variant: Variant, measurement: str) -> None:
    """Refuse to evaluate the answers of such a variant.

    Args:
        measurement: its name in the message, such as "quality".

    Raises:
        ServingError: its weights are random or vLLM loads none, or its acceptance is synthetic.
    """
    if (variant.weights / "config.json").is_file() and checkpoint.has_random_weights(variant.weights):
        raise ServingError(
            f"weights/{variant.weights.name} has no weights of its own, so it serves to measure speed and memory only; "
            f"measure {measurement} on a trained checkpoint"
        )
    load_format = variant.settings.get("VLLM_LOAD_FORMAT")
    if load_format is not None and load_format.value == "dummy":
        raise ServingError(
            f"{load_format.location}: dummy weights are random, which serve to measure speed and memory only; "
            f"measure {measurement} without it"
        )
    setting = variant.settings.get("VLLM_SPECULATIVE_CONFIG")
    if setting is not None and is_synthetic(vllm_flags.parse(setting).value):
        raise ServingError(
            f"{setting.location}: rejection_sample_method is synthetic, which accepts drafts regardless of their "
            f"content; measure {measurement} without it"
        )


def is_synthetic(speculation: Mapping[str, Any] | None) -> bool:
    """Whether a speculative config accepts drafts by a rate instead of by their content."""
    return (speculation or {}).get("rejection_sample_method") == "synthetic"


def synthetic_acceptance_length(flags: Mapping[str, Any]) -> float | None:
    """The acceptance length that a variant's flags set; None where the target model verifies drafts."""
    speculation = flags.get("speculative-config") or {}
    if not is_synthetic(speculation):
        return None
    if (length := speculation.get("synthetic_acceptance_length")) is not None:
        return float(length)
    return 1 + float(sum(speculation.get("synthetic_acceptance_rates") or ()))
