"""Items of the tasks of this folder, from files as data sets publish them; lm-eval calls them by `!function`.

Each reads a folder that `slimqwen download --suite general` fills, from the hub (parquet) or from a folder of the
user's (text and JSON lines); equal texts give equal items either way.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset

Document = dict[str, Any]

_LONGEST_CHARACTERS = 2000
"""Longest text to read; a shorter one shares no context with the text before it."""

_SENTENCE_END = re.compile(r"(?<=[a-z]{3}\.)\s(?=[A-Z])")
_UNKNOWN = "<unk>"


def texts(data_files: str, **_: Any) -> dict[str, Dataset]:
    """WikiText's paragraphs, joined to texts of at most 2,000 characters that end with a paragraph or an article."""
    documents: list[str] = [""]
    for paragraph in _paragraphs(Path(data_files), "test"):
        is_title = paragraph.startswith("= ") and not paragraph.startswith("= =")
        if is_title or len(documents[-1]) + len(paragraph) > _LONGEST_CHARACTERS:
            documents.append("")
        documents[-1] += _detokenise(paragraph) + "\n"
    return _as_split([{"text": text} for text in documents if len(text) > _LONGEST_CHARACTERS // 4])


def last_words(data_files: str, **_: Any) -> dict[str, Dataset]:
    """Passages of WikiText without their last word, which is the answer.

    A passage is one or more whole sentences of a paragraph, 30 to 80 words, none of them in another passage. Its last
    word has four or more letters, all lower-case. Words that the file leaves out as "<unk>" are at most two, and none
    of the last twelve.
    """
    split = [p for part in ("test", "valid") for p in _paragraphs(Path(data_files), part)]
    return _as_split(
        [item for paragraph in split if not paragraph.startswith("=") for item in _cloze(paragraph)]
    )


def pairs(data_files: str, **_: Any) -> dict[str, Dataset]:
    """BLiMP's minimal pairs: a grammatical sentence and one that differs in a word and is not."""
    # The hub's columns are called sentence_good and sentence_bad.
    rows = [
        {name.removeprefix("sentence_"): value for name, value in row.items()}
        for row in _read_rows(Path(data_files))
    ]
    return _as_split([{"options": [row["good"], row["bad"]]} for row in rows])


def sentences(data_files: str, **_: Any) -> dict[str, Dataset]:
    """Sentences of 6 to 30 words, each once, from a file of texts; they are to be repeated."""
    found: dict[str, None] = {}
    for row in _read_rows(Path(data_files)):
        for sentence in re.split(r"(?<=[a-z]{3}[.!?])\s+(?=[A-Z])", row["text"].replace("\n", " ")):
            if 6 <= len(sentence.split()) <= 30 and re.fullmatch(r"[A-Z][^\"]+[.!?]", sentence):
                found.setdefault(sentence)
    return _as_split([{"sentence": sentence} for sentence in found])


def repeated(document: Document, results: list[str]) -> dict[str, float]:
    """Whether a response is the sentence; white space and quotation marks around it are ignored."""
    return {"exact_match": float(results[0].strip(" \n\"“”'") == document["sentence"])}


def _cloze(paragraph: str) -> Iterator[Document]:
    begun: list[str] = []
    for sentence in _SENTENCE_END.split(_detokenise(paragraph)):
        begun.append(sentence)
        words = " ".join(begun).split()
        if len(words) < 30:
            continue
        answer = words[-1].removesuffix(".")
        is_clear = words.count(_UNKNOWN) <= 2 and _UNKNOWN not in " ".join(words[-12:])
        if len(words) <= 80 and is_clear and re.fullmatch("[a-z]{4,}", answer):
            yield {"passage": " ".join(words[:-1]), "answer": answer}
            begun = []
        elif len(words) > 80:
            begun = []


def _detokenise(line: str) -> str:
    """Text as it was before WikiText parted its words and punctuation; its raw form parts them too."""
    for mark in "-,.":
        line = line.replace(f" @{mark}@ ", mark)
    line = re.sub(r"\( (.*?) \)", r"(\1)", line)
    line = re.sub(r'" (.*?) "', r'"\1"', line)
    line = re.sub(r" ([,.:;!?])(?= |$)", r"\1", line)
    return re.sub(r" ('s|'t|'re|'ve|'d|'ll)\b", r"\1", line).strip()


def _paragraphs(folder: Path, split: str) -> list[str]:
    """Paragraphs and headings of a split of WikiText."""
    lines = [row["text"] for row in _read_rows(folder, f"*{split}*")]
    return [line.strip() for line in lines if line.strip()]


def _read_rows(path: Path, pattern: str = "*") -> list[Document]:
    """Rows of a file, or of all data files of a folder, sorted by name; of a text each line is a row."""
    files = (
        [path] if path.is_file() else sorted(file for file in path.rglob(pattern) if file.suffix in _READERS)
    )
    return [row for file in files for row in _READERS[file.suffix](file)]


def _read_parquet(file: Path) -> list[Document]:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows: list[Document] = pq.read_table(file).to_pylist()
    return rows


def _read_json_lines(file: Path) -> list[Document]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _read_text(file: Path) -> list[Document]:
    return [{"text": line} for line in file.read_text(encoding="utf-8").split("\n")]


_READERS = {".parquet": _read_parquet, ".jsonl": _read_json_lines, ".txt": _read_text}


def _as_split(items: list[Document]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(items)}
