"""Shares of the machine that others take, late event loops, repeated rounds; every reading is injected."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from slimqwen import host_load
from slimqwen.host_load import SERVER_DELAYS, HostBusyError, HostLoad, LoadLimits, Watch

LIMITS = LoadLimits(other_share=0.1, client_delay_ms=5.0, server_delay_ms=5.0)


def quiet(**changed: float | bool | None) -> HostLoad:
    figures = {"other_share": 0.02, "client_delay_ms": 0.5, "server_delay_ms": 1.0}
    return HostLoad(seconds=10.0, **figures | changed)


def clocks(monkeypatch: pytest.MonkeyPatch, *readings: tuple[float, int, float, float]) -> None:
    """Inject wall seconds, CPUs, and (machine, own) seconds of the next readings."""
    following = iter(readings)
    monkeypatch.setattr(host_load._Clocks, "now", lambda pid: host_load._Clocks(*next(following)))


def test_what_the_measurement_takes_itself_is_no_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks(monkeypatch, (0, 2, 100, 40), (10, 2, 115, 52), (20, 2, 200, 60), (30, 2, 215, 65))
    watch = Watch()
    for _ in range(2):
        with watch.section():
            pass
    load = watch.load()
    assert load.seconds == 20
    assert load.other_share == pytest.approx((15 - 12 + 15 - 5) / (2 * 20))
    assert load.client_delay_ms is load.server_delay_ms is None


def test_ticks_of_a_short_section_are_no_negative_load(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks(monkeypatch, (0, 2, 1.0, 1.0), (0.01, 2, 1.0, 1.01))
    watch = Watch()
    assert watch.load() == HostLoad(seconds=0, other_share=0, client_delay_ms=None, server_delay_ms=None)
    with watch.section():
        pass
    assert (watch.load().seconds, watch.load().other_share) == (0.01, 0.0)


def test_a_server_says_how_late_its_event_loop_was_meanwhile() -> None:
    readings = iter([(2.0, 100.0), (2.3, 200.0)])

    def counters() -> dict[str, float]:
        total, count = next(readings)
        return {f"{SERVER_DELAYS}_sum": total, f"{SERVER_DELAYS}_count": count}

    watch = Watch()
    with watch.section(counters=counters):
        pass
    assert watch.load().server_delay_ms == pytest.approx(3.0)


@pytest.mark.parametrize("after", [{}, {"vllm:num_requests_running": 1.0}])
def test_a_server_that_is_lost_or_counts_nothing_has_no_delay(after: dict[str, float]) -> None:
    readings: Iterator[dict[str, float]] = iter(
        [{f"{SERVER_DELAYS}_sum": 1.0, f"{SERVER_DELAYS}_count": 9.0}, after]
    )
    watch = Watch()
    with watch.section(counters=lambda: next(readings)):
        pass
    assert watch.load().server_delay_ms is None


def test_a_blocked_event_loop_of_the_client_is_late() -> None:
    watch = Watch()

    async def block() -> None:
        async with watch.client():
            await asyncio.sleep(0)
            time.sleep(0.2)
            await asyncio.sleep(0.01)

    asyncio.run(block())
    assert watch.load().client_delay_ms > 50


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"other_share": 0.715}, r"other processes used 71\.5 % CPU \(limit 10\.0 %\)"),
        ({"client_delay_ms": 6.0}, r"the client's event loop was 6\.0 ms late \(limit 5 ms\)"),
        ({"server_delay_ms": 7.5}, r"the server's event loop was 7\.5 ms late \(limit 5 ms\)"),
    ],
)
@pytest.mark.usefixtures("limits")
def test_each_figure_has_its_limit(changed: dict[str, float], reason: str) -> None:
    load = quiet(**changed)
    with pytest.raises(
        HostBusyError, match=f"^round 3: host too busy in both attempts: {reason}; end other work"
    ):
        host_load.retry_until_idle(attempts(load, load), "round 3")


def attempts(*loads: HostLoad) -> Callable[[Watch], int]:
    """A measurement whose attempts find these loads; returns the number of the attempt."""
    following = iter(enumerate(loads))

    def measure(watch: Watch) -> int:
        number, load = next(following)
        watch.load = lambda: load  # type: ignore[method-assign]
        return number

    return measure


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of these tests, on a host that is idle before each round."""
    monkeypatch.setattr(host_load, "LIMITS", LIMITS)
    monkeypatch.setattr(host_load, "_LOOK_S", 0.0)
    others_take(monkeypatch, 0.0)


