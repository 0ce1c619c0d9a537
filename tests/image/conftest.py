"""What the tests of images share: a repository with one small variant, root filesystems, and tools made of scripts."""

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.image import context, tools

CONFIG = """VLLM_MODEL=weights/small
VLLM_HOST=127.0.0.1
VLLM_PORT=8099
VLLM_DTYPE=bfloat16
"""
USER = 10001
Archive = Callable[..., io.BytesIO]


@pytest.fixture
def fake_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Makes a container tool of a shell script, found before any other; returns the file of its command lines."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("BUILDAH_ISOLATION", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)

    def make(name: str, script: str) -> Path:
        (folder / name).write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/said\n{script}\n')
        (folder / name).chmod(0o755)
        return tmp_path / "said"

    return make


@pytest.fixture
def repository(tmp_path: Path, add_variant) -> Path:
    """Variants small and its heir child; weights/child is a link into the store, as recipes leave it."""
    add_variant("small", CONFIG)
    add_variant("child", "BASE=small\nVLLM_MODEL=weights/child\nVLLM_MAX_NUM_SEQS=2\n", baseline="small")
    stored = tmp_path / "weights" / "store" / "abc"
    shutil.copytree(variant.load("tiny").weights, stored)
    (tmp_path / "weights" / "child").symlink_to("store/abc")
    return tmp_path


@pytest.fixture
def content(repository: Path) -> context.Content:
    return context.gather(variant.load("child", repository), "cpu")


@pytest.fixture
def image(content: context.Content) -> tools.Image:
    """As the Dockerfile sets it up."""
    variables = {
        "SLIMQWEN_VARIANT": "child",
        "SLIMQWEN_PLATFORM": "cpu",
        "SLIMQWEN_PORT": "8099",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HOME": f"{content.root}/.cache",
    }
    settings = {
        "User": f"{USER}:{USER}",
        "Env": [f"{name}={value}" for name, value in variables.items()],
        "Entrypoint": ["/bin/sh", "-c", "exec python scripts/serve.py"],
        "Healthcheck": {"Test": ["CMD", "python", "-c", "… /ping …"]},
    }
    return tools.Image("docker", "localhost/x", "container", settings)


@pytest.fixture
def archive(content: context.Content, tmp_path: Path) -> Archive:
    """The root filesystem of a right image as a tar stream, with faults planted in it."""
    folder = tmp_path / "laid-out"
    folder.mkdir()
    context.lay_out(content, folder)

    def make(
        replaced: dict[str, bytes | None] | None = None,
        added: dict[str, bytes] | None = None,
        mode: int = 0o644,
        uid: int = 0,
    ) -> io.BytesIO:
        """Files below the root replaced (None: left out), files anywhere added with a mode and an owner."""
        stream = io.BytesIO()
        base = content.root.strip("/")
        with tarfile.open(fileobj=stream, mode="w") as packed:

            def put(name: str, data: bytes, mode: int = 0o644, uid: int = 0) -> None:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode, entry.uid = len(data), mode, uid
                packed.addfile(entry, io.BytesIO(data))

            temporary = tarfile.TarInfo("./tmp")
            temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
            packed.addfile(temporary)
            put("./usr/bin/python3", b"\x7fELF")
            for part in ("install", "variant"):
                for file in sorted((folder / part).rglob("*")):
                    name = file.relative_to(folder / part).as_posix()
                    data = (replaced or {}).get(name, file.read_bytes() if file.is_file() else None)
                    if data is not None:
                        put(f"./{base}/{name}", data)
            for name, data in (added or {}).items():
                put(name, data, mode, uid)
        stream.seek(0)
        return stream

    return make
