"""Files are found in a folder, opened plain or packed, and refused with their cause."""

import gzip

import pyarrow
import pytest

from slimqwen.text import files
from slimqwen.text.files import CorpusError, list_files, open_bytes, read_json_lines, without_nulls

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def content(file):
    with open_bytes(file) as stream:
        return stream.read()


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("a.txt", LINES),
        # Without a time the parameters are equal in every worker of pytest.
        ("a.txt.gz", gzip.compress(LINES, mtime=0)),
        ("a.txt.GZ", gzip.compress(LINES[:16], mtime=0) + gzip.compress(LINES[16:], mtime=0)),
        ("a.txt.zst", zstd(LINES)),
        ("a.txt.zst", zstd(LINES[:16]) + zstd(LINES[16:])),
    ],
)
def test_packed_files_are_opened_as_the_bytes_they_hold(tmp_path, name, packed):
    file = tmp_path / name
    file.write_bytes(packed)
    assert content(file) == LINES


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt.gz", gzip.compress(LINES * 9, mtime=0)[:-9], "cut short or damaged"),
        ("a.txt.gz", LINES, "cannot be read .Not a gzipped file"),
        ("a.txt.zst", zstd(LINES * 9)[:-9], "a.txt.zst: c"),
        ("a.txt.zst", LINES, "cannot be read .ZSTD"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
    ],
)
def test_what_cannot_be_unpacked_is_one_line(tmp_path, name, data, message):
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(CorpusError, match=message) as caught:
        content(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_packed_file_that_expands_as_no_text_does_is_refused(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(files, "_UNCHECKED_BYTES", 2**16)
    file = tmp_path / ("a.txt.gz" if pack is gzip.compress else "a.txt.zst")
    file.write_bytes(pack(bytes(2**26)))
    with pytest.raises(CorpusError, match=r"expands to more than [\d,]+ bytes, as no text does; unpack it"):
        content(file)


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 100)
    file = tmp_path / "a.txt"
    file.write_bytes(b"short\n" + b"x" * 200)
    with (
        pytest.raises(CorpusError, match=r"a.txt, line 2: longer than 100 bytes; divide the line"),
        open_bytes(file) as stream,
    ):
        list(files.read_lines(stream, file))


def names(found):
    return [[file.name for file in each] for each in found]


def test_a_folder_is_read_in_the_order_of_names_and_says_what_it_leaves_out(tmp_path):
    for name in ("b.jsonl", "a.csv.gz", "README.md", "dataset_info.json", ".hidden.jsonl"):
        (tmp_path / name).touch()
    assert names(list_files(tmp_path)) == [["a.csv.gz", "b.jsonl"], ["README.md", "dataset_info.json"]]
    assert names(list_files(tmp_path / "b.jsonl")) == [["b.jsonl"], []]


def test_of_a_folder_with_splits_the_training_split_is_read(tmp_path):
    for name in (
        "data/train-00000-of-00002.parquet",
        "data/test-0.parquet",
        "data/train-00001-of-00002.parquet",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found, left_out = names(list_files(tmp_path))
    assert (found, left_out) == (
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["test-0.parquet"],
    )


def test_json_lines_are_given_with_the_byte_at_which_they_begin():
    lines = [b'{"a": 1}\n', b"\n", b"[2]\n", b"3"]
    assert list(read_json_lines(lines, "x")) == [(0, {"a": 1}), (10, [2]), (14, 3)]


def test_keys_without_a_value_are_left_out_at_every_depth():
    given = {"a": None, "b": [{"c": None, "d": 0}, None], "e": {"f": None}}
    assert without_nulls(given) == {"b": [{"d": 0}, None], "e": {}}
