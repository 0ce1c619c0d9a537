"""Replay of a record: the same measurement with the present code, compared with the record.

What was measured is taken from the record, not from its command: one command may have made several records.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.progress import Progress, silent
from slimqwen.records import differences, store
from slimqwen.records.differences import Difference
from slimqwen.records.table import Table
from slimqwen.serving.server import free_port
from slimqwen.variant import Variant


@dataclass(frozen=True)
class Repeat:
    """Arguments of a repeated measurement.

    Attributes:
        folder: folder of the new records, which go into a subfolder per variant.
        command: command of the replay, for the provenance of the new record.
        port: port of a running server, or of the servers to start.
    """

    root: Path
    folder: Path
    command: Sequence[str]
    port: int
    progress: Progress = silent

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every measurement."""
        return {"command": self.command, "port": self.port, "progress": self.progress}

    def variants(self, names: Sequence[str]) -> list[Variant]:
        """The variants that were measured together, baselines first; their checkpoints are checked.

        Raises:
            MissingCheckpointError: a checkpoint is missing; names the command that makes it.
        """
        loaded = [variants.load(name, self.root) for name in names]
        for variant in loaded:
            checkpoint.check(variant.weights, variants.making_command(variant.weights, self.root))
        baselines = {variant.baseline for variant in loaded}
        return sorted(loaded, key=lambda variant: variant.name not in baselines)


@dataclass(frozen=True)
class Outcome:
    """A repetition of a record.

    Attributes:
        repetition: file of the new record.
        reproduced: whether the result is the same, by the rule of the kind.
        tables: record and repetition side by side.
        differences: circumstances that were not the same.
    """

    repetition: Path
    reproduced: bool
    summary: str
    tables: tuple[Table, ...] = ()
    differences: tuple[Difference, ...] = ()


def replay(
    path: Path,
    *,
    command: Sequence[str],
    root: Path | None = None,
    port: int | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Repeat the measurement of a record; the new record is written beside it.

    Args:
        path: file of the record, <folder>/<variant>/<record>.json. One that was measured in turns with others is
            measured in turns with them again.
        port: port of a running server, or of the servers to start; any free one by default.

    Raises:
        MissingCheckpointError: the checkpoint is missing; names the command that makes it.
        RecordError: the record or its items are damaged.
        SlimqwenError: records of this kind cannot be replayed, or the measurement failed; there is no new record.
    """
    record = store.read(path)
    port = free_port() if port is None else port
    repeat = Repeat(root or variants.repository_root(), path.parent.parent, command, port, progress)
    outcome = record.replay(path, repeat)
    changed = differences.between(record.provenance, store.read(outcome.repetition).provenance)
    return replace(outcome, differences=tuple(changed))
