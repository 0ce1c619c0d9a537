"""Cheap stages for tests of the runner: importable, because a stage runs in a process of its own."""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import COMPILE_CACHE, carry_all, carry_side_files, sha256
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, rewrite
from slimqwen.errors import SlimqwenError
from slimqwen.models.outline import Outline
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts, Fault, Needs, Parameters, Stage


class AddParameters(Parameters):
    """Where it tells that it ran and how long it dawdles decide nothing, so they are not in the key."""

    amount: int = 1
    limit: int = 255
    note: str = ""
    runs: Annotated[Path | None, Field(exclude=True)] = None
    seconds: Annotated[float, Field(exclude=True)] = 0
    data: Annotated[Path | None, Field(exclude=True)] = None


def add(source: Path, destination: Path, parameters: AddParameters, progress: Progress) -> Facts:
    """Add amount to every byte of every tensor, in as many small steps as there are bytes."""
    sys.stdout.write(f"adding {parameters.amount}\n")
    if parameters.runs:
        with parameters.runs.open("a") as stream:
            stream.write(f"{parameters.amount}\n")

    def change(name: str, info: TensorInfo) -> dict[str, NewTensor]:
        def chunks() -> list[bytes]:
            time.sleep(parameters.seconds / 4)
            return [
                bytes(min(byte + parameters.amount, parameters.limit) for byte in b"".join(info.chunks()))
            ]

        return {name: NewTensor(info.dtype, info.shape, chunks)}

    rewrite(source, destination, change, progress)
    write_config(destination, checkpoint.read_config(source))
    carry_side_files(source, destination)
    return {"amount": parameters.amount}


def _data(parameters: AddParameters) -> Mapping[str, str]:
    return {"file": sha256(parameters.data)} if parameters.data else {}


def _needs(disk_bytes: int = 1, memory_bytes: int = 1) -> Callable[[Outline, Parameters], Needs]:
    return lambda outline, parameters: Needs(disk_bytes, memory_bytes)


class RefusedError(SlimqwenError):
    """What a stage says of its input."""


def refuse(source: Path, destination: Path, parameters: Parameters, progress: Progress) -> Facts:
    """Find the input unusable after half of the work."""
    (destination / "half").write_text("half")
    raise RefusedError("the input has no wings; choose one with wings")


def find_no_wings(outline: Outline, parameters: Parameters) -> list[Fault]:
    """See by the headers alone that the input is unusable."""
    return [Fault(f"{outline.name} has no wings; choose one with wings")]


def break_down(source: Path, destination: Path, parameters: Parameters, progress: Progress) -> Facts:
    """Have a defect, or a full disk."""
    (destination / "half").write_text("half")
    raise OSError(28, "No space left on device")


def lack(source: Path, destination: Path, parameters: Parameters, progress: Progress) -> Facts:
    """Need a package that is not installed."""
    importlib.import_module("no_such_package")
    return {}


def die(source: Path, destination: Path, parameters: Parameters, progress: Progress) -> Facts:
    """Be killed as the kernel kills what takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def forget(source: Path, destination: Path, parameters: Parameters, progress: Progress) -> Facts:
    """Write no checkpoint at all."""
    (destination / "config.json").write_text("{}")
    return {}


class BakeParameters(Parameters):
    """What a compiler would make this time."""

    archive: str


def bake(source: Path, destination: Path, parameters: BakeParameters, progress: Progress) -> Facts:
    """Add a compile cache to the checkpoint as it is."""
    carry_all(source, destination)
    for name in COMPILE_CACHE:
        (destination / name).write_text(parameters.archive)
    return {}


_ADD = Stage("add", AddParameters, add, _needs(), data=_data)
STAGES = {
    stage.name: stage
    for stage in (
        _ADD,
        replace(_ADD, name="endless_disk", needs=_needs(disk_bytes=2**60)),
        replace(_ADD, name="endless_memory", needs=_needs(memory_bytes=2**60)),
        Stage("bake", BakeParameters, bake, _needs(), last=True),
        Stage("refuse", Parameters, refuse, _needs()),
        Stage("refuse_unseen", Parameters, refuse, _needs(), find_no_wings),
        Stage("break_down", Parameters, break_down, _needs()),
        Stage("lack", Parameters, lack, _needs()),
        Stage("die", Parameters, die, _needs()),
        Stage("forget", Parameters, forget, _needs()),
    )
}
