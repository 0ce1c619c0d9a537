"""Build of an image with docker, podman or buildah, and of its base image."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.host import Platform
from slimqwen.image import ImageError
from slimqwen.image.context import Content, lay_out
from slimqwen.image.tools import Tool, isolate_by_chroot
from slimqwen.progress import Progress, silent
from slimqwen.records.git import git_state
from slimqwen.workspace import installation_root

BOOTSTRAP = "debootstrap"
"""Value of BASE_IMAGE for a base image made on this machine from Debian's archive, without an image registry.

It stays for hosts that reach an archive of Debian alone; `make test-image` builds on it, for it may ask no registry.
"""

_BOOTSTRAPPED = "localhost/slimqwen-base:bookworm"
_LEFTOVERS = ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*", "var/log/*", "etc/hostname", "dev/*")
_STEP = re.compile(r"^(?:\[\d+/\d+\] )?STEP (\d+)/(\d+)|^#\d+ \[.*?(\d+)/(\d+)\]")
_ERROR = re.compile(r"(?:#\d+ [\d.]+ )?(?:error|Error|ERROR|E):? ")


def tag_of(variant: str, platform: Platform) -> str:
    """Default tag of a variant's image: localhost/slimqwen:<variant>-<platform>."""
    return f"localhost/slimqwen:{variant}-{platform}"


def check_base(base: str | None) -> str:
    """Check that a base image is pinned by its digest, is local, or is BOOTSTRAP; returns it.

    Raises:
        ImageError: it is none of these, or None.
    """
    if base and (
        base == BOOTSTRAP or base.startswith("localhost/") or re.search(r"@sha256:[0-9a-f]{64}$", base)
    ):
        return base
    reason = f"--base-image {base} names no digest" if base else "--base-image is missing"
    raise ImageError(
        f"{reason}; give --base-image docker.io/library/debian:bookworm-slim@sha256:<64 digits> (`docker buildx "
        f"imagetools inspect` prints the digits), or --base-image {BOOTSTRAP} to make a base from Debian's archive"
    )


def bootstrap_base(tool: Tool, log: Path, progress: Progress = silent) -> str:
    """Make a base image from Debian's archive, unless it exists, and return its name.

    Args:
        tool: container tool that stores the image.
        log: file to which the output of the tools is appended.
        progress: receives (activity, done, total).

    Raises:
        ImageError: debootstrap is missing or fails, or the user is not root.
    """
    inspect = ("inspect", "--type", "image") if tool == "buildah" else ("image", "inspect")
    if subprocess.run([tool, *inspect, _BOOTSTRAPPED], capture_output=True).returncode == 0:
        return _BOOTSTRAPPED
    if not shutil.which(BOOTSTRAP) or os.geteuid() != 0:
        raise ImageError(
            f"--base-image {BOOTSTRAP} needs debootstrap and root; run as root after `apt-get install debootstrap`, or "
            "name a base image by its digest"
        )
    with tempfile.TemporaryDirectory(prefix="slimqwen-base.") as scratch:
        rootfs, archive = f"{scratch}/rootfs", f"{scratch}/rootfs.tar"
        _run([BOOTSTRAP, "--variant=minbase", "bookworm", rootfs], log, "base", progress)
        exclusions = [f"--exclude=./{pattern}" for pattern in _LEFTOVERS]
        _run(["tar", "-C", rootfs, *exclusions, "-cf", archive, "."], log, "base", progress)
        shutil.rmtree(rootfs)
        if tool != "buildah":
            _run([tool, "import", archive, _BOOTSTRAPPED], log, "base", progress)
            return _BOOTSTRAPPED
        name = f"slimqwen-base-{os.getpid()}"
        try:
            _run(["buildah", "from", "--name", name, "scratch"], log, "base", progress)
            _run(["buildah", "add", "--quiet", name, archive, "/"], log, "base", progress)
            _run(["buildah", "commit", "--quiet", name, _BOOTSTRAPPED], log, "base", progress)
        finally:
            subprocess.run(["buildah", "rm", name], capture_output=True)
    return _BOOTSTRAPPED


