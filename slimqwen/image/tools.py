"""docker, podman and buildah: which of them works on this host, and access to files and programs of an image."""

import contextlib
import ctypes
import fcntl
import json
import os
import shlex
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from slimqwen.image import ImageError

Tool = Literal["docker", "podman", "buildah"]
TOOLS: tuple[Tool, ...] = ("docker", "podman", "buildah")

_ISOLATION = "BUILDAH_ISOLATION"

_CLONE_NEWNET, _SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x40000000, 0x8914, 0x41


def find_tool(requested: str | None = None) -> Tool:
    """The requested container tool, else the first of docker, podman and buildah that works on this host.

    Raises:
        ImageError: the requested tool is not installed, no tool is, or no installed tool works.
    """
    installed = [tool for tool in TOOLS if requested in (None, tool) and shutil.which(tool)]
    for tool in installed:
        # docker may be installed without a running daemon.
        if requested or subprocess.run([tool, "info"], capture_output=True).returncode == 0:
            return tool
    if installed:
        commands = " and ".join(f"`{tool} info`" for tool in installed)
        raise ImageError(f"no container tool works on this host: {commands} failed; run it to see why")
    missing = requested or "neither docker, podman nor buildah"
    raise ImageError(
        f"{missing} is {'not ' if requested else ''}installed; `apt-get install buildah`, or name an installed tool "
        "with --container-tool docker|podman|buildah"
    )


def isolate_by_chroot(base: str) -> None:
    """Make buildah run steps by chroot if the host's container runtime fails on an image and the user is root.

    The runtimes runc and crun fail on a host that has control groups of both versions.

    Args:
        base: image that buildah has or can pull.
    """
    if _ISOLATION in os.environ or os.geteuid() != 0:
        return
    with _buildah_container(base) as name:
        if subprocess.run(["buildah", "run", name, "--", "true"], capture_output=True).returncode != 0:
            os.environ[_ISOLATION] = "chroot"


@dataclass(frozen=True)
class Image:
    """An image, opened as a container that gives access to its files and programs.

    Attributes:
        tool: tool that made the container.
        tag: name of the image.
        container: name of the container.
        settings: the image's configuration in Docker's form: User, Env, Entrypoint, Healthcheck.
    """

    tool: Tool
    tag: str
    container: str
    settings: Mapping[str, Any]

    @property
    def user(self) -> str:
        """User that the image's programs run as, without the group; empty for root."""
        return (self.settings.get("User") or "").partition(":")[0]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the image's programs."""
        return dict(variable.partition("=")[::2] for variable in self.settings.get("Env") or [])

    @property
    def entrypoint(self) -> list[str]:
        """Words of the command that the image runs, before the arguments that a user adds."""
        return list(self.settings.get("Entrypoint") or ())

    @contextlib.contextmanager
    def file_system(self) -> Iterator[IO[bytes]]:
        """The image's root filesystem as a tar stream, which can be read during a `with` block."""
        words = [self.tool, "export", self.container]
        if self.tool == "buildah":
            folder = run_tool(["buildah", "mount", self.container])
            options = ["--one-file-system", "--hard-dereference", "--numeric-owner"]
            words = ["tar", "-C", folder, *options, "-cf", "-", "."]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            yield process.stdout
            process.stdout.close()

    def run(self, words: Sequence[str], errors: IO[bytes] | None = None) -> str:
        """Run a program in the image as the image's user, without a network, and return its standard output.

        Args:
            words: command line of the program.
            errors: file that receives its standard error.

        Raises:
            ImageError: the program failed; the message quotes its last line.
        """
        if self.tool == "buildah":
            # `run_tool` gives the process a network without a way out; not every isolation of buildah makes one.
            command = ["buildah", "run", "--network=host", self.container, "--", *words]
            return run_tool(command, errors, preexec=_leave_network)
        program, *arguments = words
        options = ["--rm", "--network=none", f"--entrypoint={program}"]
        return run_tool([self.tool, "run", *options, self.tag, *arguments], errors)


@contextlib.contextmanager
def open_image(tool: Tool, tag: str) -> Iterator[Image]:
    """Make a container of an image, yield both as an `Image`, and delete the container at the end of the `with` block.

    Raises:
        ImageError: there is no such image.
    """
    if tool == "buildah":
        settings = json.loads(run_tool(["buildah", "inspect", "--type", "image", tag]))["Docker"]["config"]
        isolate_by_chroot(tag)
        container = _buildah_container(tag)
    else:
        inspected = json.loads(run_tool([tool, "image", "inspect", tag]))[0]
        # podman has the health check beside Config, not in it.
        health = inspected.get("Healthcheck") or inspected["Config"].get("Healthcheck")
        settings = {**inspected["Config"], "Healthcheck": health}
        container = _container(tool, [tool, "create", tag])
    with container as name:
        yield Image(tool, tag, name, settings)


def run_tool(
    words: Sequence[str], errors: IO[bytes] | None = None, preexec: Callable[[], None] | None = None
) -> str:
    """Run a command of a container tool, and return its standard output.

    Args:
        errors: file that receives its standard error; None quotes it in the error message.
        preexec: function that is called in the child process before the command begins.

    Raises:
        ImageError: the command failed.
    """
    try:
        process = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=errors or subprocess.PIPE, preexec_fn=preexec
        )
    except subprocess.SubprocessError as error:
        raise ImageError("only root can give the container a network of its own; run this as root") from error
    if process.returncode != 0:
        lines = [line.strip() for line in (process.stderr or b"").decode(errors="replace").splitlines()]
        named = [line for line in lines if "error" in line.lower()]
        cause = next(filter(None, (*named, *lines)), f"exit code {process.returncode}")
        raise ImageError(
            f"{' '.join(words[:3])}: {cause}; run `{shlex.join(words)}` to see all that it prints"
        )
    return process.stdout.decode(errors="replace").strip()


@contextlib.contextmanager
def _container(tool: Tool, make: Sequence[str]) -> Iterator[str]:
    name = run_tool(make)
    try:
        yield name
    finally:
        subprocess.run([tool, "rm", name], capture_output=True)


def _buildah_container(image: str) -> contextlib.AbstractContextManager[str]:
    return _container("buildah", ["buildah", "from", image])


def _leave_network() -> None:
    """Move this process to a new network namespace that has only a loopback."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0:
        raise PermissionError
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING))
