"""Delays of timers in the API server's event loop, among its metrics: how long an answer waits for a busy host."""

from prometheus_client import Summary

from slimqwen import host_load

_DELAYS = Summary(host_load.SERVER_DELAYS, "Delay of a timer in the server's event loop, seconds.")


async def watch() -> None:
    """Count the delays, without end."""
    async for delay in host_load.timer_delays():
        _DELAYS.observe(delay)
