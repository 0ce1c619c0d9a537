"""Images and containers through docker, podman or buildah: settings, layers, file system, a server that runs in one."""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from slimqwen.image import ImageError, contract
from slimqwen.image.build import Tool
from slimqwen.image.record import Layer
from slimqwen.serving.server import free_port

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x41


@dataclass(frozen=True)
class ImageContainer:
    """An image with a container of its own, which gives its files and runs its entry point.

    Attributes:
        tool: container tool.
        tag: name of the image.
        name: name of the container.
        settings: settings of the image.
    """

    tool: Tool
    tag: str
    name: str
    settings: contract.Settings

    @contextlib.contextmanager
    def file_system(self) -> Iterator[IO[bytes]]:
        """The root filesystem as a tar stream."""
        words = [self.tool, "export", self.name]
        if self.tool == "buildah":
            folder = _output_of(["buildah", "mount", self.name])
            options = ["--one-file-system", "--hard-dereference", "--numeric-owner"]
            words = ["tar", "-C", folder, *options, "-cf", "-", "."]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            yield process.stdout
            process.stdout.close()
            process.wait()

    def command(self, *arguments: str, options: Sequence[str] = ()) -> list[str]:
        """The command that runs the image's entry point with these arguments."""
        if self.tool == "buildah":
            return ["buildah", "run", *options, self.name, "--", *self.settings.entrypoint, *arguments]
        return [self.tool, "run", "--rm", *options, self.tag, *arguments]

    def output(self, *arguments: str) -> str:
        """Output of the entry point with these arguments, without a network.

        Raises:
            ImageError: it failed; quotes its last line.
        """
        options = () if self.tool == "buildah" else ("--network=none",)
        with without_network() if self.tool == "buildah" else contextlib.nullcontext():
            return _output_of(self.command(*arguments, options=options))


@dataclass(frozen=True)
class ContainerServer:
    """A server in a container.

    Attributes:
        base_url: address of the server for this host.
        command: command that runs the container.
        process: process of that command.
        image: image of the server.
    """

    base_url: str
    command: tuple[str, ...]
    process: "subprocess.Popen[bytes]"
    image: ImageContainer

    def has_ended(self) -> bool:
        """Whether the container has ended."""
        return self.process.poll() is not None

    def uids(self) -> set[int]:
        """User ids of the server's processes, as this host sees them; empty where a daemon runs them."""
        return {uid for child in self._server() for uid in child.uids()}

    def terminate(self, timeout_s: float) -> tuple[float, int]:
        """Send SIGTERM to the server alone, as a container tool's stop does.

        Returns:
            Seconds until the container ended, and its exit code.

        Raises:
            ImageError: it did not end in time.
        """
        started = time.monotonic()
        if self.image.tool == "buildah":
            # buildah passes no signal on. Its first descendant that is the server is process 1 of the container.
            os.kill(self._server()[0].pid, signal.SIGTERM)
        else:
            _output_of([self.image.tool, "kill", "--signal=TERM", f"{self.image.name}-run"])
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ImageError(f"the container did not end within {timeout_s:.0f} s of SIGTERM") from None
        return time.monotonic() - started, code

    def _server(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "api_server" in " ".join(_command_line(child))]


@contextlib.contextmanager
def open_image(tool: Tool, tag: str) -> Iterator[ImageContainer]:
    """Make a container of an image for the length of a `with` block.

    Raises:
        ImageError: there is no such image.
    """
    settings = settings_of(tool, tag)
    make = ["buildah", "from", "--pull-never"] if tool == "buildah" else [tool, "create"]
    name = _output_of([*make, tag])
    try:
        yield ImageContainer(tool, tag, name, settings)
    finally:
        subprocess.run([tool, "rm", name], capture_output=True)


def settings_of(tool: Tool, tag: str) -> contract.Settings:
    """Settings of an image, from its configuration.

    Raises:
        ImageError: there is no such image.
    """
    if tool == "buildah":
        image = json.loads(_output_of(["buildah", "inspect", "--type", "image", tag]))["Docker"]
        return contract.as_settings(image["config"], image.get("history") or [])
    image = json.loads(_output_of([tool, "image", "inspect", tag]))[0]
    # podman keeps it beside Config.
    health = image.get("Healthcheck") or image["Config"].get("Healthcheck")
    return contract.as_settings({**image["Config"], "Healthcheck": health}, _history(tool, tag))


