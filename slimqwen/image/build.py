"""Image build with docker, podman or buildah: base image, wheels, and the build itself."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from slimqwen.checkpoint.files import sha256
from slimqwen.image import ImageError, context
from slimqwen.image.context import Content, Description
from slimqwen.progress import Progress, silent
from slimqwen.serving.platform import Platform
from slimqwen.variant import repository_root

Tool = Literal["docker", "podman", "buildah"]
TOOLS: tuple[Tool, ...] = ("docker", "podman", "buildah")

BOOTSTRAP = "debootstrap"
"""Value of BASE_IMAGE for a base made on this machine from Debian's archive, where there is no image registry."""

_BOOTSTRAPPED = "localhost/slimqwen-base:bookworm"
_DEBIAN = "bookworm"
_PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_STAMP = "complete.sha256"
_STEP_DETAILS = re.compile(r" for step \{.*\}(?=: )")
_STEP = re.compile(r"^(?:\[\d+/\d+\] )?STEP (\d+)/(\d+)|^#\d+ \[.*?(\d+)/(\d+)\]")


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
        raise ImageError(f"no container tool works here: {commands} failed; run it to see why")
    missing = requested or "neither docker, podman nor buildah"
    raise ImageError(
        f"{missing} is {'not ' if requested else ''}installed; Debian: apt-get install buildah, or name another: "
        "CONTAINER_TOOL=docker|podman|buildah"
    )


def tag_of(variant: str, platform: Platform) -> str:
    """Default tag of a variant's image."""
    return f"localhost/slimqwen:{variant}-{platform}"


def check_base(base: str | None) -> str:
    """Refuse a base image that is not pinned.

    Raises:
        ImageError: none is given, or a registry's without its digest.
    """
    if base and (
        base == BOOTSTRAP or base.startswith("localhost/") or re.search(r"@sha256:[0-9a-f]{64}$", base)
    ):
        return base
    reason = f"BASE_IMAGE={base} names no digest" if base else "no BASE_IMAGE"
    raise ImageError(
        f"{reason}; write BASE_IMAGE=docker.io/library/debian:bookworm-slim@sha256:<64 digits> (`docker buildx "
        f"imagetools inspect` prints them), or BASE_IMAGE={BOOTSTRAP} to make one from Debian's archive"
    )


def base_image(tool: Tool, base: str, log: Path, progress: Progress = silent) -> str:
    """Name of the base image; makes a bootstrapped one where it does not exist yet.

    Raises:
        ImageError: debootstrap is missing or failed, or this is not root.
    """
    if base != BOOTSTRAP:
        return base
    inspect = ("inspect", "--type", "image") if tool == "buildah" else ("image", "inspect")
    if subprocess.run([tool, *inspect, _BOOTSTRAPPED], capture_output=True).returncode == 0:
        return _BOOTSTRAPPED
    if not shutil.which(BOOTSTRAP) or os.geteuid() != 0:
        raise ImageError(
            f"BASE_IMAGE={BOOTSTRAP} needs debootstrap and root; Debian: apt-get install debootstrap, or name a base "
            "by its digest"
        )
    with tempfile.TemporaryDirectory(prefix="slimqwen-base.") as scratch:
        rootfs, archive = Path(scratch) / "rootfs", Path(scratch) / "rootfs.tar"
        _run([BOOTSTRAP, "--variant=minbase", _DEBIAN, str(rootfs)], log, "base", progress)
        # Downloaded packages, and files that differ between machines.
        leftovers = (
            "./var/cache/apt/archives/*.deb",
            "./var/lib/apt/lists/*",
            "./var/log/*",
            "./etc/hostname",
            "./dev/*",
        )
        exclusions = [f"--exclude={pattern}" for pattern in leftovers]
        _run(["tar", "-C", str(rootfs), *exclusions, "-cf", str(archive), "."], log, "base", progress)
        shutil.rmtree(rootfs)
        name = f"slimqwen-base-{os.getpid()}"
        try:
            for command in import_commands(tool, archive, name):
                _run(command, log, "base", progress)
        finally:
            if tool == "buildah":
                # A failed commit leaves the container behind.
                subprocess.run(["buildah", "rm", name], capture_output=True)
    return _BOOTSTRAPPED


def import_commands(tool: Tool, archive: Path, name: str) -> list[list[str]]:
    """Commands that make an image of a root filesystem's tar archive; buildah needs a container with that name."""
    if tool != "buildah":
        return [[tool, "import", str(archive), _BOOTSTRAPPED]]
    return [
        ["buildah", "from", "--name", name, "scratch"],
        ["buildah", "add", "--quiet", name, str(archive), "/"],
        ["buildah", "commit", "--quiet", "--rm", name, _BOOTSTRAPPED],
    ]


