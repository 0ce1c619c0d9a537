"""The steps of `make gpu-check`, and what each keeps of what it found.

Each step is a process of its own (`python -m tests.gpu.steps LETTER SECONDS`), so that a crash, a hang or a GPU in a
bad state ends no other step. It works in the checkout, not in the copy that tests run in: its records lie where a
person finds them. What it found is written after every part, so that a second run goes on.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slimqwen import lifeline
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.plan.devices import CPU, Gpu
from slimqwen.plan.host_gpus import choose_gpu
from slimqwen.records import provenance

STEPS: Mapping[str, str] = {
    "b": "timing",
    "c": "engines",
    "a": "plans",
    "e": "baked",
    "d": "stages",
    "f": "load",
    "g": "kernels",
}
"""Letter of each step -> its module beside this one, in the order of worth."""

WITHOUT_VLLM = ("d", "g")
"""Steps of which a part needs only the torch of the host."""

LIMIT_S, REHEARSAL_S = 180.0, 120.0
"""Time of a step on a GPU and in a rehearsal; at its end what runs is interrupted, and a second run goes on."""

_CLEAN_UP_S = 15.0

FOLDER = Path("results") / "gpu-check"
"""Ignored by git: `git add -f` takes what is wanted."""

Status = Literal["passed", "failed", "left out", "unfinished"]


class LeftOutError(SlimqwenError):
    """A step cannot be done here; the message says what is missing."""


class UnfinishedError(SlimqwenError):
    """A step has more parts than its time holds; the message says what was seen so far."""


class Result(NamedTuple):
    """What a step came to, in one line."""

    status: Status
    line: str
    seconds: float
    again: bool = True  # whether it ran now; False: it was finished before


@dataclass
class Here:
    """This host, and what a step found on it.

    Attributes:
        gpu: None in a rehearsal.
        file: what the step found, JSON; records lie in the folder beside it.
        deadline: `time.monotonic()` by which the step has to end.
        parts: what was found, by name of the part.
    """

    root: Path
    gpu: Gpu | None
    file: Path
    deadline: float
    parts: dict[str, Any] = field(default_factory=dict)
    _writes: threading.Lock = field(default_factory=threading.Lock)

    @property
    def records(self) -> Path:
        """Folder for records and other files of the step."""
        return self.file.with_suffix("")

    @property
    def seconds_left(self) -> float:
        """Time until the step has to end."""
        return self.deadline - time.monotonic()

    def part(self, name: str, find: Callable[[], Any]) -> Any:
        """What a part found, as JSON: in an earlier run, else now. One that failed is tried again by a later run."""
        if "failure" not in self.parts.get(name, {"failure": ""}):
            return self.parts[name]
        try:
            found = find()
        except Exception as error:  # a part that fails ends neither the step nor what it found so far
            traceback.print_exc()
            found = {"failure": one_line(error, self.root)}
        with self._writes:
            self.parts[name] = found
            self.file.parent.mkdir(parents=True, exist_ok=True)
            content = json.loads(self.file.read_text()) if self.file.is_file() else {}
            write(self.file, content | {"parts": self.parts})
        return found

    def failures(self) -> list[str]:
        """A phrase for each part that failed."""
        return [f"{name}: {found['failure']}" for name, found in self.parts.items() if "failure" in found]


def one_line(error: BaseException, root: Path) -> str:
    """An error in a line, without paths of this machine."""
    kind = "" if isinstance(error, SlimqwenError | AssertionError) else f"{type(error).__name__}: "
    return str(provenance.portable(f"{kind}{' '.join(str(error).split())}"[:600], root))


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON at once: a step may be killed at any time."""
    staging = file.with_suffix(".new")
    staging.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    staging.replace(file)


def find_gpu(root: Path) -> Gpu | None:
    """The GPU of this host; None for a rehearsal.

    Raises:
        LeftOutError: there is none.
        UnknownGpuError: eval/devices.yaml does not list it.
    """
    if os.environ.get("REHEARSE") == "1":
        return None
    chosen = choose_gpu(None, root)
    if chosen is None:
        raise LeftOutError("no NVIDIA GPU here; REHEARSE=1 rehearses every step on the CPU")
    return chosen.gpu


