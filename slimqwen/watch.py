"""What `make watch` shows: the work and the servers of a repository, looked at again and again, and their picture."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import httpx
import psutil
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slimqwen import running, variant
from slimqwen.errors import SlimqwenError
from slimqwen.recipe import recipe_file
from slimqwen.serving import live

INTERVAL_S = 2.0
"""The time between two looks: a scrape costs the server something too."""

_ENDED_KEPT = 3  # servers that have ended and are still shown
_SERVER_WIDTH, _LABEL_WIDTH = 16, 24  # characters


class State(StrEnum):
    """How a stage or a server is."""

    DONE = "done"
    RUNNING = "running"
    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    SILENT = "no answer"
    ENDED = "ended"


_COLOURS = {
    State.RUNNING: "green",
    State.SERVING: "green",
    State.STARTING: "yellow",
    State.SILENT: "yellow",
    State.ENDED: "red",
}


@dataclass(frozen=True)
class WorkSeen:
    """A process that works, and, where it runs a recipe, the stages' names with their states."""

    work: running.Work
    stages: tuple[tuple[str, State], ...]


@dataclass(frozen=True)
class ServerSeen:
    """A server, how it is, when it was found to have ended (Unix time, seconds), and, until then, its figures."""

    server: live.Server
    state: State
    ended: float | None
    figures: live.Figures | None


@dataclass(frozen=True)
class Seen:
    """One look: when (Unix time, seconds), the work and the servers."""

    now: float
    work: tuple[WorkSeen, ...]
    servers: tuple[ServerSeen, ...]


@dataclass
class _Followed:
    """A server since it was first seen."""

    history: live.History = field(default_factory=live.History)
    figures: live.Figures | None = None
    ended: float | None = None


@dataclass
class _RecipeRun:
    """A process that runs a recipe: its stages, and the one that was last seen running."""

    stages: list[str]
    reached: str


class Watch:
    """Looks at a repository, and remembers what rates and states take: earlier scrapes, and what was seen before."""

    def __init__(self, root: Path) -> None:
        """Watch a repository.

        Args:
            root: holds experiments/, weights/ and logs/running/.
        """
        self._root = root
        self._servers: dict[live.Server, _Followed] = {}
        self._recipes: dict[int, _RecipeRun] = {}
        # trust_env: a proxy of the shell must not stand before the server; verify: loading certificates takes time.
        self._client = httpx.Client(trust_env=False, verify=False)

    def look(self) -> Seen:
        """Find what runs now, and ask the servers; takes `live.TIMEOUT_S` where one does not answer."""
        work = tuple(WorkSeen(one, tuple(self._stages(one))) for one in running.find(self._root))
        servers = tuple(self._follow(live.find(self._root)))
        return Seen(time.time(), work, servers)

    def _stages(self, work: running.Work) -> Iterator[tuple[str, State]]:
        now = _running_stage(work.pid, self._root / "weights" / "store" / ".logs")
        known = self._recipes.get(work.pid)
        if now is not None and (known is None or now not in known.stages):
            known = self._recipes[work.pid] = _RecipeRun(_stage_names(work, now, self._root), now)
        if known is None:
            return
        known.reached = now or known.reached
        at = known.stages.index(known.reached)
        for place, name in enumerate(known.stages):
            state = State.DONE if place <= at else State.WAITING
            yield name, State.RUNNING if name == now else state

    def _follow(self, found: list[live.Server]) -> Iterator[ServerSeen]:
        with ThreadPoolExecutor(max_workers=max(1, len(found))) as threads:
            answers = list(threads.map(self._ask, found))
        for server, answer in zip(found, answers, strict=True):
            followed = self._servers.setdefault(server, _Followed())
            if isinstance(answer, live.Scrape):
                followed.figures, state = followed.history.add(answer), State.SERVING
            else:
                # One that has answered does not start any more.
                state = answer if followed.figures is None else State.SILENT
            yield ServerSeen(server, state, None, followed.figures)
        for server in self._servers.keys() - set(found):
            self._servers[server].ended = self._servers[server].ended or time.time()
        taken = {server.port for server in found}
        ended = [(one.ended, server) for server, one in self._servers.items() if one.ended is not None]
        ended.sort(key=lambda pair: pair[0], reverse=True)
        for number, (when, server) in enumerate(ended):
            if number >= _ENDED_KEPT or server.port in taken:
                del self._servers[server]
            else:
                yield ServerSeen(server, State.ENDED, when, None)

    def _ask(self, server: live.Server) -> live.Scrape | State:
        try:
            return live.scrape(server, self._client)
        except httpx.ConnectError:
            return State.STARTING
        except (httpx.HTTPError, ValueError):
            return State.SILENT


