"""A public mix: fetched from a hub, without duplicates and without what a suite asks, counted for its base."""

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from slimqwen import variant
from slimqwen.evals.suites import corpora
from slimqwen.text.files import CorpusError
from tests import hub_server
from tests.checkpoints import TINY
from tests.hub_server import COMMIT, Hub

ITEM = "On which day does the old ferry from the harbour of Bergen to the island of Askey leave at noon in winter?"
MIX = f"""\
tokens: 4000
parts:
  chat: {{repository: owner/name, revision: {COMMIT}, files: [chats.jsonl], licence: MIT, share: 1}}
  languages:
    repository: owner/name
    files: [pairs.jsonl]
    licence: Apache-2.0
    share: 1
    fields: {{inputs: instruction, targets: output}}
    where: {{language: [de, fr]}}
  books: {{repository: owner/name, files: [books.jsonl], licence: MIT, share: 1, longest: 40}}
"""


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    folder.mkdir()

    def chat(question: str) -> dict[str, object]:
        said = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"The answer to {question}"},
        ]
        return {"messages": said}

    chats = [chat(f"question {number} of many") for number in range(20)]
    (folder / "chats.jsonl").write_text(lines(*chats, chats[0], chat(f"Tell me: {ITEM}"), {"other": 1}))
    pairs = [
        {"inputs": f"{code} {n}", "targets": f"{code} said {n}", "language": code}
        for code in ("de", "fr", "xx")
        for n in range(5)
    ]
    (folder / "pairs.jsonl").write_text(lines(*pairs))
    (folder / "books.jsonl").write_text(lines(*({"text": f"book {number} " * 40} for number in range(4))))
    yield from hub_server.running(folder, monkeypatch)


@pytest.fixture
def base(tmp_path: Path) -> variant.Variant:
    """A repository with the base tiny, the mix and a suite that asks the item."""
    root = tmp_path / "root"
    (root / "weights").mkdir(parents=True)
    (root / "weights" / "tiny").symlink_to(TINY)
    (root / "experiments").mkdir()
    shutil.copytree(variant.repository_root() / "experiments" / "tiny", root / "experiments" / "tiny")
    for name, content in {"corpora/general.yaml": MIX, "texts/asked.jsonl": lines({"text": ITEM})}.items():
        (root / "eval" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "eval" / name).write_text(content)
    return variant.load("tiny", root)


def test_a_mix_has_no_item_no_duplicate_and_the_rows_asked_for(hub: Hub, base: variant.Variant) -> None:
    said = corpora.fetch_corpus("general", base)
    assert "1 left out for what they share with items" in said[-1]
    file = base.root / "corpora" / "general-tiny.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    text = json.dumps(rows)
    assert "Askey" not in text
    assert " xx " not in text
    assert sum(row["source"] == "chat" for row in rows) == 20
    assert all(row["messages"] for row in rows if row["source"] != "books")
    assert max(len(row["text"]) for row in rows if row["source"] == "books") == 40
    manifest = json.loads(file.with_suffix(".manifest.json").read_text())
    counts = {row["name"]: row for row in manifest["sources"]}
    assert (counts["chat"]["overlapping"], counts["chat"]["duplicates"]) == (1, 1)
    assert manifest["licences"]["languages"] == "Apache-2.0"
    assert "eval/texts/asked.jsonl" in manifest["compared_with"]
    before = len(hub.requests)
    assert "is present" in corpora.fetch_corpus("general", base)[0]
    assert len(hub.requests) == before


def test_a_part_without_a_row_is_named(hub: Hub, base: variant.Variant) -> None:
    file = base.root / "eval" / "corpora" / "general.yaml"
    file.write_text(file.read_text().replace("language: [de, fr]", "language: [yy]"))
    with pytest.raises(CorpusError, match="has no usable row; correct `fields` and `where`"):
        corpora.fetch_corpus("general", base)


def test_the_shipped_mix_covers_what_it_names() -> None:
    mix = corpora.Corpus.load("general", variant.repository_root())
    assert sum(part.share for part in mix.parts.values()) == pytest.approx(1)
    assert len(mix.parts["languages"].where["language_code"]) == 12
    assert all(part.licence for part in mix.parts.values())


@pytest.mark.parametrize("name", ["asked.csv", "asked.tsv", "asked.parquet", "asked.json"])
def test_an_item_is_found_in_every_kind_of_file_whatever_its_columns(
    hub: Hub, base: variant.Variant, name: str
) -> None:
    item = "On which, of all days, does the ferry, the old one, leave, if at all, for Bergen, in winter, at noon?"
    asked = [{"role": "user", "content": item}, {"role": "assistant", "content": "On none."}]
    with (hub.folder / "chats.jsonl").open("a") as chats:
        chats.write(lines({"messages": asked}))
    file = base.root / "eval" / "own" / "mine" / name
    file.parent.mkdir(parents=True)
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist([{"what is asked": item}]), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps([{"what is asked": {"first": [item]}}]))
    else:
        cells = [["1", item], ["2", "another", "and more"]]
        with file.open("w", newline="") as stream:
            csv.writer(stream, delimiter="," if file.suffix == ".csv" else "\t").writerows(cells)
    corpora.fetch_corpus("general", base)
    text = (base.root / "corpora" / "general-tiny.jsonl").read_text()
    assert "question 1 of many" in text
    assert "On none." not in text
