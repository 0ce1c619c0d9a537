"""Whether a record still holds, which means that all inputs of its measurement are unchanged."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from slimqwen.identity import changed_names
from slimqwen.identity.effects import Effect, affecting, is_of_machine
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.record import Provenance
from slimqwen.records.split import Split, split_of
from slimqwen.records.store import AnyRecord
from slimqwen.serving.command import ServerCommand
from slimqwen.text.corpus import text_digest
from slimqwen.variant import Variant
from slimqwen.workspace import locate
from slimqwen.yaml_file import YamlPart


def find_reusable(
    variant: Variant,
    kind: type[AnyRecord],
    folder: Path,
    split: Split | None,
    condition: Callable[[AnyRecord], bool],
    files: Iterable[Path | YamlPart] = (),
    progress: Progress = silent,
) -> Path | None:
    """Find the newest record of a variant whose inputs are all unchanged; a new measurement would only repeat it.

    Args:
        kind: the record kind.
        folder: folder of the variant's records.
        split: side of the split that was measured; None for all items.
        condition: whether a record was made with the wanted settings.
        files: data files that a new measurement would read.
        progress: receives (activity, done, total) where the checkpoint has to be hashed.

    Returns:
        File of the record; None without one.
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
    files: Iterable[Path | YamlPart] = (),
    on_any_machine: bool = False,
    progress: Progress = silent,
) -> list[str]:
    """Names of the inputs of a measurement that have changed since its record was made; empty if none has.

    Args:
        block: provenance of the record.
        command: command that would serve the variant now; its port does not matter.
        deciding_flags: the only flags to compare, and then no environment; None to compare all flags and environment.
        files: data files that a measurement would read now; one that the record lacks counts as changed.
        on_any_machine: whether to ignore differences in hardware, threads, cache folders and checkpoint build.
        progress: receives (activity, done, total) where the checkpoint has to be hashed.
    """
    root = command.variant.root
    fields = provenance.of_present(command, progress)
    present = block.model_copy(update=fields)
    before, now = (
        inputs_of(each, deciding_flags, on_any_machine=on_any_machine) for each in (block, present)
    )
    changed = changed_names(before, now)
    if on_any_machine and block.checkpoint and block.checkpoint.has_recipe_of(fields["checkpoint"]):
        changed = [name for name in changed if name != "checkpoint"]
    return changed + (["data files"] if changed_data(block, root, files) else [])


def inputs_of(
    block: Provenance, deciding_flags: Collection[str] | None = None, *, on_any_machine: bool = False
) -> dict[str, object]:
    """The inputs on which a record's figures depend, without data files: name of an input -> its value.

    Args:
        block: provenance of the record.
        deciding_flags: the only flags to include, and then no environment; None for all flags and the environment.
        on_any_machine: whether to leave out what differs between machines: hardware, threads, cache folders.
    """
    flags = affecting(Effect.FIGURES, block.flags)
    inputs: dict[str, object] = {"checkpoint": block.checkpoint_digest, "package versions": block.packages}
    if not on_any_machine:
        inputs["hardware"] = block.hardware.as_json()
    if deciding_flags is not None:
        return inputs | {"flags": {name: flags[name] for name in deciding_flags if name in flags}}
    environment = {
        name: value
        for name, value in block.environment.items()
        if not (on_any_machine and is_of_machine(name))
    }
    return inputs | {"flags": flags, "files that flags name": block.files, "environment": environment}


def changed_data(block: Provenance, root: Path, files: Iterable[Path | YamlPart] = ()) -> list[str]:
    """Paths, relative to the repository, of a record's data files that are missing or changed, or were added since.

    Args:
        files: data files that the measurement would read now.
    """
    present = {provenance.portable(str(file), root): file for file in files}
    for name, file in [*present.items()]:
        whole = name.partition("#")[0]
        if isinstance(file, YamlPart) and name not in block.datasets and whole in block.datasets:
            del present[name]  # a record of when the whole file counted
            present[whole] = file.file
    return sorted(present.keys() - block.datasets.keys()) + [
        name
        for name, digest in block.datasets.items()
        if _digest_now(present.get(name, locate(name, root))) != digest
    ]


def _digest_now(file: Path | YamlPart) -> str | None:
    """Digest of a data file as it is now; None if it is missing."""
    if isinstance(file, YamlPart):
        return file.digest()
    return text_digest(file) if file.exists() else None