def digest_inputs(root: Path) -> str:
    """Digest of the code, variants and settings that decide what a step finds, and of the versions that run it."""
    patterns = ("slimqwen/**/*.py", "tests/gpu/*.py", "experiments/*/config.env", "experiments/*/recipe.yaml")
    settings = ("eval/*.yaml", "eval/gates/*", "eval/shapes/*", "eval/workloads/*", "requirements/*.txt")
    digest = hashlib.sha256(json.dumps(provenance.package_versions()).encode())
    for file in sorted(file for pattern in (*patterns, *settings) for file in root.glob(pattern)):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def result_file(root: Path, gpu: Gpu | None, letter: str) -> Path:
    """Where a step keeps what it found."""
    return root / FOLDER / (gpu.name if gpu else CPU) / f"{letter}.json"


def run_step(letter: str, root: Path, *, fresh: bool = False) -> Result:
    """Run a step in a process of its own, unless it was finished with this code; returns what it came to."""
    try:
        gpu = find_gpu(root)
    except SlimqwenError as error:
        return Result("left out", one_line(error, root), 0)
    file, key = result_file(root, gpu, letter), digest_inputs(root)
    content = json.loads(file.read_text()) if file.is_file() else {}
    if fresh or content.get("key") != key:
        content = {"step": letter, "key": key, "parts": {}, "seconds": 0}
    elif content.get("status") == "passed":
        return Result("passed", content["line"], content["seconds"], again=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, {**content, "status": "unfinished", "line": "not begun"})
    limit_s = LIMIT_S if gpu else REHEARSAL_S
    started = time.monotonic()
    log = root / "logs" / f"gpu-check-{letter}.log"
    log.parent.mkdir(exist_ok=True)
    timed_out = _run_process(letter, root, limit_s, log)
    content = json.loads(file.read_text())
    status, line = content["status"], content["line"]
    if line == "not begun":
        found = ", ".join(content["parts"]) or "none"
        ended = f"not finished in {limit_s:.0f} s" if timed_out else f"its process ended, see logs/{log.name}"
        status, line = ("unfinished" if timed_out else "failed"), f"{ended}; parts done: {found}"
    seconds = round(content["seconds"] + time.monotonic() - started, 1)
    write(file, {**content, "status": status, "line": line, "seconds": seconds, **_circumstances(gpu)})
    return Result(status, line, round(time.monotonic() - started, 1))


def _run_process(letter: str, root: Path, limit_s: float, log: Path) -> bool:
    """Run the process of a step; returns whether it was interrupted because its time was over."""
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.steps", letter, str(limit_s)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,  # a lifeline: the step and its servers end with this process, however it ends
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            process.wait(limit_s - _CLEAN_UP_S)
            return False
        except BaseException as error:  # also Ctrl-C: the process is in a session of its own
            process.send_signal(signal.SIGINT)  # servers end with the block that started them
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLEAN_UP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return True


def _circumstances(gpu: Gpu | None) -> dict[str, Any]:
    """When, on what and by which versions, so that a figure can be cited."""
    found = {"ended": provenance.utc_now(), "packages": provenance.package_versions()}
    if gpu is None:
        return {**found, "hardware": provenance.hardware().as_json()}
    # Asked of the driver: torch would hold a context on the GPU beside the steps to come.
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version,power.limit",
        "--format=csv,noheader",
    ]
    shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return {**found, "hardware": shown.strip()}


def perform(letter: str, root: Path, deadline: float) -> None:
    """Do a step in this process, and write what it came to."""
    gpu = find_gpu(root)
    file = result_file(root, gpu, letter)
    here = Here(root, gpu, file, deadline, json.loads(file.read_text())["parts"])
    status: Status = "passed"
    try:
        if letter not in WITHOUT_VLLM and importlib.util.find_spec("vllm") is None:
            raise LeftOutError("vLLM is not importable here")
        line = importlib.import_module(f"tests.gpu.{STEPS[letter]}").run(here)
        if failures := here.failures():
            status, line = "failed", "; ".join([*failures, line])
    except LeftOutError as error:
        status, line = "left out", str(error)
    except UnfinishedError as error:
        status, line = "unfinished", str(error)
    except Exception as error:
        traceback.print_exc()
        status, line = "failed", one_line(error, root)
    write(file, {**json.loads(file.read_text()), "parts": here.parts, "status": status, "line": line})


def main(letter: str, limit_s: str) -> None:
    """Do a step in this process, which ends when whoever holds the other end of its standard input does."""
    lifeline.watch(sys.stdin.fileno())
    perform(letter, variants.repository_root(), time.monotonic() + float(limit_s) - 2 * _CLEAN_UP_S)


if __name__ == "__main__":
    # Imported by its name, so that the errors that a step raises are those that are caught.
    from tests.gpu import steps

    steps.main(*sys.argv[1:])
