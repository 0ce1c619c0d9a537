"""Variants that are measured for speed and memory only.

Their weights are random, or their flags set the acceptance length (synthetic acceptance).
"""

from slimqwen import checkpoint
from slimqwen.serving import flags as vllm_flags
from slimqwen.serving.errors import ServingError
from slimqwen.variant import Variant


def refuse_speed_only(variant: Variant, measurement: str) -> None:
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
    speculation = vllm_flags.parse(setting).value if setting is not None else None
    if setting is not None and (speculation or {}).get("rejection_sample_method") == "synthetic":
        raise ServingError(
            f"{setting.location}: rejection_sample_method is synthetic, which accepts drafts regardless of their "
            f"content; measure {measurement} without it"
        )


def has_random_responses(variant: Variant) -> bool:
    """Whether `refuse_speed_only` refuses a variant."""
    try:
        refuse_speed_only(variant, "responses")
    except ServingError:
        return True
    return False
