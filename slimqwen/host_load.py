"""Load of the host: the share of the machine that other work takes during a measurement, and delays of event loops.

A measurement times its requests in sections of a `Watch`, in the process that waits for them. `retry_until_idle`
repeats a round on a host busier than `LIMITS`, once.
"""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, Field

from slimqwen.errors import SlimqwenError

_ATTEMPTS = 2

SERVER_DELAYS = "slimqwen:event_loop_delay_seconds"
"""Metric of a server: delays of timers in its event loop, seconds."""

TIMER_S = 0.02
"""Interval of the timers whose delay is measured, seconds."""

_PRESSURE = Path("/proc/pressure/cpu")

Result = TypeVar("Result")


class HostBusyError(SlimqwenError):
    """The host was too busy for a valid measurement of times.

    Attributes:
        cause: how busy it was in the last attempt, in short.
    """

    cause = ""


@dataclass(frozen=True)
class Limits:
    """Largest load of a host at which measured times are valid, in the terms of `HostLoad`."""

    other_share: float
    client_delay_ms: float
    server_delay_ms: float


LIMITS = Limits(other_share=0.075, client_delay_ms=5.0, server_delay_ms=5.0)
"""Limits of every timed command."""


class HostLoad(BaseModel):
    """Load of the host during the timed sections of a measurement: the highest of its rounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seconds: float = Field(ge=0, description="Duration of the timed sections of all rounds.")
    other_share: float = Field(
        ge=0,
        description="Share of the time of the CPUs that this process may use which other processes took, or a "
        "hypervisor withheld.",
    )
    pressure: float | None = Field(
        ge=0,
        description="Share of the time in which a task waited for a CPU, the measurement's own tasks among them; null "
        "where the kernel does not say.",
    )
    client_delay_ms: float | None = Field(
        ge=0, description="Mean delay of a timer in the client's event loop; null without one."
    )
    server_delay_ms: float | None = Field(
        ge=0, description="Mean delay of a timer in the server's event loop; null where it counts none."
    )
    repeated: int = Field(default=0, ge=0, description="Rounds measured again because the host was too busy.")
    busy: bool = Field(default=False, description="The host was too busy, and --even-if-busy was given.")

    def excess(self) -> list[str]:
        """What exceeds one of `LIMITS`, in words."""
        reasons = []
        if self.other_share > LIMITS.other_share:
            reasons.append(
                f"other processes used {100 * self.other_share:.1f} % CPU (limit {100 * LIMITS.other_share:.1f} %)"
            )
        for side, delay, limit in (
            ("client", self.client_delay_ms, LIMITS.client_delay_ms),
            ("server", self.server_delay_ms, LIMITS.server_delay_ms),
        ):
            if delay is not None and delay > limit:
                reasons.append(f"the {side}'s event loop was {delay:.1f} ms late (limit {limit:g})")
        return reasons


def highest_load(rounds: Sequence[HostLoad]) -> HostLoad:
    """The load of a run of several rounds: the highest of each figure."""

    def highest(name: str) -> float | None:
        return max((value for load in rounds if (value := getattr(load, name)) is not None), default=None)

    return HostLoad(
        seconds=sum(load.seconds for load in rounds),
        other_share=max(load.other_share for load in rounds),
        pressure=highest("pressure"),
        client_delay_ms=highest("client_delay_ms"),
        server_delay_ms=highest("server_delay_ms"),
        repeated=sum(load.repeated for load in rounds),
        busy=any(load.busy for load in rounds),
    )


def retry_until_idle(
    measure_round: Callable[["Watch"], Result], name: str, *, even_if_busy: bool = False
) -> tuple[Result, HostLoad]:
    """Measure a round, and once more if the host was too busy; return its result and the load meanwhile.

    Args:
        measure_round: times its work in sections of the watch.
        name: of the round in the message.
        even_if_busy: accept the first result on a busy host too; its load is marked.

    Raises:
        HostBusyError: the host was too busy in both attempts.
    """
    for attempt in range(_ATTEMPTS):
        watch = Watch()
        result = measure_round(watch)
        load = watch.load()
        excess = ", ".join([*load.excess(), *watch.faults])
        if not excess or even_if_busy:
            return result, load.model_copy(update={"repeated": attempt, "busy": bool(excess)})
    error = HostBusyError(
        f"{name}: host too busy in both attempts: {excess}; end other work on this machine and run again "
        "(--even-if-busy writes a record that no comparison uses)"
    )
    error.cause = excess
    if load.other_share > LIMITS.other_share:  # event loops are late because of them
        error.cause = f"other processes used {100 * load.other_share:.0f} % of the CPU"
    raise error


async def timer_delays() -> AsyncIterator[float]:
    """Delays of timers in the running event loop, seconds, without end."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TIMER_S
        await asyncio.sleep(TIMER_S)
        yield max(0.0, loop.time() - due)


