"""A file is read again exactly when it may have changed, and progress shows every reading."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import checkpoint
from slimqwen.checkpoint import hashes
from slimqwen.checkpoint.files import keep_records, tree_records


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two files whose hashes are kept, as another process would find it."""
    (folder := tmp_path / "checkpoint").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"0" * 1000)
    checkpoint.digest(folder)
    monkeypatch.setattr(hashes, "_of_this_process", {})
    return folder


def bytes_read(folder: Path) -> float:
    """Bytes that `digest` reads, as its progress says."""
    steps: list[float] = []
    checkpoint.digest(folder, lambda activity, done, total: steps.append(done))
    return steps[-1] if steps else 0


def replaced_with_its_times(file: Path) -> None:
    """Replace a file as `cp -p` and `rsync -a` do: another content of the same size and time of modification."""
    stat, other = file.stat(), file.with_name(".other")
    other.write_bytes(b"1" * stat.st_size)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    shutil.copy2(other, file)
    other.unlink()


def moved_over(file: Path) -> None:
    """Replace a file by renaming another over it, an hour older."""
    other = file.with_name(".other")
    other.write_bytes(b"1" * file.stat().st_size)
    os.utime(other, (1, 1))
    other.replace(file)


@pytest.mark.parametrize("replace", [replaced_with_its_times, moved_over])
def test_a_file_replaced_by_an_older_one_of_its_size_changes_the_digest(
    folder: Path, replace: Callable[[Path], None]
) -> None:
    before = checkpoint.digest(folder)
    replace(folder / "model.safetensors")
    assert checkpoint.digest(folder) != before


def test_what_has_not_changed_is_not_read_again(folder: Path) -> None:
    assert bytes_read(folder) == 0
    shutil.move(folder, renamed := folder.with_name("renamed"))
    assert bytes_read(renamed) == 0


def test_chmod_costs_one_reading_of_that_file_and_nothing_else(folder: Path) -> None:
    before = checkpoint.digest(folder)
    (folder / "model.safetensors").chmod(0o600)
    assert [bytes_read(folder), bytes_read(folder)] == [1000, 0]
    assert checkpoint.digest(folder) == before


def test_a_copy_of_a_folder_is_read_once(folder: Path) -> None:
    copy = shutil.copytree(folder, folder.with_name("copy"))
    assert [bytes_read(copy), bytes_read(copy)] == [2000, 0]
    assert checkpoint.digest(copy) == checkpoint.digest(folder)


def test_a_read_only_folder_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / ".hashes.json").unlink()
    (folder / ".hashes.json").mkdir()  # root writes into folders without permission, but not over a folder
    assert bytes_read(folder) == 2000
    monkeypatch.setattr(hashes, "_of_this_process", {})
    assert bytes_read(folder) == 0


@pytest.mark.parametrize("content", ["", "[]", "{", '{"config.json": 5}', '{"config.json": [1, 2]}'])
def test_damaged_hashes_are_not_trusted_and_made_anew(folder: Path, content: str) -> None:
    before = checkpoint.digest(folder)
    (folder / ".hashes.json").write_text(content)
    hashes._of_this_process.clear()
    assert bytes_read(folder) == 2000
    assert checkpoint.digest(folder) == before


def test_hashes_that_a_download_compared_are_kept(folder: Path) -> None:
    (folder / ".hashes.json").unlink()
    keep_records(folder, tree_records(folder))
    assert bytes_read(folder) == 0
