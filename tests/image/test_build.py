"""The commands of each container tool, the base they may start from, and what is refused before anything is built."""

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
        tag=build.tag_of("child", "cpu"),
        wheelhouse=tmp_path / "wheels",
    )
    declared = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    given = arguments_of(words)
    assert given.keys() == declared
    assert given["BASE_IMAGE"] == f"debian@{DIGEST}"
    assert (given["VARIANT"], given["PLATFORM"], given["PORT"]) == ("child", "cpu", "8099")
    assert given["CHECKPOINT"] == checkpoint.digest(content.command.variant.weights)
    assert words[:2] == [tool, "build"]
    assert "--tag=localhost/slimqwen:child-cpu" in words
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
        with pytest.raises(ImageError, match="give --base-image "):
            build.check_base(base)


def test_a_base_that_was_not_finished_leaves_no_container_in_the_way(fake_tool, tmp_path):
    said = fake_tool("buildah", '[ "$1" != inspect ] && [ "$1" != commit ]')
    fake_tool("debootstrap", 'mkdir -p "$3"')
    with pytest.raises(ImageError, match="base: "):
        build.bootstrap_base("buildah", tmp_path / "log")
    commands = [line.split() for line in said.read_text().splitlines()]
    (made,) = (words[2] for words in commands if words[:2] == ["from", "--name"])
    assert commands[-1] == ["rm", made]


def test_an_empty_wheelhouse_is_refused_with_the_command_that_fills_it(content, tmp_path):
    with pytest.raises(
        ImageError,
        match=r"fill it with `for lock in torch-cpu cpu; do .venv/bin/pip download .*/\$lock\.txt; done`, run with",
    ):
        build.build_image(
            content, tool="docker", base="localhost/x", tag="x", log=tmp_path / "log", wheelhouse=tmp_path
        )


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "error: the base has Python 3.12.1",
            "build: error: the base has Python 3.12.1; read more in its log:",
        ),
        (
            "Error: committing container for step {Env:[A=b] Message:RUN x && {y: z}}: f: no space left on device",
            "build: Error: committing container: f: no space left on device; read more in its log:",
        ),
    ],
)
def test_a_step_that_fails_is_told_by_its_cause(line, cause, content, fake_tool, tmp_path, monkeypatch):
    fake_tool("buildah", f"echo 'STEP 2/9: RUN x'\necho '{line}'\necho bye\nexit 3")
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
