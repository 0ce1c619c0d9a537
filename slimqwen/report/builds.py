"""Which records hold for the checkpoint at hand: those of its bytes, and those of another build of the same recipe.

Another kind of CPU makes other bytes of the same recipe. What was found of one build holds for the other, and is said.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.records import provenance
from slimqwen.records.collection import StoredRecord
from slimqwen.records.record import Build, MeasuredCheckpoint, Record


def relate(measured: MeasuredCheckpoint | None, present: MeasuredCheckpoint | None) -> Build | None:
    """How a measured checkpoint is related to the present one; None if there is only one of them."""
    return measured.compare_build(present) if measured and present else None


def fits(entry: StoredRecord[Record], scored: MeasuredCheckpoint | None) -> bool:
    """Whether a record is of a build of the scored checkpoint; True where nothing was scored."""
    return scored is None or relate(entry.record.provenance.checkpoint, scored) in ("same", "another build")


def find_made_checkpoint(root: Path, variant: str) -> MeasuredCheckpoint | None:
    """A variant's checkpoint on this machine, if a recipe made it: its manifest saves hashing gigabytes."""
    try:
        weights = variants.load(variant, root).weights
        is_made = weights.is_dir() and checkpoint.recipe_key(weights)
        return provenance.checkpoint_files(weights, root) if is_made else None
    except (SlimqwenError, OSError):
        return None  # `report --check` names the fault


def describe_builds(
    variant: str, records: Iterable[StoredRecord[Record]], present: MeasuredCheckpoint | None
) -> Iterator[str]:
    """Yield phrases that name the kinds whose newest record is of another build than the present checkpoint.

    Args:
        records: records of the variant, newest first.
    """
    newest: dict[str, StoredRecord[Record]] = {}
    for entry in records:
        newest.setdefault(entry.kind, entry)
    for build, name in (("another build", "another build"), ("unknown build", "an unknown build")):
        kinds = [
            kind.replace("_", " ")
            for kind, entry in newest.items()
            if relate(entry.record.provenance.checkpoint, present) == build
        ]
        if kinds:
            yield f"{', '.join(sorted(kinds))} measured on {name} of {variant}"