def fill_wheelhouse(folder: Path, platform: Platform, log: Path, progress: Progress = silent) -> None:
    """Fill a folder with a wheel of every pin of a platform's lock; a complete folder is left alone.

    The wheels fit this machine's Python, so the image's Python must have the same minor version.

    Raises:
        ImageError: pip found no wheel, or could build none; quotes its error.
    """
    lock = repository_root() / "requirements" / f"{platform}.txt"
    stamp = folder / _STAMP
    inputs = f"{sha256(lock)} python{sys.version_info[0]}.{sys.version_info[1]}\n"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == inputs:
        return
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    options = ["--no-deps", "--progress-bar=off", f"--wheel-dir={folder}"]
    pip = [sys.executable, "-m", "pip", "wheel", *options]
    pins = [line for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line and line[0] != "#"]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    vision = next(pin for pin in pins if pin.startswith("torchvision=="))
    try:
        _run([*pip, torch], log, "wheels: torch", progress)
    except ImageError:
        if platform != "cpu":
            raise
        _run(
            [*pip, torch, f"{vision}+cpu", "--index-url", _PYTORCH_CPU_INDEX], log, "wheels: torch", progress
        )
    _run([*pip, "--find-links", str(folder), "--requirement", str(lock)], log, "wheels: packages", progress)
    stamp.write_text(inputs, encoding="utf-8")


def command(
    tool: Tool, description: Description, *, folder: Path, base: str, tag: str, wheelhouse: Path
) -> list[str]:
    """The command that builds an image from a laid-out context.

    Args:
        tool: container tool.
        description: description of the content.
        folder: the context.
        base: name of the base image.
        tag: name of the image.
        wheelhouse: folder of wheels; with an empty one the build asks a package index.
    """
    arguments = {
        "BASE_IMAGE": base,
        "PLATFORM": description.platform,
        "ROOT": description.root,
        "PYTHON_VERSION": description.python,
        "VARIANT": description.variant,
        "PORT": str(description.port),
        "COMMIT": description.commit,
        "DIRTY": str(description.dirty).lower(),
        "CHECKPOINT": description.checkpoint,
    }
    # Without Docker's own format podman and buildah drop HEALTHCHECK.
    tool_option = "--progress=plain" if tool == "docker" else "--format=docker"
    build_args = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    inputs = [f"--build-context=wheelhouse={wheelhouse}", f"--file={folder / 'Dockerfile'}", f"--tag={tag}"]
    return [tool, "build", tool_option, *build_args, *inputs, str(folder)]


def build(
    content: Content,
    *,
    tool: Tool,
    base: str | None,
    tag: str,
    log: Path,
    wheelhouse: Path | None = None,
    progress: Progress = silent,
) -> Description:
    """Build the image of a variant.

    Args:
        content: content of the image.
        tool: docker, podman or buildah.
        base: an image with its digest, a local one, or BOOTSTRAP.
        tag: name of the image.
        log: receives the output of the tools.
        wheelhouse: folder that receives the lock's wheels; the build then installs from it alone.
        progress: receives (activity, done, total), in steps.

    Raises:
        ImageError: the base is not pinned, or a step failed.
    """
    base = check_base(base)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    if wheelhouse is not None:
        fill_wheelhouse(wheelhouse, content.command.platform, log, progress)
    base_name = base_image(tool, base, log, progress)
    description = context.describe(content, progress)
    # Beside the weights, so that large files can be links.
    images_folder = content.command.variant.root / ".cache" / "images"
    images_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{description.variant}.", dir=images_folder) as scratch:
        folder, empty = Path(scratch) / "context", Path(scratch) / "no-wheels"
        folder.mkdir()
        empty.mkdir()
        context.lay_out(content, description, folder)
        words = command(
            tool,
            description,
            folder=folder,
            base=base_name,
            tag=tag,
            wheelhouse=(wheelhouse or empty).resolve(),
        )
        _run(words, log, "build", progress)
    return description


def _run(words: Sequence[str], log: Path, activity: str, progress: Progress) -> None:
    """Run a command with its output in the log, and report the steps that it prints."""
    progress(activity, 0, 0)
    output_lines: list[str] = []
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (
        log.open("a", encoding="utf-8") as output,
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        ) as process,
    ):
        assert process.stdout is not None
        output.write(f"$ {' '.join(words)}\n")
        for line in process.stdout:
            output.write(line)
            output.flush()
            step = _STEP.match(line)
            if step:
                done, total = (float(number) for number in step.groups() if number)
                progress(activity, done, total)
            if line.strip():
                output_lines.append(line.strip())
    if process.returncode != 0:
        raise ImageError(f"{activity}: {_cause(output_lines)}; log: {log}")


def _cause(output_lines: Sequence[str]) -> str:
    """The line that names the cause: the first error line, else the last line."""
    error_lines = [
        line for line in output_lines if re.match(r"(?:#\d+ [\d.]+ )?(?:error|Error|ERROR|E):? ", line)
    ]
    return _STEP_DETAILS.sub("", (error_lines or list(output_lines[-1:]) or ["it printed nothing"])[0])
