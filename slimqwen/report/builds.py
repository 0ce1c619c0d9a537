"""Decides which records hold for a checkpoint: those of the same bytes, and those of another build of its recipe.

A recipe run on another kind of CPU gives other bytes: another build. Records of one build hold for the others, with a
note.
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
    """Say how a measured checkpoint is related to the present one, such as "another build"; None if one is missing."""
    return measured.compare_build(present) if measured and present else None


def fits(entry: StoredRecord[Record], scored: MeasuredCheckpoint | None) -> bool:
    """Whether a record measured the given checkpoint, or another build of its recipe.

    Args:
        scored: the checkpoint of the newest quality record; None for none, so that every record fits.
    """
    return scored is None or relate(entry.record.provenance.checkpoint, scored) in ("same", "another build")


def find_made_checkpoint(root: Path, variant: str) -> MeasuredCheckpoint | None:
    """Describe a variant's checkpoint on this machine if a recipe made it; None otherwise.

    Of other checkpoints gigabytes would have to be hashed; a recipe leaves a manifest with the hashes.
    """
    try:
        weights = variants.load(variant, root).weights
        is_made = weights.is_dir() and checkpoint.recipe_key(weights)
        return provenance.checkpoint_files(weights, root) if is_made else None
    except (SlimqwenError, OSError):
        return None  # `report --check` names the fault


def describe_builds(
    variant: str, records: Iterable[StoredRecord[Record]], present: MeasuredCheckpoint | None
) -> Iterator[str]:
    """Yield phrases that name the record kinds last measured on another build than the present checkpoint.

    Args:
        variant: name of the variant, for the phrases.
        records: records of the variant, newest first.
        present: the checkpoint on this machine; None if there is none, so that nothing is yielded.
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
