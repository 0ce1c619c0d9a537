"""A real server as an orchestrator sees it: a process of its own, its exit code, what it leaves."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

import httpx
import psutil

from slimqwen import variant
from slimqwen.serving import metrics
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port, prepare

RUNNING = 4
"""Requests that run at once."""

QUEUE = 16
"""Requests that the server takes at once, running or waiting."""

SERVED = os.environ.get("SLIMQWEN_TEST_VARIANT") or "tiny-mtp4"
"""The variant whose server is tried: SLIMQWEN_TEST_VARIANT=tiny-best names another. tiny-mtp4 serves as tiny-best
does, but for its compiled graphs and its weights, and needs no recipe."""

_CHANGED = {
    "REQUIRE_WARMUP": "1",
    "MAX_BODY_BYTES": "1000000",
    "VLLM_HOST": "127.0.0.1",
    "VLLM_MAX_MODEL_LEN": "2048",
    "VLLM_MAX_NUM_SEQS": str(RUNNING),
    "VLLM_MAX_NUM_QUEUED_REQS": str(QUEUE),
}
"""Beside what the variant says."""

PATIENCE_S = 300
"""For what happens at once on a machine that does nothing else."""


@dataclass(frozen=True)
class RealServer:
    """A server that has been ready.

    Attributes:
        url: without a trailing slash.
        log: what it prints.
    """

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def family(self) -> list[psutil.Process]:
        """Its process and all that it started: engine, worker, and what keeps count of shared memory."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def segments(self) -> set[Path]:
        """The shared memory that its processes have mapped."""
        result: set[Path] = set()
        for process in self.family():
            text = Path(f"/proc/{process.pid}/maps").read_text()
            result |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)", text)}
        return {file for file in result if file.exists()}

    def socket_folders(self) -> set[Path]:
        """The folders of the sockets between its processes."""
        sockets = [each.laddr for process in self.family() for each in process.net_connections("unix")]
        return {Path(path).parent for path in sockets if "/slimqwen." in str(path)}

    def metrics(self) -> dict[str, float]:
        """Gauges and counters by name."""
        text = httpx.get(self.url + "/metrics", timeout=PATIENCE_S, trust_env=False, verify=False).text
        return metrics.read_metrics(text)

    def wait_for(self, running: float, waiting: float) -> dict[str, float]:
        """The metrics, once so many requests run and wait."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            now = self.metrics()
            if (now["vllm:num_requests_running"], now["vllm:num_requests_waiting"]) == (running, waiting):
                return now
            assert time.monotonic() < deadline, now
            time.sleep(0.1)

    def connect(
        self, path: str, body: dict[str, object], receive_buffer_bytes: int | None = None
    ) -> socket.socket:
        """Send a request, read nothing."""
        place = urlsplit(self.url)
        client = socket.socket()
        if receive_buffer_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        client.settimeout(PATIENCE_S)
        client.connect((place.hostname, place.port))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return client


@contextlib.contextmanager
def started(root: Path) -> Iterator[RealServer]:
    """Start the server of `SERVED` as `make serve` does, wait until it is ready, and end it with all it started."""
    served = variant.load(SERVED)
    given = {
        key: variant.Setting(key, value, served.folder / "config.env", 0) for key, value in _CHANGED.items()
    }
    changed = dataclasses.replace(served, settings=MappingProxyType({**served.settings, **given}))
    command = ServerCommand.resolve(changed, port=free_port(), platform="cpu")
    prepare(command)
    log = root / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv,
            env=command.process_environment(),
            cwd=served.root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{command.port}"
        wait_until_ready(url, process, log)
        yield RealServer(url, process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until /health answers 200."""
    deadline = time.monotonic() + 900
    while not is_ready(url):
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.25)


def is_ready(url: str) -> bool:
    """Whether /health answers 200."""
    try:
        return httpx.get(url + "/health", timeout=10, trust_env=False, verify=False).status_code == 200
    except httpx.HTTPError:
        return False


def ended(processes: list[psutil.Process], timeout_s: float) -> bool:
    """Whether all end in time; a zombie that nobody collects has ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
            return True
        time.sleep(0.1)
    return False


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_rest(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    content = bytearray()
    while part := client.recv(1 << 16):
        content += part
    return bytes(content)


def read_until(client: socket.socket, word: bytes) -> bytes:
    """What the server sends until a word has come."""
    content = bytearray()
    while word not in content:
        part = client.recv(1 << 16)
        assert part, bytes(content)
        content += part
    return bytes(content)
