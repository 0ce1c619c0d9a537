"""Settings that replace lines of a variant's config.env for one measurement."""

from collections.abc import Mapping

from slimqwen.bench import BenchError
from slimqwen.plan import start
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant

_MTP = "VLLM_SPECULATIVE_CONFIG"


def servable(variant: Variant, lines: Mapping[str, str], name: str) -> tuple[Variant, Mapping[str, str]]:
    """The variant with the settings of a workload, without MTP where this platform cannot combine it with them.

    Args:
        lines: values by key; an empty one unsets the key.
        name: name of the workload.

    Returns:
        The variant, and the lines that differ from its own.

    Raises:
        BenchError: the platform cannot serve one of the lines even without MTP.
    """
    if not lines:
        return variant, {}
    choices = [lines, {**lines, _MTP: ""}] if _MTP in variant.settings else [lines]
    for choice in choices:
        changed_variant = variant.with_lines(choice)
        conflict = _conflict(ServerCommand.resolve(changed_variant), choice)
        if conflict is None:
            return changed_variant, choice
    raise BenchError(
        f"{name}: {variant.name} cannot be served with this workload's settings here: {conflict}"
    )


def _conflict(command: ServerCommand, lines: Mapping[str, str]) -> str | None:
    """Reason why these settings of the command's variant cannot be served here, None if they can."""
    for row in command.platform_changes:
        if row.key in lines:
            return f"{row.key}={row.value}: {row.why}"
    dies = start.match_flag_trouble(command).dies
    if not dies or command.variant.allow_unsafe:
        return None
    return f"it {dies[0].description} ({dies[0].evidence})"