def others_take(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Other processes take these shares of two CPUs in looks of a second at the host; the last for ever."""
    following = itertools.chain(shares, itertools.repeat(shares[-1]))
    readings = itertools.accumulate((2 * share for share in following), initial=0.0)
    pairs = itertools.pairwise(readings)
    looks = itertools.chain.from_iterable(
        ((n, 2, a, 0.0), (n + 1, 2, b, 0.0)) for n, (a, b) in enumerate(pairs)
    )
    monkeypatch.setattr(host_load._Clocks, "now", lambda pid: host_load._Clocks(*next(looks)))


@pytest.mark.usefixtures("limits")
def test_a_round_begins_when_the_host_has_become_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    others_take(monkeypatch, 0.9, 0.11, 0.09, 0.9)
    number, load = host_load.retry_until_idle(attempts(quiet()), "a round")
    assert (number, load.repeated) == (0, 0)
    assert host_load._Clocks.now(None).wall_s == 3  # three looks, and no more


@pytest.mark.usefixtures("limits")
def test_a_host_that_stays_busy_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    others_take(monkeypatch, 0.8)
    monkeypatch.setattr(host_load, "_IDLE_WITHIN_S", 0.0)
    with pytest.raises(
        HostBusyError, match=r"^round 1: host busy for 0 s: other processes used 80\.0 % CPU"
    ) as raised:
        host_load.retry_until_idle(attempts(), "round 1")
    assert raised.value.cause == "other processes used 80 % of the CPU"
    assert host_load.retry_until_idle(attempts(quiet()), "round 1", even_if_busy=True)[0] == 0


@pytest.mark.usefixtures("limits")
def test_a_busy_round_is_repeated_once() -> None:
    busy = quiet(other_share=0.5)
    number, load = host_load.retry_until_idle(attempts(busy, quiet()), "a round")
    assert (number, load.repeated, load.busy, load.other_share) == (1, 1, False, 0.02)


@pytest.mark.usefixtures("limits")
def test_a_busy_round_that_is_taken_all_the_same_is_marked() -> None:
    number, load = host_load.retry_until_idle(attempts(quiet(other_share=0.5)), "a round", even_if_busy=True)
    assert (number, load.busy) == (0, True)
    assert not host_load.retry_until_idle(attempts(quiet()), "a round", even_if_busy=True)[1].busy


def test_a_run_has_the_highest_figures_of_its_rounds() -> None:
    loads = [quiet(repeated=1), quiet(other_share=0.05, client_delay_ms=2.0, busy=True)]
    assert host_load.highest_load(loads) == HostLoad(
        seconds=20.0,
        other_share=0.05,
        client_delay_ms=2.0,
        server_delay_ms=1.0,
        repeated=1,
        busy=True,
    )


def test_cpus_that_this_process_may_not_use_are_another_job_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = type(psutil.cpu_times())

    def times(user: float, idle: float) -> tuple[float, ...]:
        return kind(user, 0, 0, idle, 0, 0, 0, 0, 0, 0)

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 3})
    monkeypatch.setattr(
        psutil, "cpu_times", lambda percpu: [times(9, 1), times(2, 8), times(7, 3), times(1, 9)]
    )
    clock = host_load._Clocks.now(None)
    assert (clock.cpus, clock.machine_s) == (2, 3)
