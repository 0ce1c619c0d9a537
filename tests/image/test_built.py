"""The CPU image really built and started: `make test-image`, as root, 40 minutes and 25 GB of disk the first time.

It needs buildah (or podman, docker) and debootstrap, no image registry. Wheels are kept in .cache/wheels. Where there
is no runc or crun, buildah wants BUILDAH_ISOLATION=chroot, and where it cannot mount overlays STORAGE_DRIVER=vfs.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from slimqwen import variant
from slimqwen.image import ImageError, build, container, context, verify
from slimqwen.image.context import Content

ROOT = variant.repository_root()
TAG = "localhost/slimqwen-test:tiny"
FAULTY = "localhost/slimqwen-test:faulty"
FAULTS = f"""FROM {TAG}
USER root
RUN printf '%s' 'hf_{"c" * 34}' > /opt/token.txt \\
    && sed -i 's/^VLLM_MAX_NUM_SEQS=.*/VLLM_MAX_NUM_SEQS=3/' experiments/tiny/config.env \\
    && chmod 666 scripts/serve.py
COPY compile_cache.json weights/tiny/
"""

pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("debootstrap") or not any(map(shutil.which, build.TOOLS)),
        reason="needs root, debootstrap and one of docker, podman, buildah",
    ),
]


@pytest.fixture(scope="module")
def tool() -> build.Tool:
    return build.find_tool(os.environ.get("CONTAINER_TOOL"))


@pytest.fixture(scope="module")
def content() -> Content:
    return context.gather(variant.load("tiny"), "cpu")


@pytest.fixture(scope="module")
def image(content: Content, tool: build.Tool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    build.build(
        content,
        tool=tool,
        base=build.BOOTSTRAP,
        tag=TAG,
        log=tmp_path_factory.mktemp("image") / "build.log",
        wheelhouse=ROOT / ".cache" / "wheels" / "cpu",
    )
    yield TAG
    subprocess.run([tool, "rmi", TAG], capture_output=True)


def test_the_image_is_what_it_has_to_be_and_answers_without_a_network_or_root(image, content, tool, tmp_path):
    result = verify.verify(content, tool=tool, tag=image, log=tmp_path / "server.log")
    assert {check.name: check.faults for check in result.checks if check.faults} == {}
    assert result.trial is not None
    assert result.trial.uids in ((10001,), ())
    assert result.trial.unready_answers.get("503", 0) >= 1
    assert result.trial.models == ("default",)
    assert result.trial.completion_tokens > 0
    assert result.trial.exit_code == 0
    assert sum(layer.bytes for layer in result.layers) > 1e9


def test_planted_faults_are_found_and_such_an_image_is_not_started(image, content, tool, tmp_path):
    (tmp_path / "Dockerfile").write_text(FAULTS)
    empty = {key: {} for key in ("machine", "flags", "environment", "graphs", "files")}
    cache = json.dumps({**empty, "device": "", "archive_sha256": "0"})
    (tmp_path / "compile_cache.json").write_text(cache)
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, [tool, "rmi", FAULTY], capture_output=True)
        subprocess.run([tool, "build", "--tag", FAULTY, str(tmp_path)], check=True, capture_output=True)
        result = verify.verify(content, tool=tool, tag=FAULTY, log=tmp_path / "server.log")
    faults = {check.name: check.faults for check in result.checks if check.faults}
    assert "opt/token.txt holds a Hugging Face token" in faults["no secrets"]
    assert "it runs as root" in faults["no root"]
    assert "opt/slimqwen/scripts/serve.py has mode 666" in faults["nothing that anyone may write"]
    assert faults["files"] == (
        "experiments/tiny/config.env is not the file that image.json lists",
        "weights/tiny/compile_cache.json is not in image.json",
    )
    assert faults["same dry run as here"] == (
        "only the image has --max-num-seqs 3",
        "only here: --max-num-seqs 1",
    )
    assert result.trial is None


def test_an_image_that_is_not_there_is_one_line(tool):
    with (
        pytest.raises(ImageError),
        container.open_image(tool, "localhost/slimqwen-test:absent"),
    ):
        pass
