"""Settings that all measurements of one command share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slimqwen.progress import Progress, silent
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from slimqwen.records.split import Split  # slow to import, and the command line imports this module


@dataclass(frozen=True)
class Invocation:
    """Settings that all measurements of one command share.

    Attributes:
        command: command line that the records state as their origin.
        folder: folder with a folder of records for each variant, relative to the repository.
        split: side of the split whose items are measured; None for all items.
        port: TCP port of servers instead of the variants' own.
        progress: receives (activity, done, total).
    """

    command: Sequence[str]
    folder: str = "experiments"
    split: "Split | None" = None
    port: int | None = None
    progress: Progress = silent

    def records_of(self, variant: Variant) -> Path:
        """Folder of a variant's records: <folder>/<variant> in the repository."""
        return variant.root / self.folder / variant.name
