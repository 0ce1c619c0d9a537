"""Whether a record still holds: it is compared with its inputs as they are now, never with a derived cache."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from slimqwen.identity.effects import Effect, affecting
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.record import Provenance
from slimqwen.records.split import Split, split_of
from slimqwen.records.store import AnyRecord
from slimqwen.serving.command import ServerCommand
from slimqwen.text.corpus import text_digest
from slimqwen.variant import Variant


def find_reusable(
    variant: Variant,
    kind: type[AnyRecord],
    folder: Path,
    split: Split | None,
    condition: Callable[[AnyRecord], bool],
    files: Iterable[Path] = (),
    progress: Progress = silent,
) -> Path | None:
    """Find the newest record of a variant that a new measurement would only repeat; None if there is none.

    Args:
        folder: folder of the variant's records.
        split: side of the split that was measured; None for all items.
        condition: whether a record was made with the settings that are asked for.
        files: data files that a new measurement would read.
        progress: as `checkpoint.digest` takes it.
    """
    files = list(files)
    for path in store.records(folder, kind):
        record = store.read_record(path, kind)
        if split_of(record) == split and not record.provenance.host_was_busy and condition(record):
            server = ServerCommand.resolve(variant)
            if not changed_inputs(
                record.provenance, server, kind.deciding_flags, files=files, progress=progress
            ):
                return path
    return None


def changed_inputs(
    block: Provenance,
    command: ServerCommand,
    deciding_flags: Collection[str] | None = None,
    *,
    files: Iterable[Path] = (),
    on_any_machine: bool = False,
    progress: Progress = silent,
) -> list[str]:
    """Names of the inputs of a measurement that have changed since.

    Args:
        block: provenance of the record.
        command: command that would serve the variant now; its port does not matter.
        deciding_flags: flags to compare, and no environment; None to compare all flags and the environment.
        files: data files that a measurement would read now: one that the record lacks has been added since.
        on_any_machine: whether hardware, threads, folders of caches and the build of the checkpoint may differ.
        progress: as `checkpoint.digest` takes it.
    """
    root, present = command.variant.root, provenance.of_server(command)
    flags = [affecting(Effect.FIGURES, each) for each in (block.flags, present["flags"])]
    environments = [block.environment, present["environment"]]
    same_files = block.files == present.get("files", {})
    if deciding_flags is not None:
        flags = [{name: each[name] for name in deciding_flags if name in each} for each in flags]
        environments, same_files = [], True
    if on_any_machine:
        ignored = "OMP_NUM_THREADS", "CACHE_ROOT", "CACHE_DIR"
        environments = [
            {name: value for name, value in each.items() if not name.endswith(ignored)}
            for each in environments
        ]
    present_checkpoint = provenance.checkpoint_files(command.variant.weights, root, progress)
    is_same = block.checkpoint_digest == present_checkpoint.digest
    is_build = block.checkpoint is not None and block.checkpoint.has_recipe_of(present_checkpoint)
    same = {
        "checkpoint": is_same or (on_any_machine and is_build),
        "data files": not changed_data(block, root, files),
        "flags": flags[0] == flags[1],
        "files that flags name": same_files,
        "environment": not environments or environments[0] == environments[1],
        "package versions": block.packages == provenance.package_versions(),
        "hardware": on_any_machine or block.hardware == provenance.hardware(),
    }
    return [name for name, is_same in same.items() if not is_same]


def changed_data(block: Provenance, root: Path, files: Iterable[Path] = ()) -> list[str]:
    """Data files of a record, relative to the repository, that are missing or have changed, or were added since.

    Args:
        files: data files that the measurement would read now.
    """
    present = {provenance.portable(str(file), root): file for file in files}
    return sorted(present.keys() - block.datasets.keys()) + [
        name
        for name, digest in block.datasets.items()
        if not (file := present.get(name, root / name)).exists() or text_digest(file) != digest
    ]