def layers(tool: Tool, tag: str) -> list[Layer]:
    """An image's layers from the base up.

    Raises:
        ImageError: there is no such image.
    """
    if tool == "buildah":
        return _stored_layers(tag)
    steps = ((int(step.get("Size") or step.get("size") or 0), _made_by(step)) for step in _history(tool, tag))
    return [Layer(bytes=size, made_by=made_by) for size, made_by in reversed(list(steps)) if size]


@contextlib.contextmanager
def run_server(image: ImageContainer, port: int, log: Path) -> Iterator[ContainerServer]:
    """Run an image's server for the length of a `with` block, reachable from this host only.

    With buildah its network is a loopback, which this thread shares meanwhile.

    Args:
        image: image of the server.
        port: port that the server listens on in the container.
        log: receives the server's output.
    """
    with contextlib.ExitStack() as stack:
        if image.tool == "buildah":
            stack.enter_context(without_network())
            command, host_port = image.command(), port
        else:
            host_port = free_port()
            options = (f"--name={image.name}-run", f"--publish=127.0.0.1:{host_port}:{port}")
            command = image.command(options=options)
        output = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        server = ContainerServer(f"http://127.0.0.1:{host_port}", tuple(command), process, image)
        try:
            yield server
        finally:
            _end(server)


@contextlib.contextmanager
def without_network() -> Iterator[None]:
    """Put this thread, and the processes that it starts, into a network that has only a loopback.

    Raises:
        ImageError: this process is not root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as host_network:
        if libc.unshare(_CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise ImageError(f"cannot make a network for the container alone ({reason}); run this as root")
        try:
            with socket.socket() as any_socket:
                request = struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING)
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)
            yield
        finally:
            libc.setns(host_network.fileno(), _CLONE_NEWNET)


def _stored_layers(tag: str) -> list[Layer]:
    """Layers of an image of buildah, which prints no sizes: the storage that it shares with podman lists them."""
    image = json.loads(_output_of(["buildah", "inspect", "--type", "image", tag]))["OCIv1"]
    store = json.loads(_output_of(["buildah", "info"]))["store"]
    listing = Path(store["GraphRoot"]) / f"{store['GraphDriverName']}-layers" / "layers.json"
    sizes = {
        layer.get("diff-digest"): layer.get("diff-size", 0) for layer in json.loads(listing.read_bytes())
    }
    steps = [_made_by(step) for step in image.get("history") or [] if not step.get("empty_layer")]
    diffs = image["rootfs"]["diff_ids"]
    names = [*steps, *[""] * (len(diffs) - len(steps))]
    return [Layer(bytes=sizes.get(diff, 0), made_by=name) for diff, name in zip(diffs, names, strict=False)]


def _history(tool: Tool, tag: str) -> list[dict[str, Any]]:
    if tool == "podman":
        steps: list[dict[str, Any]] = json.loads(
            _output_of(["podman", "history", "--no-trunc", "--format=json", tag])
        )
        return steps
    lines = _output_of([tool, "history", "--no-trunc", "--human=false", "--format={{json .}}", tag])
    return [json.loads(line) for line in lines.splitlines()]


def _made_by(step: Mapping[str, Any]) -> str:
    return str(step.get("CreatedBy") or step.get("created_by") or "")


def _end(server: ContainerServer) -> None:
    """End the container and all of its processes."""
    if server.image.tool != "buildah":
        subprocess.run([server.image.tool, "rm", "--force", f"{server.image.name}-run"], capture_output=True)
    with contextlib.suppress(psutil.Error):
        for child in reversed(psutil.Process(server.process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        server.process.kill()
    server.process.wait()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _output_of(words: Sequence[str]) -> str:
    process = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if process.returncode != 0:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        cause = (errors or lines or ["it printed nothing"])[0].strip()
        raise ImageError(f"{' '.join(words[:3])}: {cause}")
    return process.stdout.strip()