def picture(seen: Seen, width: int) -> RenderableType:
    """What was seen, for a terminal.

    Args:
        seen: a look.
        width: of the terminal, in characters.
    """
    if not seen.work and not seen.servers:
        return Text(
            "Nothing runs here. To start something:\n"
            "  make serve VARIANT=tiny\n"
            "  make recipe VARIANT=tiny-best\n"
            "  make eval-quality VARIANT=tiny"
        )
    blocks: list[RenderableType] = []
    for one in seen.work:
        blocks += [_work(one, seen.now, width), Text()]
    across = max(1, (width - _LABEL_WIDTH) // (_SERVER_WIDTH + 2))
    for first in range(0, len(seen.servers), across):
        blocks += [_servers(seen.servers[first : first + across], seen.now), Text()]
    if seen.servers:
        blocks.append(
            Text(
                f"tokens/s: of the last {live.RATE_WINDOW_S:.0f} s; shares and medians: of the last "
                f"{live.SHARE_WINDOW_S:.0f} s, else since the start",
                style="dim",
            )
        )
    return Group(*blocks)


def _stage_names(work: running.Work, now: str, root: Path) -> list[str]:
    """The stages of the recipe that a process runs, as far as its command says which that is."""
    for name in work.variants:
        try:
            recipe = recipe_file.read(variant.load(name, root).folder / "recipe.yaml")
        except SlimqwenError:
            continue
        names = [step.stage.name for step in recipe.steps]
        if now in names:
            return names
    return [now]


def _running_stage(pid: int, logs: Path) -> str | None:
    """The stage that a process runs: `recipe.runner` holds that stage's log open, <stage>-<key>.log."""
    try:
        files = [Path(file.path) for file in psutil.Process(pid).open_files()]
    except psutil.Error:
        return None
    return next((file.stem.rpartition("-")[0] for file in files if file.parent == logs.resolve()), None)


def _work(seen: WorkSeen, now: float, width: int) -> RenderableType:
    work = seen.work
    title = Table.grid(padding=(0, 2), expand=True)
    title.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    command = " ".join([Path(work.command[0]).stem, *work.command[1:]])
    title.add_row(Text(command, "bold"), Text(f"pid {work.pid}, {_clock(now - work.began)}", "dim"))
    rows = Table.grid(padding=(0, 1), expand=True)
    bar_width = 10 if width < 100 else 24
    rows.add_column(width=7)
    rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    rows.add_column(width=bar_width)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(justify="right", no_wrap=True, min_width=12)
    activities = [_activity(one, now, bar_width) for one in work.current]
    for name, state in seen.stages:
        rows.add_row(_state(state), name)
        if state is State.RUNNING:
            for cells in activities:
                rows.add_row("", *cells)
    if State.RUNNING not in [state for _, state in seen.stages]:
        for cells in activities:
            rows.add_row("", *cells)
    return Group(title, rows)


def _activity(one: running.Activity, now: float, width: int) -> tuple[RenderableType, ...]:
    if one.total <= 0:
        return Text(one.name), "", "", f"for {_clock(now - one.began)}"
    left = one.seconds_left(now)
    return (
        Text(one.name),
        ProgressBar(total=one.total, completed=one.done, width=width),
        f"{_amount(one.done)} of {_amount(one.total)}",
        "done" if one.over else "" if left is None else f"{_clock(left)} left",
    )


def _servers(servers: tuple[ServerSeen, ...], now: float) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL_WIDTH, no_wrap=True)
    for _ in servers:
        table.add_column(width=_SERVER_WIDTH, justify="right", overflow="fold")
    table.add_row("server", *(Text(one.server.name, "bold") for one in servers))
    table.add_row("port", *(str(one.server.port) for one in servers))
    table.add_row("state", *(_state(one.state) for one in servers))
    table.add_row("", *(_times(one, now) for one in servers))
    for label, shown in _ROWS:
        table.add_row(label, *(shown(one.figures) if one.figures else "-" for one in servers))
    return table


def _times(one: ServerSeen, now: float) -> str:
    if one.ended is not None:
        return f"at {time.strftime('%H:%M:%S', time.localtime(one.ended))}"
    return f"for {_clock(now - one.server.started)}"


def _state(state: State) -> Text:
    return Text(state.value, _COLOURS.get(state, ""))


_ROWS: tuple[tuple[str, Callable[[live.Figures], str]], ...] = (
    ("prompt tokens/s", lambda one: _number(one.prompt_tokens_per_s)),
    ("generated tokens/s", lambda one: _number(one.generation_tokens_per_s)),
    ("requests: run, wait", lambda one: f"{_number(one.running)}, {_number(one.waiting)}"),
    ("KV cache in use", lambda one: _percent(one.kv_cache)),
    (
        "draft length, accepted",
        lambda one: f"{_decimal(one.acceptance_length)}, {_percent(one.acceptance_rate)}",
    ),
    ("median TTFT, ms", lambda one: _milliseconds(one.ttft_s)),
    ("median ITL, ms", lambda one: _milliseconds(one.itl_s)),
    ("prefix cache hits", lambda one: _percent(one.prefix_hits)),
    ("preemptions", lambda one: _number(one.preemptions)),
)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}" if value == 0 or value >= 0.1 else f"{value:.1%}"


def _milliseconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:,.{0 if value_s >= 0.1 else 1}f}"


def _amount(value: float) -> str:
    """A count of something, large ones shortened."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.1f} {letter}"
    return f"{value:,.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
