"""The commands of each container tool, the base they may start from, and what is refused before anything is built."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.image import ImageError, build, tools

ROOT = variant.repository_root()
DIGEST = "sha256:" + "a" * 64


def arguments_of(words: list[str]) -> dict[str, str]:
    return dict(words[place + 1].split("=", 1) for place, word in enumerate(words) if word == "--build-arg")


@pytest.mark.parametrize("tool", tools.TOOLS)
def test_every_argument_of_the_dockerfile_is_given_and_no_other(tool, content, tmp_path):
    words = build.build_command(
        tool,
        content,
        folder=tmp_path,
        base=f"debian@{DIGEST}",
        tag="localhost/x:y",
        wheelhouse=tmp_path / "wheels",
    )
    declared = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    given = arguments_of(words)
    assert given.keys() == declared
    assert given["BASE_IMAGE"] == f"debian@{DIGEST}"
    assert (given["VARIANT"], given["PLATFORM"], given["PORT"]) == ("child", "cpu", "8099")
    assert given["CHECKPOINT"] == checkpoint.digest(content.command.variant.weights)
    assert words[:2] == [tool, "build"]
    assert f"--build-context=wheelhouse={tmp_path / 'wheels'}" in words
    assert words[-1] == str(tmp_path)
    # Else HEALTHCHECK is dropped.
    assert ("--format=docker" in words) == (tool != "docker")


def test_the_dockerfile_ends_without_root_and_asks_ping():
    final = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\S+)", final, re.MULTILINE) == ["10001:10001"]
    assert "/ping" in final[final.index("HEALTHCHECK") :]
    assert final.rindex("USER") > final.rindex("RUN")
    assert "scripts/serve.py" in final[final.index("ENTRYPOINT") :]


def test_a_base_needs_its_digest_or_to_be_of_this_machine():
    for base in (f"docker.io/library/debian:bookworm-slim@{DIGEST}", "localhost/base:1", "debootstrap"):
        assert build.check_base(base) == base
    for base in (None, "debian:bookworm", "debian@sha256:abc"):
        with pytest.raises(ImageError, match="write BASE_IMAGE="):
            build.check_base(base)


def test_the_first_tool_that_is_there_is_taken_and_a_missing_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match="neither docker, podman nor buildah is installed"):
        tools.find_tool()
    for name in ("podman", "buildah"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert tools.find_tool() == "podman"
    assert tools.find_tool("buildah") == "buildah"
    with pytest.raises(ImageError, match="docker is not installed"):
        tools.find_tool("docker")


def test_a_tool_that_does_not_work_is_passed_over_and_named_where_there_is_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    for name, code in (("docker", 1), ("buildah", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(tools.shutil, "which", lambda tool: (tmp_path / tool).is_file() or None)
    assert tools.find_tool() == "buildah"
    assert tools.find_tool("docker") == "docker", "asked for by name, its own error says what is wrong"
    (tmp_path / "buildah").unlink()
    with pytest.raises(ImageError, match="no container tool works here: `docker info` failed; run it"):
        tools.find_tool()
    (tmp_path / "podman").write_text("#!/bin/sh\nexit 125\n")
    (tmp_path / "podman").chmod(0o755)
    with pytest.raises(ImageError, match="works here: `docker info` and `podman info` failed; run it"):
        tools.find_tool()


def test_a_base_that_was_not_finished_leaves_no_container_in_the_way(tmp_path, monkeypatch):
    for name, script in (
        ("buildah", f'echo "$*" >> {tmp_path}/said; [ "$1" != inspect ] && [ "$1" != commit ]'),
        ("debootstrap", 'mkdir -p "$3"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(build.os, "geteuid", lambda: 0)
    with pytest.raises(ImageError, match="base: "):
        build.bootstrap_base("buildah", tmp_path / "log")
    made, *_, last = (tmp_path / "said").read_text().splitlines()[1:]
    assert last == f"rm {made.split()[2]}"


def test_a_whole_wheelhouse_is_left_alone_and_what_pip_says_is_told(tmp_path, monkeypatch):
    lock = hashlib.sha256((ROOT / "requirements" / "cpu.txt").read_bytes()).hexdigest()
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / "complete.sha256").write_text(f"{lock} {python}\n")
    build.fill_wheelhouse(tmp_path, "cpu", tmp_path / "log")
    assert not (tmp_path / "log").exists()
    (tmp_path / "complete.sha256").write_text("another lock\n")
    monkeypatch.setattr(build, "_PYTORCH_CPU_INDEX", "file:///nowhere")
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ImageError, match="wheels: torch: ERROR: Could not find"):
        build.fill_wheelhouse(tmp_path, "cpu", tmp_path / "log")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("error: the base has Python 3.12.1", "build: error: the base has Python 3.12.1; log:"),
        (
            "Error: committing container for step {Env:[A=b] Message:RUN x && {y: z}}: f: no space left on device",
            "build: Error: committing container: f: no space left on device; log:",
        ),
    ],
)
def test_a_step_that_fails_is_told_by_its_cause(line, cause, content, tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "buildah"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho 'STEP 2/9: RUN x'\necho '{line}'\necho bye\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    messages = []
    with pytest.raises(ImageError, match=cause):
        build.build_image(
            content,
            tool="buildah",
            base="localhost/base",
            tag="localhost/x",
            log=tmp_path / "log",
            progress=lambda *how_far: messages.append(how_far),
        )
    assert ("build", 2.0, 9.0) in messages
    assert list((content.command.variant.root / ".cache" / "images").iterdir()) == []
    assert "STEP 2/9" in (tmp_path / "log").read_text()


def test_hadolint_finds_nothing(tmp_path: Path):
    hadolint = Path(sys.executable).with_name("hadolint")
    (tmp_path / "Dockerfile").write_text("FROM debian:latest\nRUN cd /tmp\n")
    for folder, code in ((ROOT, 0), (tmp_path, 1)):
        done = subprocess.run([hadolint, folder / "Dockerfile"], capture_output=True, text=True)
        assert (done.returncode, done.stdout == "") == (code, code == 0)
