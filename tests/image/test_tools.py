"""What each container tool is asked, and what happens where one cannot make containers."""

import os
from pathlib import Path

import pytest

from slimqwen.image import ImageError, tools


def test_the_first_tool_that_works_is_taken_and_what_is_wrong_with_the_others_is_named(
    fake_tool, monkeypatch
):
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[0])
    with pytest.raises(ImageError, match="neither docker, podman nor buildah is installed"):
        tools.find_tool()
    fake_tool("docker", "exit 1")
    with pytest.raises(
        ImageError, match="no container tool works on this host: `docker info` failed; run it"
    ):
        tools.find_tool()
    assert tools.find_tool("docker") == "docker", "asked for by name, its own error says what is wrong"
    fake_tool("podman", "exit 125")
    with pytest.raises(
        ImageError, match="works on this host: `docker info` and `podman info` failed; run it"
    ):
        tools.find_tool()
    fake_tool("buildah", "exit 0")
    assert tools.find_tool() == "buildah"
    fake_tool("podman", "exit 0")
    assert tools.find_tool() == "podman"
    Path(os.environ["PATH"], "docker").unlink()
    with pytest.raises(ImageError, match="docker is not installed"):
        tools.find_tool("docker")


@pytest.mark.parametrize(
    ("runtime", "isolation"), [("exit 0", None), ("echo 'crun: cgroups'; exit 1", "chroot")]
)
def test_a_runtime_that_makes_no_containers_is_done_without(fake_tool, runtime, isolation):
    said = fake_tool("buildah", f"case $1 in from) echo made;; run) {runtime};; esac")
    tools.isolate_by_chroot("localhost/base")
    assert os.environ.pop("BUILDAH_ISOLATION", None) == isolation
    assert said.read_text().splitlines() == ["from localhost/base", "run made -- true", "rm made"]


def test_an_isolation_that_the_shell_names_is_kept(fake_tool, monkeypatch):
    said = fake_tool("buildah", "exit 1")
    monkeypatch.setenv("BUILDAH_ISOLATION", "oci")
    tools.isolate_by_chroot("localhost/base")
    assert os.environ["BUILDAH_ISOLATION"] == "oci"
    assert not said.exists()


INSPECTED = """[{"Config": {"User": "10001:10001", "Env": ["A=b=c"], "Entrypoint": ["sh"]},
                 "Healthcheck": {"Test": ["x"]}}]"""


@pytest.mark.parametrize("tool", ["docker", "podman"])
def test_an_image_is_opened_run_and_closed(fake_tool, tool):
    said = fake_tool(tool, f"case $1 in image) echo '{INSPECTED}';; create) echo made;; run) echo out;; esac")
    with tools.open_image(tool, "localhost/x") as image:
        assert (image.user, image.variables, image.entrypoint) == ("10001", {"A": "b=c"}, ["sh"])
        assert image.settings["Healthcheck"] == {"Test": ["x"]}
        assert image.run(["python", "-c", "1"]) == "out"
    assert said.read_text().splitlines() == [
        "image inspect localhost/x",
        "create localhost/x",
        "run --rm --network=none --entrypoint=python localhost/x -c 1",
        "rm made",
    ]


def test_a_failure_is_told_by_the_line_that_names_it(fake_tool):
    fake_tool("docker", "echo warning: x >&2; echo 'Error: no such image' >&2; exit 125")
    with pytest.raises(
        ImageError, match="docker image inspect: Error: no such image; run `docker image inspect x`"
    ):
        tools.run_tool(["docker", "image", "inspect", "x"])


def test_a_program_of_buildah_has_no_network_but_its_loopback(fake_tool, monkeypatch):
    called = []
    monkeypatch.setattr(tools, "run_tool", lambda words, errors, preexec: called.append((words, preexec)))
    image = tools.Image("buildah", "localhost/x", "made", {})
    image.run(["python", "-c", "1"])
    assert called == [
        (["buildah", "run", "--network=host", "made", "--", "python", "-c", "1"], tools._leave_network)
    ]
