"""Variants that are measured for speed and memory alone.

Their weights are random, or their acceptance length is set by the flags (synthetic) instead of measured.
"""

from collections.abc import Mapping
from typing import Any

from slimqwen import checkpoint
from slimqwen.serving import flags as vllm_flags
from slimqwen.serving.errors import ServingError
from slimqwen.variant import Variant


def refuse(variant: Variant, what: str) -> None:
    """Refuse to judge what a variant says.

    Args:
        variant: the variant to evaluate.
        what: what would be measured, for the message: "quality".

    Raises:
        ServingError: its weights are random, or its drafts are accepted whatever they say.
    """
    if (variant.weights / "config.json").is_file() and checkpoint.has_random_weights(variant.weights):
        raise ServingError(
            f"weights/{variant.weights.name} holds random weights, which answer for speed and memory only; measure "
            f"{what} on a trained checkpoint"
        )
    setting = variant.settings.get("VLLM_SPECULATIVE_CONFIG")
    if setting is not None and is_synthetic(vllm_flags.parse(setting).value):
        raise ServingError(
            f"{setting.location}: rejection_sample_method is synthetic, which accepts drafts whatever they say; "
            f"measure {what} without it"
        )


def is_synthetic(speculation: Mapping[str, Any] | None) -> bool:
    """Whether a speculative config accepts drafts by a rate instead of by what they say."""
    return (speculation or {}).get("rejection_sample_method") == "synthetic"


def set_acceptance_length(flags: Mapping[str, Any]) -> float | None:
    """The acceptance length that a variant's flags set, None where drafts are judged.

    Args:
        flags: values by flag name.
    """
    speculation = flags.get("speculative-config") or {}
    if not is_synthetic(speculation):
        return None
    if (length := speculation.get("synthetic_acceptance_length")) is not None:
        return float(length)
    return 1 + float(sum(speculation.get("synthetic_acceptance_rates") or ()))