class Watch:
    """The load during the timed sections of a round."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        """Signs of a too busy host in the answers themselves."""
        self._sections: list[HostLoad] = []
        self._client, self._server = _Delays(), _Delays()

    @contextlib.contextmanager
    def section(
        self, pid: int | None = None, counters: Callable[[], Mapping[str, float]] | None = None
    ) -> Iterator[None]:
        """Time what a `with` block does.

        Args:
            pid: process of a server that another process started; it and its children count as the measurement's own.
            counters: reads the server's metrics, empty for a lost server; None without a server.
        """
        delays = _server_delays(counters)
        before = _Clocks.read(pid)
        yield
        after = _Clocks.read(pid)
        seconds = after.wall_s - before.wall_s
        # Over a short section, clock ticks can make the difference negative.
        others_s = max(0.0, after.machine_s - before.machine_s - (after.own_s - before.own_s))
        pressure = None
        if before.waited_s is not None and after.waited_s is not None:
            pressure = (after.waited_s - before.waited_s) / seconds
        self.add(
            HostLoad(
                seconds=seconds,
                other_share=others_s / (seconds * after.cpus),
                pressure=pressure,
                client_delay_ms=None,
                server_delay_ms=None,
            )
        )
        if delays and (delays_now := _server_delays(counters)):
            self._server.add(delays_now, delays)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[None]:
        """Measure how late the running event loop is, for the length of an `async with` block."""

        async def measure() -> None:
            async for delay in timer_delays():
                self._client.total_s += delay
                self._client.count += 1

        task = asyncio.create_task(measure())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def add(self, load: HostLoad) -> None:
        """Add the sections of another watch, such as one of another process, without its delays of event loops."""
        self._sections.append(load)

    def load(self) -> HostLoad:
        """Load over all sections so far."""
        seconds = [section.seconds for section in self._sections]

        def mean(name: str) -> float | None:
            values = [getattr(section, name) for section in self._sections]
            if not sum(seconds) or None in values:
                return None
            return statistics.fmean(values, seconds)

        return HostLoad(
            seconds=sum(seconds),
            other_share=mean("other_share") or 0.0,
            pressure=mean("pressure"),
            client_delay_ms=self._client.mean_ms,
            server_delay_ms=self._server.mean_ms,
        )


@dataclass
class _Delays:
    """Delays of timers: their sum in seconds, their number."""

    total_s: float = 0.0
    count: float = 0.0

    @property
    def mean_ms(self) -> float | None:
        return 1e3 * self.total_s / self.count if self.count else None

    def add(self, after: "_Delays", before: "_Delays") -> None:
        self.total_s += after.total_s - before.total_s
        self.count += after.count - before.count


def _server_delays(counters: Callable[[], Mapping[str, float]] | None) -> _Delays | None:
    """Delays of a server's timers since its start; None where it counts none."""
    values = counters() if counters is not None else {}
    names = f"{SERVER_DELAYS}_sum", f"{SERVER_DELAYS}_count"
    return _Delays(*(values[name] for name in names)) if names[1] in values else None


@dataclass(frozen=True)
class _Clocks:
    """Clocks at one moment, seconds.

    Attributes:
        cpus: number of CPUs that this process may use.
        machine_s: CPU time that these CPUs spent on any process or lost to other machines.
        own_s: CPU time of the measurement's own processes, ended children included.
        waited_s: time in which a task waited for a CPU; None where the kernel does not say.
    """

    wall_s: float
    cpus: int
    machine_s: float
    own_s: float
    waited_s: float | None

    @classmethod
    def read(cls, pid: int | None) -> "_Clocks":
        cpus = psutil.cpu_times(percpu=True)
        # A job may have a few of the machine's CPUs to itself while others use the rest.
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        cpus = [times for cpu, times in enumerate(cpus) if cpu in allowed] or cpus
        machine_s = 0.0
        for times in cpus:
            idle = times.idle + getattr(times, "iowait", 0.0)
            # `guest` is part of `user` already.
            guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
            machine_s += sum(times) - guests - idle
        own = 0.0
        for process in _process_tree(pid):
            with contextlib.suppress(psutil.Error):
                own += sum(process.cpu_times()[:4])
        return cls(time.perf_counter(), len(cpus), machine_s, own, _waited_s())


def _process_tree(pid: int | None) -> set[psutil.Process]:
    """This process, a server's, and all processes below them."""
    members: set[psutil.Process] = set()
    for root in {psutil.Process().pid, pid or psutil.Process().pid}:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(root)
            members |= {process, *process.children(recursive=True)}
    return members


def _waited_s() -> float | None:
    try:
        line = _PRESSURE.read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None
    return int(line.rpartition("total=")[2]) / 1e6
