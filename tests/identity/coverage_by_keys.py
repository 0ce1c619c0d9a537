"""The proof of `slimqwen.identity.source`: a stage and its child processes execute only what its key covers."""

import ast
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slimqwen.identity import source
from slimqwen.processes import spawner
from slimqwen.recipe import runner
from slimqwen.recipe.recipe_file import Step
from tests.identity.traced import calls

PACKAGE = Path(source.__file__).parents[1]

NOT_OF_THE_STAGE = {
    "slimqwen.processes.worker",
    "slimqwen.lifeline",
    "slimqwen.progress",
    "slimqwen.recipe.registry",
}
"""What finds and runs a stage: it takes the job, passes its progress on, and ends with its parent."""


@contextmanager
def every_stage_covered(folder: Path) -> Iterator[None]:
    """Trace each stage that a runner runs; an AssertionError in the runner names what its key leaves out."""
    stock, count = runner._run_in_process, itertools.count()

    def run(step: Step, *more: Any) -> Any:
        called = folder / str(next(count))
        called.mkdir()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "path", [str(Path(calls.__file__).parent), *sys.path])
            # A fork of the session's spawner would be a process that began untraced.
            patched.setattr(spawner, "pass_on", lambda: ({}, ()))
            patched.setenv("SLIMQWEN_CALLS", str(called))
            patched.setenv("SLIMQWEN_CALLS_OF", str(PACKAGE))
            result = stock(step, *more)
        assert_covered(step.stage.run, called)
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "_run_in_process", run)
        yield


@contextmanager
def covered(run: Callable[..., Any], folder: Path) -> Iterator[None]:
    """Trace a stage's function that a block calls in this process; an AssertionError names what its key leaves out."""
    calls.trace_into(str(folder), str(PACKAGE))
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    assert_covered(run, folder)


def assert_covered(run: Callable[..., Any], folder: Path) -> None:
    """Compare the calls in a folder with what is reached from a stage's function."""
    reached = source.reach(f"{run.__module__}.{run.__qualname__}").names
    places = {line for file in folder.iterdir() for line in file.read_text().splitlines()}
    missing = set()
    for place in places:
        file, _, line = place.rpartition(":")
        module = ".".join(Path(file).relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        names = next(names for first, last, names in _statements(file) if first <= int(line) <= last)
        if module not in NOT_OF_THE_STAGE and not names & reached.get(module, frozenset()):
            missing.add(f"{module}: {', '.join(sorted(names))}")
    assert not missing, f"{run.__module__} executes what its key leaves out: {sorted(missing)}"
    assert places, "nothing was traced"


@functools.cache
def _statements(file: str) -> list[tuple[int, int, set[str]]]:
    """First and last line of each top-level statement, and the names that it binds."""
    return [
        (
            min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]),
            node.end_lineno or 0,
            source._bound_by(node) or {""},
        )
        for node in ast.parse(Path(file).read_bytes()).body
    ]
