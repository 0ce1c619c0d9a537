"""A calibration text mixed from several sources: one {"text": …, "source": …} a line, which `calibrate` can read.

Documents come in a seeded random order, always from the source that is furthest behind its share of the tokens, so
that shares hold to one document and a source that runs out gives its share to the others. A document is dropped if
its text (apart from white space) or more than half of its 13-word shingles were in documents taken before: Brown et al.
(arXiv 2005.14165, appendix C) call word n-grams of that length an overlap. Memory holds 8 bytes a document of a
source, and the hashes of the documents taken.
"""

import hashlib
import json
import math
import random
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.files import file_records, sha256
from slimqwen.progress import Progress, silent
from slimqwen.text import corpus
from slimqwen.text.chats import ChatRenderer
from slimqwen.text.corpus import TextSource
from slimqwen.text.files import CorpusError, DataSet, Document, TextFile

TINYWORLD = "tinyworld"
"""The source that needs no file: documents of the embedded world, without end."""

_SHINGLE_WORDS = 13
_LARGEST_OVERLAP = 0.5
_DROPPED_IN_A_ROW = 5_000
"""An endless source has run out when so many documents in a row were dropped."""


@dataclass(frozen=True)
class Source:
    """A source of documents.

    Attributes:
        name: written into every line taken from it.
        path: .txt file, .jsonl file, or folder of parquet or JSON files; None for the tiny world.
        weight: its share of the tokens, relative to the other sources' weights.
    """

    name: str
    path: Path | None
    weight: float = 1.0


@dataclass
class _Supply:
    """An opened source, and counts of its documents and tokens."""

    source: Source
    sha256: str
    documents: int | None
    texts: Iterator[str]
    duplicates: int = 0
    near_duplicates: int = 0
    taken: int = 0
    tokens: int = 0
    ran_out: bool = False

    def summary(self) -> dict[str, Any]:
        path = self.source.path
        return {
            "name": self.source.name,
            "file": path and path.name,
            "sha256": self.sha256,
            "weight": self.source.weight,
            "documents": self.documents,
            "duplicates": self.duplicates,
            "near_duplicates": self.near_duplicates,
            "taken": self.taken,
            "tokens": self.tokens,
            "ran_out": self.ran_out,
        }


def parse_source(text: str) -> Source:
    """Parse NAME=FILE or tinyworld, either with :WEIGHT at the end.

    Raises:
        CorpusError: it is neither, or the weight is not a positive number.
    """
    unweighted, colon, last = text.rpartition(":")
    weight = 1.0
    if colon:
        try:
            weight = float(last)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise CorpusError(
                f"source {text}: the weight {last!r} is not a positive number; write NAME=FILE:2"
            )
    name, equals, file = (unweighted if colon else text).partition("=")
    if name == TINYWORLD and not equals:
        return Source(name, None, weight)
    if not name or not file or name == TINYWORLD:
        raise CorpusError(
            f"source {text}: write NAME=FILE, NAME=FILE:WEIGHT, {TINYWORLD} or {TINYWORLD}:WEIGHT"
        )
    return Source(name, Path(file), weight)


def manifest_path(destination: Path) -> Path:
    """The path of a calibration text's manifest: `<name>.manifest.json` beside it."""
    return destination.with_suffix(".manifest.json")


