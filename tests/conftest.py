"""What every test may use: a repository of its own, and one served model for the whole session."""

import gc
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

# `pytest -n 2`: each worker, and every server that it starts, keeps to cores of its own, because OpenMP threads that
# wait for one another spin, and take minutes from a test beside them.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))[int(worker[2:]) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
    if cores:
        os.sched_setaffinity(0, cores)

# In-process engines take one thread unless the environment says how many; hubs are never asked.
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import hypothesis
import pytest

from slimqwen import host_load, variant
from slimqwen.errors import SlimqwenError
from slimqwen.processes import spawner
from slimqwen.processes.worker import GARBAGE_THRESHOLD
from slimqwen.records import registry, store
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import RunningServer, free_port, run_server
from slimqwen.serving.shared_server import SharedServer, max_model_len
from tests import cpu_kinds, tracked_copy
from tests.stand_in import add_served, stand_in, write_task  # noqa: F401  (fixtures)

# A shell without job control starts what it puts in the background with SIGINT ignored, nohup ignores SIGHUP, and every
# child inherits that.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# A hook of git has GIT_DIR and GIT_INDEX_FILE: repositories that tests make would be the developer's own.
for variable in [name for name in os.environ if name.startswith("GIT_")]:
    del os.environ[variable]

# vLLM's modules stay loaded: to look for garbage among their objects takes a third of the time.
gc.set_threshold(GARBAGE_THRESHOLD)

# The same examples in every run, however busy the machine is.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

AddVariant = Callable[..., Path]

SHARED_BY_FILES = ("tiny_server",)
"""Fixtures of the session that take an engine to make: all files with one of them run in one process."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print on which kind of CPU the tests ran, and which changes they did not see."""
    cpu = cpu_kinds.describe_cpu(Path("/proc/cpuinfo").read_text(), os.environ)
    terminalreporter.write_line(f"CPU: {cpu}")
    if changed := os.environ.get(tracked_copy.LEFT_OUT):
        first, *others = changed.splitlines()
        more = f" and {len(others)} more" if others else ""
        terminalreporter.write_line(f"changed, but tested as git tracks it until `git add`: {first}{more}")


ONLY_IF_NAMED = ("gpu", "image", "real", "soak", "zoo")
"""Marks of tests that run only if the expression of `-m` names the mark."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a file run in one process; files that start engines come first, so that no long one is the last."""
    unnamed = {mark for mark in ONLY_IF_NAMED if mark not in config.option.markexpr}
    left_out = {item for item in items if unnamed.intersection(mark.name for mark in item.iter_markers())}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    groups = {item.path: item.nodeid.partition("::")[0] for item in items}
    for item in items:
        for name in SHARED_BY_FILES:
            if name in getattr(item, "fixturenames", ()):
                groups[item.path] = name
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.path]))
    with_engine = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: (item.path not in with_engine, groups[item.path] not in SHARED_BY_FILES))


@pytest.fixture(scope="session", autouse=True)
def no_host_is_too_busy() -> Iterator[None]:
    """Limits that nothing else on the machine reaches: no test but those of `host_load` depends on them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host_load, "_LOOK_S", 0.0)
        patched.setattr(host_load, "LIMITS", host_load.LoadLimits(math.inf, math.inf, math.inf))
        yield


@pytest.fixture(scope="session", autouse=True)
def expected_errors_are_one_line() -> Iterator[None]:
    """Fails the test in which an expected error of more than one line is made, but for a list of faults."""
    stock = SlimqwenError.__init__

    def make(error: SlimqwenError, *arguments: object) -> None:
        stock(error, *arguments)
        is_list = re.match(r"\d+ faults, nothing has run:\n", str(error))
        assert is_list or "\n" not in str(error), f"an expected error of more than one line: {str(error)!r}"

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SlimqwenError, "__init__", make)
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_are_forks() -> Iterator[None]:
    """Servers that tests start are forks of one process, made with the first: vLLM is imported once a session."""
    with spawner.share_spawner():
        yield


@pytest.fixture
def servers_are_no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are no forks of the process of the session: they find modules that it lacks, and show their command."""
    for name in ("_block", "_requests"):
        monkeypatch.setattr(spawner, name, None)


@pytest.fixture(scope="session")
def freeze_modules() -> Iterator[Callable[[], None]]:
    """Freezes what is there where many modules are new, and nothing thaws it.

    An engine looks for garbage eleven times and thaws all objects at its end: among the modules of vLLM that takes four
    fifths of its time.
    """
    stock, frozen = gc.freeze, 0

    def freeze() -> None:
        nonlocal frozen
        if len(sys.modules) > frozen + 200:
            gc.collect()
            stock()
            frozen = len(sys.modules)

    with pytest.MonkeyPatch.context() as patched:
        for name in ("freeze", "unfreeze"):
            patched.setattr(gc, name, lambda: None)
        yield freeze


@pytest.fixture(autouse=True)
def modules_are_no_garbage(freeze_modules: Callable[[], None]) -> None:
    """Modules that a test has imported stay for the next."""
    freeze_modules()


@pytest.fixture
def add_variant(tmp_path: Path) -> AddVariant:
    """Write experiments/<name>/ into an otherwise empty repository at tmp_path; returns its config.env."""

    def add(name: str, config: str, *, baseline: str | None = None) -> Path:
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True)
        (folder / "config.env").write_text(config, encoding="utf-8")
        content = {
            "schema": "measurements/1",
            "hypothesis": f"what {name} shows",
            "baseline": baseline,
            "status": "planned",
            "verdict": None,
            "records": [],
        }
        (folder / "measurements.json").write_text(json.dumps(content), encoding="utf-8")
        return folder / "config.env"

    return add


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The committed tiny model behind a real vLLM, one for the session."""
    command = ServerCommand.resolve(variant.load("tiny"), port=free_port(), platform="cpu")
    with run_server(command, log=tmp_path_factory.mktemp("tiny-server") / "vllm.log") as server:
        yield server


@pytest.fixture
def served_tiny(tiny_server: RunningServer) -> SharedServer:
    """That server as measurements use it."""
    return SharedServer(variant.load("tiny"), tiny_server, True, max_model_len(tiny_server.base_url))


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record a day newer than the one before: two of one kind and second would have one name."""
    days = (f"2026-{month:02}-{day:02}T000000Z" for month in range(1, 13) for day in range(1, 29))
    monkeypatch.setattr(store, "_stamp", lambda: next(days))


@pytest.fixture
def add_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Add a module to a package for the length of a test; its record kinds are among the others."""
    added: list[str] = []

    def add(package: ModuleType, name: str, text: str) -> None:
        folder = tmp_path / "modules" / package.__name__
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        added.append(f"{package.__name__}.{name}")
        registry.kinds.cache_clear()

    yield add
    registry.kinds.cache_clear()
    for module in added:
        sys.modules.pop(module, None)
