"""Load of the host: the share of the machine that other work takes during a measurement, and delays of event loops.

A measurement times its requests in sections of a `Watch`, in the process that waits for the responses.
`retry_until_idle` measures a round a second time if the host was busier than `LIMITS`.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, Field

from slimqwen.errors import SlimqwenError

_ATTEMPTS = 2
_LOOK_S, _IDLE_WITHIN_S = 1.0, 20.0
"""Length of a check of the load before a round, and how long the host may take to become idle, seconds."""

SERVER_DELAYS = "slimqwen:event_loop_delay_seconds"
"""Metric of a server: delays of timers in its event loop, seconds."""

TIMER_S = 0.02
"""Interval of the timers whose delay is measured, seconds."""

Result = TypeVar("Result")


class HostBusyError(SlimqwenError):
    """The host was too busy for a valid measurement of times.

    Attributes:
        cause: how busy the host was in the last attempt, in a few words.
    """

    cause = ""


@dataclass(frozen=True)
class LoadLimits:
    """Largest load of a host at which measured times are valid.

    Attributes:
        other_share: share of CPU time that other processes take, 0 to 1.
        client_delay_ms: mean delay of a timer in the client's event loop, ms.
        server_delay_ms: mean delay of a timer in the server's event loop, ms.
    """

    other_share: float
    client_delay_ms: float
    server_delay_ms: float


LIMITS = LoadLimits(other_share=0.075, client_delay_ms=5.0, server_delay_ms=5.0)
"""Limits of every timed command."""


class HostLoad(BaseModel):
    """Load of the host during the timed sections of a round, or the highest load of all rounds of a measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seconds: float = Field(ge=0, description="Duration of the timed sections of all rounds.")
    other_share: float = Field(
        ge=0,
        description="Share of CPU time that other processes took or a hypervisor withheld, over the CPUs that this "
        "process may use.",
    )
    client_delay_ms: float | None = Field(
        ge=0,
        description="Mean delay of a timer in the client's event loop; null for a client without event loop.",
    )
    server_delay_ms: float | None = Field(
        ge=0, description="Mean delay of a timer in the server's event loop; null if the server reports none."
    )
    repeated: int = Field(default=0, ge=0, description="Rounds measured again because the host was too busy.")
    busy: bool = Field(default=False, description="The host was too busy, and --even-if-busy was given.")

    def excess(self) -> list[str]:
        """The figures that exceed their limit in `LIMITS`, each as a phrase of an error message."""
        reasons = []
        if self.other_share > LIMITS.other_share:
            reasons.append(
                f"other processes used {100 * self.other_share:.1f} % CPU (limit {100 * LIMITS.other_share:.1f} %)"
            )
        for side in ("client", "server"):
            delay, limit = getattr(self, f"{side}_delay_ms"), getattr(LIMITS, f"{side}_delay_ms")
            if delay is not None and delay > limit:
                reasons.append(f"the {side}'s event loop was {delay:.1f} ms late (limit {limit:g} ms)")
        return reasons


def highest_load(rounds: Sequence[HostLoad]) -> HostLoad:
    """The load of a run of several rounds: the highest share and delays, the sums of seconds and of repeated rounds."""

    def highest(name: str) -> float | None:
        return max((value for load in rounds if (value := getattr(load, name)) is not None), default=None)

    return HostLoad(
        seconds=sum(load.seconds for load in rounds),
        other_share=max(load.other_share for load in rounds),
        client_delay_ms=highest("client_delay_ms"),
        server_delay_ms=highest("server_delay_ms"),
        repeated=sum(load.repeated for load in rounds),
        busy=any(load.busy for load in rounds),
    )


def retry_until_idle(
    measure_round: Callable[["Watch"], Result], name: str, *, even_if_busy: bool = False
) -> tuple[Result, HostLoad]:
    """Wait for an idle host, measure a round, and repeat it once if the host was too busy; return result and load.

    A round takes minutes, so none begins while other work uses the host.

    Args:
        measure_round: measures the round, and times its work in sections of the `Watch` that it is given.
        name: name of the round in error messages.
        even_if_busy: whether to accept the first result even if the host is busy; `busy` then marks the load.

    Raises:
        HostBusyError: the host was too busy in both attempts, or did not become idle before one.
    """
    for attempt in range(_ATTEMPTS):
        if not even_if_busy:
            _wait_until_idle(name)
        watch = Watch()
        result = measure_round(watch)
        load = watch.load()
        excess = ", ".join(load.excess())
        if not excess or even_if_busy:
            return result, load.model_copy(update={"repeated": attempt, "busy": bool(excess)})
    raise _busy_error(f"{name}: host too busy in both attempts", load, excess)


