"""The CPU image really built and started: `make test-image`, as root, 40 minutes and 25 GB of disk the first time.

It needs buildah (or podman, docker) and debootstrap, no image registry. Wheels are kept in .cache/wheels. Where buildah
cannot mount overlays it wants STORAGE_DRIVER=vfs.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slimqwen import variant
from slimqwen.image import ImageError, build, context, tools, verify
from slimqwen.image.context import Content

ROOT = variant.repository_root()
TAG = "localhost/slimqwen-test:tiny"
FAULTY = "localhost/slimqwen-test:faulty"
FAULTS = f"""FROM {TAG}
USER root
RUN touch /root/.netrc \\
    && sed -i 's/^VLLM_MAX_NUM_SEQS=.*/VLLM_MAX_NUM_SEQS=3/' experiments/tiny/config.env \\
    && chmod 666 scripts/serve.py
"""

pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("debootstrap") or not any(map(shutil.which, tools.TOOLS)),
        reason="needs root, debootstrap and one of docker, podman, buildah",
    ),
]


@pytest.fixture(scope="module")
def tool() -> tools.Tool:
    return tools.find_tool(os.environ.get("CONTAINER_TOOL"))


@pytest.fixture(scope="module")
def content() -> Content:
    return context.gather(variant.load("tiny"), "cpu")


@pytest.fixture(scope="module")
def image(content: Content, tool: tools.Tool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    wheels = ROOT / ".cache" / "wheels" / "cpu"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--find-links={wheels}"]
    for lock in ("torch-cpu", "cpu"):
        subprocess.run(
            [*pip, f"--dest={wheels}", f"--requirement={ROOT}/requirements/{lock}.txt"], check=True
        )
    build.build_image(
        content,
        tool=tool,
        base=build.BOOTSTRAP,
        tag=TAG,
        log=tmp_path_factory.mktemp("image") / "build.log",
        wheelhouse=wheels,
    )
    yield TAG
    subprocess.run([tool, "rmi", TAG], capture_output=True)


def test_the_image_is_what_it_has_to_be_and_answers_without_a_network_or_root(image, content, tool, tmp_path):
    faults = verify.verify_image(content, tool=tool, tag=image, log=tmp_path / "server.log")
    assert {name: found for name, found in faults.items() if found} == {}
    assert "server" in faults
    log = (tmp_path / "server.log").read_text()
    assert "Application startup complete" in log
    assert "of this shell" not in log


def test_planted_faults_are_found_and_such_an_image_is_not_started(image, content, tool, tmp_path):
    (tmp_path / "Dockerfile").write_text(FAULTS)
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, [tool, "rmi", FAULTY], capture_output=True)
        subprocess.run([tool, "build", "--tag", FAULTY, str(tmp_path)], check=True, capture_output=True)
        faults = verify.verify_image(content, tool=tool, tag=FAULTY, log=tmp_path / "server.log")
    assert faults["no secrets"] == ["root/.netrc is a file of credentials"]
    assert "opt/slimqwen/scripts/serve.py has mode 666" in faults["nothing that its user may write"][0]
    (changed,) = faults["variant, code and checkpoint are those of this checkout"]
    assert changed == "experiments/tiny/config.env is not as in this checkout"
    assert faults["settings"][0].startswith("it runs as root")
    assert "server" not in faults


def test_an_image_that_is_not_there_is_one_line(tool):
    with (
        pytest.raises(ImageError),
        tools.open_image(tool, "localhost/slimqwen-test:absent"),
    ):
        pass
