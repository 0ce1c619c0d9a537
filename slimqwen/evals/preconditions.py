"""Checks before a measurement that need no vLLM: it has a baseline, weights, and a folder for its record."""

import os

from slimqwen import variant as variants
from slimqwen.evals import EvalError
from slimqwen.variant import Variant


def find_baseline(variant: Variant) -> Variant:
    """The baseline of a variant.

    Raises:
        EvalError: the variant has none.
    """
    if variant.baseline is None:
        raise EvalError(
            f"{variant.name} has no baseline; name one in its measurements.json, or take a variant that has one"
        )
    return variants.load(variant.baseline, variant.root)


def check_preconditions(*sides: Variant) -> None:
    """Check that the weights of all variants are whole, and that their records can be written.

    Raises:
        MissingCheckpointError, CorruptCheckpointError: a checkpoint is missing or damaged.
        EvalError: a folder for records cannot be written.
    """
    for side in sides:
        side.require_weights()
        folder = (
            side.folder if side.folder.is_dir() else side.folder.parent
        )  # of a shipped variant, made for the record
        if not os.access(folder, os.W_OK):
            raise EvalError(
                f"{folder} cannot be written, and the record belongs there; make it writable for this user, or "
                "work in your own clone of the repository"
            )
