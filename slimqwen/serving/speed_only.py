"""Speed-only variants, whose responses mean nothing, so that only speed and memory are measured.

Their weights are random, or their flags set the acceptance length (synthetic acceptance).
"""

from slimqwen import checkpoint
from slimqwen.serving import flags as vllm_flags
from slimqwen.serving.errors import ServingError
from slimqwen.variant import Variant


def refuse_speed_only(variant: Variant, measurement: str) -> None:
    """Refuse to evaluate the responses of a speed-only variant.

    Args:
        measurement: name of the refused measurement in the message, such as "quality".

    Raises:
        ServingError: the variant's weights are random or vLLM loads none, or its acceptance is synthetic.
    """
    if (found := _find_reason(variant)) is not None:
        reason, instead = found
        raise ServingError(f"{reason}; measure {measurement} {instead}")


def is_speed_only(variant: Variant) -> bool:
    """Whether `refuse_speed_only` refuses a variant."""
    return _find_reason(variant) is not None


def _find_reason(variant: Variant) -> tuple[str, str] | None:
    """Why a variant is speed-only, and how to measure instead; None if it is not."""
    if (variant.weights / "config.json").is_file() and checkpoint.has_random_weights(variant.weights):
        return (
            f"weights/{variant.weights.name} has random weights: only its speed and memory can be measured",
            "on a trained checkpoint",
        )
    load_format = variant.settings.get("VLLM_LOAD_FORMAT")
    if load_format is not None and load_format.value == "dummy":
        return (
            f"{load_format.location}: dummy weights are random: only speed and memory can be measured",
            "without this line",
        )
    setting = variant.settings.get("VLLM_SPECULATIVE_CONFIG")
    speculation = vllm_flags.parse(setting).value if setting is not None else None
    if setting is not None and (speculation or {}).get("rejection_sample_method") == "synthetic":
        return (
            f"{setting.location}: rejection_sample_method is synthetic, which accepts drafts regardless of their "
            "content",
            "without this setting",
        )
    return None
