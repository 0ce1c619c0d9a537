"""What a measurement needs and takes no vLLM to find out: a baseline, weights, a folder for its record."""

import os
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.evals import EvalError
from slimqwen.variant import Variant


def find_baseline(variant: Variant) -> Variant:
    """The baseline of a variant; raises EvalError if it has none."""
    if variant.baseline is None:
        raise EvalError(
            f"{variant.name} has no baseline; name one in its measurements.json, or take a variant that has one"
        )
    return variants.load(variant.baseline, variant.root)


def check_preconditions(*sides: Variant, records_folder: Path | None = None) -> None:
    """Check that the weights of all variants are whole, and that their records can be written.

    Args:
        records_folder: folder of the records instead of each variant's own.

    Raises:
        MissingCheckpointError, CorruptCheckpointError: as `Variant.require_weights`.
        EvalError: a folder for records cannot be written.
    """
    for side in sides:
        side.require_weights()
    for folder in [records_folder] if records_folder else [side.folder for side in sides]:
        place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        if not os.access(place, os.W_OK):
            raise EvalError(
                f"{place} cannot be written, and the record belongs there; make it writable for this user, or work in "
                "your own clone of the repository"
            )
