"""`slimqwen watch`: running commands and vLLM servers of this repository."""

import contextlib
import itertools
import math
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slimqwen import variant
from slimqwen.cli.console import console
from slimqwen.cli.watch import activity
from slimqwen.vllm_plugin import api_server

_INTERVAL_S, _TIMEOUT_S, _WINDOW_S = 2.0, 1.0, 60.0

Scrapes = list[tuple[float, Mapping[str, float]]]
"""Metrics of one server by time (monotonic seconds), the latest last."""


def watch(
    once: Annotated[
        bool, typer.Option("--once", help="show it once, as when the output is not a terminal")
    ] = False,
) -> None:
    """Show running commands with their progress, servers with tokens/s, queue and acceptance (Ctrl-C ends it)."""
    root, history = variant.repository_root(), dict[int, Scrapes]()
    if once or not sys.stdout.isatty() or console.is_dumb_terminal:
        draw(root, history)
        time.sleep(1 if history else 0)  # a rate needs two scrapes
        console.print(draw(root, history))
        return
    # SystemExit ends the block below, which restores the terminal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(
                Group(Text(f"{time.strftime('%H:%M:%S')}, Ctrl-C ends\n"), draw(root, history)), refresh=True
            )
            time.sleep(_INTERVAL_S)


def draw(root: Path, history: dict[int, Scrapes]) -> RenderableType:
    """The commands and servers that run in a repository, for display.

    Args:
        history: scrapes of each server by process id, continued in place.
    """
    blocks: list[RenderableType] = [_work(work) for work in activity.running(root)]
    servers = find_servers(root)
    for ended_pid in history.keys() - {process.pid for process, _ in servers}:
        del history[ended_pid]
    blocks += [_server(process, words, history.setdefault(process.pid, [])) for process, words in servers]
    if not blocks:
        return Text("Nothing runs here. To start something: slimqwen serve --variant tiny")
    return Group(*itertools.chain.from_iterable((block, Text()) for block in blocks))


def find_servers(root: Path) -> list[tuple[psutil.Process, Mapping[str, str]]]:
    """The vLLM servers that were started from a repository, with the options of their command lines."""
    servers = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words[1:3] == ["-m", api_server.__name__] and Path(process.cwd()) == root.resolve():
                servers[process.pid] = process, process.ppid(), dict(itertools.pairwise(words))
    # A process that a server has just forked still has the server's command line.
    return [(process, words) for process, parent, words in servers.values() if parent not in servers]


def figures(scrapes: Scrapes) -> dict[str, str]:
    """Figures of a server, for display: rates since the previous scrape, medians and shares over the last minute.

    Args:
        scrapes: at least one.
    """
    (now, values), (before, earlier), (_, oldest) = scrapes[-1], scrapes[max(0, len(scrapes) - 2)], scrapes[0]

    def rate(name: str) -> float:
        return (values.get(name, 0) - earlier.get(name, 0)) / (now - before) if now > before else math.nan

    def share(part: str, whole: str) -> float:
        for start in (oldest, {}):
            if growth := values.get(whole, 0) - start.get(whole, 0):
                return (values.get(part, 0) - start.get(part, 0)) / growth
        return math.nan

    def median_ms(name: str) -> float:
        for start in (oldest, {}):
            bucket_counts = sorted(
                (float(key.rpartition("/")[2]), count - start.get(key, 0))
                for key, count in values.items()
                if key.startswith(f"{name}_bucket/")
            )
            if bucket_counts and (half := bucket_counts[-1][1] / 2):
                lower = below = 0.0
                for bound, count in bucket_counts:
                    if count >= half:
                        return 1e3 * min(bound, lower + (bound - lower) * (half - below) / (count - below))
                    lower, below = bound, count
        return math.nan

    count = "vllm:spec_decode_num_{}_total".format
    texts = {
        "prompt tokens/s": f"{rate('vllm:prompt_tokens_total'):,.0f}",
        "generated tokens/s": f"{rate('vllm:generation_tokens_total'):,.0f}",
        "requests running": f"{values.get('vllm:num_requests_running', math.nan):.0f}",
        "requests waiting": f"{values.get('vllm:num_requests_waiting', math.nan):.0f}",
        "KV cache in use": f"{values.get('vllm:kv_cache_usage_perc', math.nan):.1%}",
        "acceptance length": f"{1 + share(count('accepted_tokens'), count('drafts')):.2f}",
        "acceptance rate": f"{share(count('accepted_tokens'), count('draft_tokens')):.1%}",
        "median TTFT, ms": f"{median_ms('vllm:time_to_first_token_seconds'):,.1f}",
        "median ITL, ms": f"{median_ms('vllm:inter_token_latency_seconds'):,.1f}",
        "prefix cache hits": f"{share('vllm:prefix_cache_hits_total', 'vllm:prefix_cache_queries_total'):.1%}",
        "preemptions": f"{values.get('vllm:num_preemptions_total', math.nan):.0f}",
    }
    return {label: "-" if "nan" in text else text for label, text in texts.items()}


def _work(work: activity.Work) -> RenderableType:
    now, rows = time.time(), Table.grid(padding=(0, 2))
    for name, each in work.activities.items():
        if each.done >= each.total and name != list(work.activities)[-1]:
            continue  # finished, or interrupted without a known end
        seconds_left = each.seconds_left(now)
        state = f"{each.done:,.0f} of {each.total:,.0f}" if each.total else f"for {_clock(now - each.began)}"
        rows.add_row(Text(f"  {name}"), state, "" if seconds_left is None else f"{_clock(seconds_left)} left")
    words = " ".join(work.command)
    return Group(Text(f"{words}, pid {work.pid}, {_clock(now - work.process_started)}", "bold"), rows)


def _server(process: psutil.Process, words: Mapping[str, str], scrapes: Scrapes) -> RenderableType:
    from slimqwen.serving import metrics
    from slimqwen.vllm_plugin.api_key import authorization

    port = words.get("--port", "8000")
    title = f"server of {words.get('--model', 'an unknown checkpoint')}, port {port}, pid {process.pid}"
    try:
        # Without trust_env, httpx ignores the shell's proxy.
        with httpx.Client(trust_env=False, timeout=_TIMEOUT_S, headers=authorization()) as client:
            url = f"http://{words.get('--host', '127.0.0.1')}:{int(port)}"
            values = metrics.read(client.get(f"{url}/metrics").raise_for_status().text)
    except (httpx.HTTPError, ValueError) as error:
        state = "starting" if isinstance(error, httpx.ConnectError) and not scrapes else "no answer"
        return Text(f"{title}: {state}", "bold yellow")
    now = time.monotonic()
    scrapes[:] = [scrape for scrape in scrapes if scrape[0] >= now - _WINDOW_S] + [(now, values)]
    rows = Table.grid(padding=(0, 2))
    for label, text in figures(scrapes).items():
        rows.add_row(f"  {label}", text)
    return Group(Text(title, "bold green"), rows)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