def build_command(
    tool: Tool, content: Content, *, folder: Path, base: str, tag: str, wheelhouse: Path
) -> list[str]:
    """The command that builds an image from a build context.

    Args:
        tool: container tool.
        content: content of the image.
        folder: the build context, as `lay_out` writes it.
        base: image to build on.
        tag: name of the image.
        wheelhouse: folder of wheels, the only source of packages; if it is empty, a package index.
    """
    command, git = content.command, git_state(installation_root())
    arguments = {
        "BASE_IMAGE": base,
        "PLATFORM": command.platform,
        "ROOT": content.root,
        "PYTHON_VERSION": content.cache.machine["python"] if content.cache else "",
        "VARIANT": command.variant.name,
        "PORT": str(command.port),
        "COMMIT": git.commit or "",
        "DIRTY": str(bool(git.dirty)).lower(),
        "CHECKPOINT": checkpoint.digest(command.variant.weights),
    }
    # podman and buildah keep HEALTHCHECK only in Docker's own format.
    tool_option = "--progress=plain" if tool == "docker" else "--format=docker"
    build_args = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    inputs = [f"--build-context=wheelhouse={wheelhouse}", f"--file={folder / 'Dockerfile'}", f"--tag={tag}"]
    return [tool, "build", tool_option, *build_args, *inputs, str(folder)]


def build_image(
    content: Content,
    *,
    tool: Tool,
    base: str | None,
    tag: str,
    log: Path,
    wheelhouse: Path | None = None,
    progress: Progress = silent,
) -> None:
    """Build the image of a variant.

    Args:
        content: content of the image.
        tool: container tool.
        base: image with its digest, local image, or BOOTSTRAP.
        tag: name of the image.
        log: file that receives the output of the tools; it is emptied first.
        wheelhouse: folder of the lock's wheels, the only source of packages; None: a package index.
        progress: receives (activity, done, total) in build steps.

    Raises:
        ImageError: the base is not pinned, the wheelhouse is empty, or a step failed.
    """
    base = check_base(base)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    if wheelhouse is not None and not any(wheelhouse.glob("*.whl")):
        # Two calls of pip for a CPU: beside hashes it refuses torch, which has none. No wheels are built, for the lock
        # has the hash of the source.
        locks = {"cpu": "torch-cpu cpu", "cuda": "cuda"}[content.command.platform]
        pip = f".venv/bin/pip download --no-deps --dest {wheelhouse} --requirement requirements/$lock.txt"
        command = f"for lock in {locks}; do {pip}; done"
        raise ImageError(
            f"{wheelhouse} has no wheels; fill it with `{command}`, run with the image's minor version of Python"
        )
    if base == BOOTSTRAP:
        base = bootstrap_base(tool, log, progress)
    if tool == "buildah":
        isolate_by_chroot(base)
    # Beside the weights, so that large files can be links.
    images = content.command.variant.root / ".cache" / "images"
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{content.command.variant.name}.", dir=images) as scratch:
        folder, no_wheels = Path(scratch) / "context", Path(scratch) / "no-wheels"
        folder.mkdir()
        no_wheels.mkdir()
        lay_out(content, folder)
        wheels = (wheelhouse or no_wheels).resolve()
        words = build_command(tool, content, folder=folder, base=base, tag=tag, wheelhouse=wheels)
        _run(words, log, "build", progress)


def _run(words: Sequence[str], log: Path, activity: str, progress: Progress) -> None:
    """Run a command with its output in `log`, and report the build steps that it prints as progress."""
    progress(activity, 0, 0)
    lines: list[str] = []
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    output: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(words, env=environment, **output) as process,
    ):
        file.write(f"$ {' '.join(words)}\n")
        for line in process.stdout or ():
            file.write(line)
            if step := _STEP.match(line):
                done, total = (float(number) for number in step.groups() if number)
                progress(activity, done, total)
            lines += [line.strip()] if line.strip() else []
    if process.returncode != 0:
        errors = [line for line in lines if _ERROR.match(line)]
        cause = re.sub(r" for step \{.*\}(?=: )", "", (errors or lines[-1:] or ["no output"])[0])
        raise ImageError(f"{activity}: {cause}; read more in its log: {log}")
