"""What worker processes are asked to do in tests: (weights, folder, task, progress) -> figures."""

import os
import time
from pathlib import Path
from typing import Any


def answer(weights: Path, folder: Path, task: Any, progress: Any) -> dict[str, float]:
    progress("working", 1, 2)
    return {"threads": float(os.environ["OMP_NUM_THREADS"]), "task": float(task)}


def fail(weights: Path, folder: Path, task: Any, progress: Any) -> dict[str, float]:
    raise ValueError("no such kernel")


def die(weights: Path, folder: Path, task: Any, progress: Any) -> dict[str, float]:
    os._exit(7)


def hang(weights: Path, folder: Path, task: Any, progress: Any) -> dict[str, float]:
    time.sleep(60)
    return {}
