"""Files that are not what their names say are refused before anything loads, each with a cure that helps."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slimqwen import checkpoint
from slimqwen.checkpoint import CorruptCheckpointError
from slimqwen.models.outline import Outline
from slimqwen.models.vocabulary import read_vocabulary
from slimqwen.text.chats import read_chat_templates
from tests.checkpoints import TINY

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9328440\n"
TEXTS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = shutil.copytree(TINY, tmp_path / "copy")
    (folder / "manifest.json").unlink()
    return folder


@pytest.mark.parametrize("name", [*TEXTS, "model.safetensors", "tokenizer.model"])
def test_a_pointer_is_called_a_pointer(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    with pytest.raises(CorruptCheckpointError, match=rf"{name} is a git-lfs pointer.*`git lfs pull`"):
        checkpoint.check_folder(folder, "make it")


def test_whoever_reads_a_pointer_calls_it_one(folder: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer.json", "model.safetensors", "config.json"):
        (folder / name).write_text(POINTER)
    for read in (read_chat_templates, lambda it: read_vocabulary(it / "tokenizer.json"), Outline.read):
        with pytest.raises(CorruptCheckpointError, match="git-lfs pointer"):
            read(folder)


@pytest.mark.parametrize("name", TEXTS)
def test_a_byte_order_mark_is_refused_and_the_command_removes_it(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(b"\xef\xbb\xbf" + whole)
    with pytest.raises(CorruptCheckpointError, match="byte order mark") as error:
        checkpoint.check_folder(folder, "make it")
    [command] = re.findall("`(.*)`", str(error.value))
    subprocess.run(command, shell=True, check=True)
    assert (folder / name).read_bytes() == whole
    checkpoint.check_folder(folder, "make it")


@pytest.mark.parametrize("name", [*TEXTS, "model.safetensors"])
def test_an_empty_file_is_called_empty(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=rf"{name} is empty; make it"):
        checkpoint.check_folder(folder, "make it")


@pytest.mark.parametrize("content", ["[]", "<html></html>", " ", '{"model": {"vocab": {"a": 1,'])
def test_a_tokenizer_that_is_cut_or_something_else_is_noticed(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(
        CorruptCheckpointError, match=r"tokenizer\.json is cut short, or no JSON object; make it"
    ):
        checkpoint.check_folder(folder, "make it")


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CorruptCheckpointError, match="LoRA adapter, not a checkpoint; merge it"):
        checkpoint.check_folder(tmp_path, "make it")
