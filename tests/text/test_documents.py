"""Data as people keep it is read as meant, or refused with all faults, each with its file and line."""

import csv
import gzip
import io
import json

import pyarrow
import pytest
from pyarrow import parquet

from slimqwen.text import files, tables
from slimqwen.text.documents import Understanding, read_documents
from slimqwen.text.files import CorpusError

SEPARATORS = "next\u0085line\u2028separator\u2029paragraph, form\x0cfeed and file\x1cseparator"
ASKED = 'Who keeps the ferry; "Nula", or\nher aunt?'
SHARE_GPT = {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": "Nula."}]}
OPENAI = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "Nula."}]}
ALPACA = {"instruction": ASKED, "input": "", "output": "Nula."}
CHAT = OPENAI["messages"]


def json_lines(*rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(separator, *rows, names=("instruction", "input", "output"), mark=True):
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=separator)
    writer.writerows([names, *rows])
    return stream.getvalue().encode("utf-8-sig" if mark else "utf-8")


def parquet_bytes(*rows):
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink)
    return sink.getvalue()


def share(name, value):
    return json_lines({"conversations": [{"from": name, "value": value}]})


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


TWO_OF_EACH = [
    ("share.jsonl", json_lines(SHARE_GPT, OPENAI)),
    ("share.json", json.dumps([SHARE_GPT, ALPACA], indent=2).encode()),
    ("lines.json", json_lines(OPENAI, SHARE_GPT)),
    ("openai.ndjson", b"\xef\xbb\xbf" + json_lines(OPENAI, OPENAI)),
    ("alpaca.json", b"\xef\xbb\xbf" + json.dumps([ALPACA, ALPACA]).encode()),
    ("alpaca.csv", table(",", (ASKED, "", "Nula."), (ASKED, "", "Nula."), mark=False)),
    ("excel.csv", table(";", (ASKED, "", "Nula."), (ASKED, "", "Nula."))),
    ("sep.csv", b"sep=|\n" + table("|", *[("Nula.", ASKED)] * 2, names=("output", "Instruction"), mark=False)),
    ("tabs.tsv", table("\t", *[[json.dumps(CHAT)]] * 2, names=["messages"])),
    ("share.parquet", parquet_bytes(SHARE_GPT, SHARE_GPT)),
    ("openai.jsonl.gz", gzip.compress(json_lines(OPENAI, OPENAI), mtime=0)),
    ("alpaca.json.zst", zstd(json.dumps([ALPACA, ALPACA]).encode())),
    ("alpaca.csv.gz", gzip.compress(table(";", (ASKED, "", "Nula."), (ASKED, "", "Nula.")), mtime=0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), TWO_OF_EACH, ids=[name for name, _ in TWO_OF_EACH])
@pytest.mark.parametrize("is_folder", [False, True])
def test_chats_of_every_style_and_format_are_read(tmp_path, name, content, is_folder):
    (tmp_path / name).write_bytes(content)
    documents = list(read_documents(tmp_path if is_folder else tmp_path / name))
    # csv ends lines of a cell as they stand in the file
    assert [json.loads(json.dumps(each.messages).replace("\\r\\n", "\\n")) for each in documents] == [
        CHAT,
        CHAT,
    ]


def test_what_was_understood_is_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        json_lines(SHARE_GPT, OPENAI, OPENAI, {"text": " "}, {"conversations": []})
    )
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    (tmp_path / "README.md").touch()
    understanding = Understanding()
    list(read_documents(tmp_path, "paragraphs", understanding))
    assert understanding.describe() == (
        "1 ShareGPT chat, 2 OpenAI chats, 2 texts in 2 files (.txt divided by empty lines); "
        "2 left out, for they are empty: a.jsonl, line 4; a.jsonl, line 5; 1 files not read: README.md"
    )


@pytest.mark.parametrize(
    ("division", "texts"),
    [
        ("blocks", ["one\n\ntwo\nthree\n"]),
        ("paragraphs", ["one\n\n", "two\nthree\n"]),
        ("lines", ["one\n", "two\n", "three\n"]),
        ("whole", ["one\n\ntwo\nthree\n"]),
    ],
)
def test_how_a_text_file_is_divided_can_be_chosen(tmp_path, division, texts):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\nthree\r\n")
    assert [each.text for each in read_documents(tmp_path / "a.txt", division)] == texts


def test_a_text_file_is_cut_into_documents_of_8_kib_at_ends_of_lines(tmp_path):
    file = tmp_path / "book.txt"
    lines = [f"{number} {'ä' * 500}\n" for number in range(40)]
    file.write_text("".join(lines), encoding="utf-8")
    documents = [each.text for each in read_documents(file)]
    assert "".join(documents) == "".join(lines)
    assert all(text.endswith("\n") and len(text.encode()) >= 2**13 for text in documents[:-1])


def test_strings_may_hold_every_line_separator(tmp_path):
    rows = [{"id": 7, "text": SEPARATORS}, {"text": "the next"}]
    for name, content in (("a.jsonl", json_lines(*rows)), ("a.json", json.dumps(rows).encode())):
        (tmp_path / name).write_bytes(content)
        first, second = read_documents(tmp_path / name)
        assert (first.id, first.text, second.id, second.text) == ("7", SEPARATORS, None, "the next")