def _wait_until_idle(name: str) -> None:
    deadline = time.monotonic() + _IDLE_WITHIN_S
    while True:
        watch = Watch()
        with watch.section():
            time.sleep(_LOOK_S)
        load = watch.load()
        if load.other_share <= LIMITS.other_share:
            return
        if time.monotonic() > deadline:
            raise _busy_error(f"{name}: host busy for {_IDLE_WITHIN_S:g} s", load, ", ".join(load.excess()))


def _busy_error(fault: str, load: HostLoad, excess: str) -> HostBusyError:
    error = HostBusyError(
        f"{fault}: {excess}; end other work on this machine and run again "
        "(--even-if-busy writes a record that no comparison uses)"
    )
    error.cause = excess
    if load.other_share > LIMITS.other_share:  # other processes are also why event loops were late
        error.cause = f"other processes used {100 * load.other_share:.0f} % of the CPU"
    return error


async def timer_delays() -> AsyncIterator[float]:
    """Yield the delays of timers in the running event loop, seconds, without end."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TIMER_S
        await asyncio.sleep(TIMER_S)
        yield max(0.0, loop.time() - due)


class Watch:
    """Meter of the host's load during the timed sections of one round.

    `retry_until_idle` makes one for each attempt. The round wraps its timed work in `section`.
    """

    def __init__(self) -> None:
        self._seconds = self._cpu_s = self._others_s = 0.0
        self._client, self._server = _Delays(), _Delays()

    @contextlib.contextmanager
    def section(
        self, pid: int | None = None, counters: Callable[[], Mapping[str, float]] | None = None
    ) -> Iterator[None]:
        """Add a timed section, which lasts as long as the `with` block.

        Args:
            pid: process of a server that another process started; its process tree counts as the measurement's own.
            counters: reads the server's metrics by name, empty if the server is gone; None without a server.
        """
        delays_before, before = _server_delays(counters), _Clocks.now(pid)
        yield
        after = _Clocks.now(pid)
        seconds = after.wall_s - before.wall_s
        self._seconds += seconds
        self._cpu_s += seconds * after.cpus
        # Over a short section, clock ticks can make the difference negative.
        self._others_s += max(0.0, after.machine_s - before.machine_s - (after.own_s - before.own_s))
        delays_after = _server_delays(counters)
        if delays_after.count > delays_before.count:  # not for a server that was lost
            self._server.add(
                delays_after.total_s - delays_before.total_s, delays_after.count - delays_before.count
            )

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[None]:
        """Measure how late the running event loop is, for the length of an `async with` block."""

        async def observe() -> None:
            async for delay in timer_delays():
                self._client.add(delay, 1)

        task = asyncio.create_task(observe())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def load(self) -> HostLoad:
        """The load over all sections so far."""
        return HostLoad(
            seconds=self._seconds,
            other_share=self._others_s / self._cpu_s if self._cpu_s else 0.0,
            client_delay_ms=self._client.mean_ms,
            server_delay_ms=self._server.mean_ms,
        )


@dataclass
class _Delays:
    """Delays of timers: their sum in seconds, and their number."""

    total_s: float = 0.0
    count: float = 0.0

    @property
    def mean_ms(self) -> float | None:
        return 1e3 * self.total_s / self.count if self.count else None

    def add(self, seconds: float, count: float) -> None:
        self.total_s += seconds
        self.count += count


def _server_delays(counters: Callable[[], Mapping[str, float]] | None) -> _Delays:
    """Delays of a server's timers since the server started; zeros if the server reports none."""
    values = counters() if counters is not None else {}
    return _Delays(*(values.get(f"{SERVER_DELAYS}_{name}", 0.0) for name in ("sum", "count")))


@dataclass(frozen=True)
class _Clocks:
    """Clocks at one moment, seconds.

    Attributes:
        cpus: number of CPUs that this process may use.
        machine_s: CPU time that these CPUs spent on any process or lost to other machines.
        own_s: CPU time of the measurement's own processes, ended children included.
    """

    wall_s: float
    cpus: int
    machine_s: float
    own_s: float

    @classmethod
    def now(cls, pid: int | None) -> "_Clocks":
        cpus = psutil.cpu_times(percpu=True)
        # A job may have a few of the machine's CPUs to itself while others use the rest.
        allowed = os.sched_getaffinity(0)
        cpus = [times for cpu, times in enumerate(cpus) if cpu in allowed] or cpus
        # `guest` is part of `user` already.
        machine_s = sum(sum(each) - each.guest - each.guest_nice - each.idle - each.iowait for each in cpus)
        own_s = 0.0
        for process in _process_tree(pid):
            with contextlib.suppress(psutil.Error):
                own_s += sum(process.cpu_times()[:4])
        return cls(time.perf_counter(), len(cpus), machine_s, own_s)


def _process_tree(pid: int | None) -> set[psutil.Process]:
    """This process, the server's process `pid`, and all processes below the two."""
    members: set[psutil.Process] = set()
    for root in {os.getpid(), pid or os.getpid()}:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(root)
            members |= {process, *process.children(recursive=True)}
    return members
