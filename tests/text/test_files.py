"""Text files of every make are read as meant, or refused with file and line."""

import gzip
import json

import pytest

from slimqwen.text.files import CorpusError, DataSet, TextFile, read_json_lines, without_nulls

SEPARATORS = "next\u0085line\u2028separator\u2029paragraph, form\x0cfeed and file\x1cseparator"


def texts(reader):
    return [document.text for document in reader]


def test_strings_may_hold_every_line_separator(tmp_path):
    file = tmp_path / "text.jsonl"
    rows = [{"id": 7, "text": SEPARATORS}, {"text": "the next"}]
    for ascii_only in (True, False):
        file.write_text("".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows))
        first, second = TextFile(file)
        assert (first.id, first.text, second.id, second.text) == ("7", SEPARATORS, None, "the next")


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_and_carriage_returns_are_no_text(tmp_path, mark, newline):
    lines, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_bytes(mark + newline.join([b'{"text": "one"}', b"", b'{"text": "two"}', b""]))
    assert texts(TextFile(lines)) == ["one", "two"]
    text.write_bytes(mark + newline.join([b"one", b"two", b""]))
    assert texts(TextFile(text)) == ["one\ntwo\n"]


def test_a_document_is_found_again_by_its_position(tmp_path):
    lines, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two"}\r\n{"text": " "}')
    text.write_bytes(b"\xef\xbb\xbf" + b"".join(b"%d %s\r\n" % (n, "ä".encode() * 500) for n in range(40)))
    for reader in (TextFile(lines), TextFile(text)):
        documents = list(reader)
        assert len(documents) == (3 if reader.location(0).startswith(str(lines)) else 5)
        assert [reader.at(document.position) for document in documents] == documents
    assert [document.is_blank for document in TextFile(lines)] == [False, False, True]


def test_a_text_file_is_cut_into_documents_of_8_kib_at_ends_of_lines(tmp_path):
    file = tmp_path / "book.txt"
    lines = [f"{number} {'ä' * 500}\n" for number in range(40)]
    file.write_text("".join(lines), encoding="utf-8")
    documents = texts(TextFile(file))
    assert "".join(documents) == "".join(lines)
    assert all(text.endswith("\n") and len(text.encode()) >= 2**13 for text in documents[:-1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\nno json', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n' + b"[" * 100_000, "line 3: not JSON"),
        ("a.jsonl", b'{"txt": "a"}', "line 1: neither a text nor a chat"),
        ("a.jsonl", b'\r\n{"text": null}', "line 2: neither a text nor a chat"),
        ("a.jsonl", b'{"messages": {}}', "line 1: neither a text nor a chat"),
        ("a.jsonl", b"[1]", "line 1: neither a text nor a chat"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', "line 2: not JSON .*surrogates"),
        ("a.jsonl", '{"text": "Käse"}'.encode("latin-1"), "line 1: not UTF-8"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "line 1: not UTF-8"),
        ("a.jsonl", gzip.compress(b'{"text": "a"}', mtime=0), "line 1: not UTF-8 .*decompress it"),
        ("a.txt", "one\ntwo\nKäse\n".encode("latin-1"), "line 3: not UTF-8"),
        ("a.txt", b"one\n" * 5000 + b"\xff\n", "line 5001: not UTF-8"),
        ("a.txt", "one\ntwo".encode("utf-16-le"), "line 1: not UTF-8 .a NUL"),
        ("a.txt", b'\n {"text": "a"}\n{"text": "b"}\n', r"line 1: a JSON object.*name the file \.jsonl"),
        ("a.txt.gz", gzip.compress(b"a", mtime=0), r"neither \.txt nor \.jsonl; decompress"),
        ("a.parquet", b"PAR1", r"neither \.txt nor \.jsonl"),
    ],
)
def test_what_is_no_text_is_refused_with_its_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        list(TextFile(file))
    assert str(caught.value).startswith(str(file))
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"none\.txt: cannot be read"):
        list(TextFile(tmp_path / "none.txt"))


def test_json_lines_are_given_with_the_byte_at_which_they_begin():
    lines = [b'{"a": 1}\n', b"\n", b"[2]\n", b"3"]
    assert list(read_json_lines(lines, "x")) == [(0, {"a": 1}), (10, [2]), (14, 3)]


def test_keys_without_a_value_are_left_out_at_every_depth():
    given = {"a": None, "b": [{"c": None, "d": 0}, None], "e": {"f": None}}
    assert without_nulls(given) == {"b": [{"d": 0}, None], "e": {}}


def test_rows_of_a_data_set_have_what_their_chat_had_and_no_more(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    chats = [
        {
            "messages": [{"role": "user", "content": name}],
            "tools": [{"function": {"parameters": {name: {"type": "x"}}}}],
        }
        for name in ("one", "two")
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    reader = DataSet(folder, tmp_path / "cache")
    documents = list(reader)
    assert [{"messages": each.messages, "tools": each.tools} for each in documents] == chats
    assert reader.at(1) == documents[1]
    assert reader.location(1) == f"{folder}, row 1"


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "a"}]}),
        ({"text": "a", "tools": "[]"}, {"text": "a"}),
    ],
)
def test_a_data_set_is_read_in_the_columns_that_it_has(tmp_path, row, read):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    (document,) = DataSet(folder, tmp_path / "cache")
    assert (document.text, document.messages, document.tools) == (
        read.get("text"),
        read.get("messages"),
        None,
    )