def test_a_long_list_is_read_record_by_record(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_MORE_BYTES", 64)
    rows = [{"id": str(number), "text": f"ä{number} " * (number % 40)} for number in range(200)]
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(
            json.dumps(rows, indent=indent, ensure_ascii=False), encoding="utf-8"
        )
        documents = list(read_documents(tmp_path / "a.json"))
        assert [{"id": each.id, "text": each.text} for each in documents] == rows
    assert documents[-1].location.endswith(f"line {199 * 4 + 2}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\nno json', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n' + b"[" * 100_000, "line 3: not JSON"),
        ("a.jsonl", b'{"txt": "a"}', "line 1: neither a text nor a chat; the fields are txt; give"),
        ("a.jsonl", b'\r\n{"text": null}', "line 2: neither a text nor a chat"),
        ("a.jsonl", b'{"messages": {}}', "line 1: neither a text nor a chat"),
        ("a.jsonl", b"[1]", "line 1: neither a text nor a chat"),
        ("a.jsonl", b'[{"text": "a"},\n{"text": "b"}]', "line 1: not JSON by itself, .*; end its name in .json"),
        ("a.jsonl", b'{\n"text": "a"\n}', "line 1: not JSON by itself"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', "line 2: not JSON .*surrogates"),
        ("a.jsonl", '{"text": "Käse"}'.encode("latin-1"), "line 1: not UTF-8"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "line 1: not UTF-8"),
        ("a.jsonl", gzip.compress(b'{"text": "a"}', mtime=0), "line 1: not UTF-8 .*decompress it"),
        ("a.csv", "text\nKäse\n".encode("latin-1"), "line 2: not UTF-8"),
        ("a.parquet", b"PAR1", "not a parquet file .*fetch it again"),
        ("a.parquet", parquet_bytes({"body": "x"}), "row 1: the columns are body; name one of them text"),
        ("a.txt", "one\ntwo\nKäse\n".encode("latin-1"), "line 3: not UTF-8"),
        ("a.txt", b"one\n" * 5000 + b"\xff\n", "line 5001: not UTF-8"),
        ("a.txt", "one\ntwo".encode("utf-16-le"), "line 1: not UTF-8 .a NUL"),
        ("a.txt", b'\n {"text": "a"}\n{"text": "b"}\n', r"line 1: a JSON object.*name the file \.jsonl"),
        ("a.docx", b"PK", r"unknown format; name a file that ends in \.jsonl"),
        ("a.parquet.gz", b"", "unknown format"),
        ("a.jsonl", share("elf", "a"), "line 1: message 1 is \"from\" 'elf'; use one of human"),
        ("a.jsonl", share("gpt", None), "line 1: message 1 has no text"),
        ("a.jsonl", share("function_call", "x"), "message 1 is a function_call, but not JSON"),
        ("a.csv", b"messages\n[1\n", "line 2: a chat or tools that are not JSON"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_with_its_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        list(read_documents(file))
    assert str(caught.value).startswith(str(file))
    assert len(str(caught.value).splitlines()) == 1


def test_all_faults_come_at_once_and_equal_ones_share_a_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines({"text": "a"}, {}, {"text": "b"}, {}, {}, {}) + b"{\n")
    (tmp_path / "b.csv").write_bytes(b"text,id\na\n")
    yielded = []
    with pytest.raises(CorpusError) as caught:
        yielded.extend(read_documents(tmp_path))
    lines, json_fault, cells = caught.value.faults
    assert "a.jsonl, lines 2, 4, 5 and 1 more: neither a text nor a chat" in lines
    assert "a.jsonl, line 7: not JSON" in json_fault
    assert "b.csv, line 2: 1 fields" in cells


def test_a_row_of_a_table_without_a_text_is_left_out(tmp_path):
    (tmp_path / "a.parquet").write_bytes(parquet_bytes({"text": "one", "n": 1}, {"text": None, "n": 2}))
    (tmp_path / "b.csv").write_text("text,n\ntwo,1\n,2\n\n")
    documents = list(read_documents(tmp_path))
    assert [each.text for each in documents if not each.is_blank] == ["one", "two"]
    assert [each.location.rpartition("/")[2] for each in documents if each.is_blank] == [
        "a.parquet, row 2",
        "b.csv, line 3",
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"none\.txt: cannot be read"):
        list(read_documents(tmp_path / "none.txt"))


def test_rows_of_a_parquet_file_have_what_their_chat_had_and_no_more(tmp_path):
    chats = [
        {
            "messages": [{"role": "user", "content": name}],
            "tools": [{"function": {"parameters": {name: {"type": "x"}}}}],
        }
        for name in ("one", "two")
    ]
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(*chats))
    documents = list(read_documents(tmp_path / "a.parquet"))
    assert [{"messages": each.messages, "tools": each.tools} for each in documents] == chats


def test_memory_does_not_grow_with_a_file(tmp_path):
    import tracemalloc

    (tmp_path / "a.json").write_text(json.dumps([{"text": "word " * 200}] * 20_000))
    with (tmp_path / "a.csv").open("w") as stream:
        stream.write("text\n" + ("word " * 200 + "\n") * 20_000)
    list(files.list_files(tmp_path))
    tracemalloc.start()
    for file in ("a.json", "a.csv"):
        assert sum(1 for _ in read_documents(tmp_path / file)) == 20_000
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8e6  # each file has 20 MB