def build(
    weights: Path,
    sources: Sequence[Source],
    tokens: int,
    seed: int,
    destination: Path,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write a calibration text and its manifest; the same inputs give the same bytes.

    Args:
        weights: checkpoint whose tokenizer counts tokens and whose chat template renders messages.
        sources: at least one source.
        tokens: tokens to take from all sources together. The last document may go beyond; if all sources run out,
            there are fewer.
        seed: seed of the order of documents.
        destination: .jsonl file, replaced if it exists. It and its manifest appear when both are complete.
        progress: receives (activity, done, total) in documents of each source, then in tokens taken.

    Returns:
        The manifest: {"schema", "seed", "tokens_wanted", "tokens", "documents", "sha256" (of destination),
        "tokenizer_sha256", "chat_template_sha256", "sources": [{"name", "file", "sha256", "weight", "documents"
        (in the source, None for the tiny world), "duplicates" and "near_duplicates" (dropped), "taken", "tokens",
        "ran_out"}]}.

    Raises:
        CorpusError: a source is missing, malformed or empty, two have one name, tokens is not positive, or
            destination is not a .jsonl file in an existing folder; nothing is written.
    """
    import transformers  # slow to import

    names = [source.name for source in sources]
    if not names or len(set(names)) < len(names):
        raise CorpusError(f"sources {', '.join(names) or 'none'}: give at least one, each under its own name")
    if tokens < 1:
        raise CorpusError(f"{tokens} tokens were asked for; ask for at least 1")
    if destination.suffix != ".jsonl" or not destination.parent.is_dir():
        raise CorpusError(f"{destination} is not a .jsonl file in an existing folder; choose one that is")
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as scratch:
        staging = Path(scratch)
        renderer = ChatRenderer(weights, tokenizer)
        supplies = [
            _open(source, seed, renderer, staging / str(number), progress)
            for number, source in enumerate(sources)
        ]
        templates = {name: template.text for name, template in renderer.templates.items()}
        text = staging / destination.name
        _write_documents(text, supplies, tokens, tokenizer, progress)
        manifest = {
            "schema": "calibration_corpus/1",
            "seed": seed,
            "tokens_wanted": tokens,
            "tokens": sum(supply.tokens for supply in supplies),
            "documents": sum(supply.taken for supply in supplies),
            "sha256": sha256(text),
            "tokenizer_sha256": sha256(weights / "tokenizer.json"),
            "chat_template_sha256": _digest(templates) if templates else None,
            "sources": [supply.summary() for supply in supplies],
        }
        manifest_file = staging / manifest_path(destination).name
        manifest_file.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        text.rename(destination)
        manifest_file.rename(manifest_path(destination))
    return manifest


def _open(source: Source, seed: int, renderer: ChatRenderer, cache: Path, progress: Progress) -> _Supply:
    """Read a source once to check it, hash it and list its documents."""
    path = source.path
    if path is None:
        digest = _digest(corpus.digests(TextSource(seed=seed)))
        # `calibrate` ends every document with this mark.
        texts = (text.removesuffix(corpus.END_OF_TEXT) for text in corpus.texts(TextSource(seed=seed)))
        return _Supply(source, digest, None, texts)
    reader = DataSet(path, cache) if path.is_dir() else TextFile(path)
    positions = array("Q")
    for number, document in zip(count(1), reader, strict=False):
        if document.is_blank:
            continue
        if document.messages is None and document.text is None:
            raise CorpusError(
                f"{reader.location(document.position)}: a prompt is no text to calibrate on; remove it"
            )
        positions.append(document.position)
        progress(f"reading {source.name}", number, 0)
    if not positions:
        raise CorpusError(f"{path}: no text in it; put some there or remove the source")
    if path.is_dir():
        digest = _digest({name: record.sha256 for name, record in file_records(path).items()})
    else:
        digest = sha256(path)
    # Seeded by name, so that another source does not change this one's order.
    random.Random(f"{seed} {source.name}").shuffle(positions)
    texts = (_render(reader, reader.at(position), renderer) for position in positions)
    return _Supply(source, digest, len(positions), texts)


def _render(reader: TextFile | DataSet, document: Document, renderer: ChatRenderer) -> str:
    if document.messages is None:
        return document.text or ""
    try:
        return renderer.render(document.messages, document.tools)
    # Templates raise exceptions of any type.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        location = reader.location(document.position)
        raise CorpusError(
            f"{location}: the chat cannot be rendered ({reason}); correct or remove it"
        ) from None


def _write_documents(
    file: Path, supplies: list[_Supply], tokens: int, tokenizer: Any, progress: Progress
) -> None:
    """Write documents until there are enough tokens or all sources have run out."""
    seen: set[bytes] = set()
    total = 0
    remaining = list(supplies)
    with file.open("w", encoding="utf-8") as stream:
        while remaining and total < tokens:
            supply = min(remaining, key=lambda supply: supply.tokens / supply.source.weight)
            text = _next_new(supply, seen)
            if text is None:
                supply.ran_out = True
                remaining.remove(supply)
                continue
            length = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            supply.taken += 1
            supply.tokens += length
            total += length
            # ASCII, because str.splitlines would end lines at U+2028 and its like.
            stream.write(json.dumps({"text": text, "source": supply.source.name}) + "\n")
            progress("taking documents", min(total, tokens), tokens)


def _next_new(supply: _Supply, seen: set[bytes]) -> str | None:
    """The source's next document that is not a duplicate; its hashes are added to `seen`."""
    for number, text in enumerate(supply.texts, start=1):
        words = text.split()
        document_hash = _hash(words)
        starts = range(max(1, len(words) - _SHINGLE_WORDS + 1))
        shingles = {_hash(words[start : start + _SHINGLE_WORDS]) for start in starts}
        if document_hash in seen:
            supply.duplicates += 1
        elif len(shingles & seen) > _LARGEST_OVERLAP * len(shingles):
            supply.near_duplicates += 1
        else:
            seen |= shingles | {document_hash}
            return text
        if supply.documents is None and number == _DROPPED_IN_A_ROW:
            break
    return None


def _hash(words: Sequence[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
