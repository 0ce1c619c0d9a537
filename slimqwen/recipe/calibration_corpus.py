"""A calibration text mixed from several sources: one {"text": …, "source": …} a line, which `calibrate` can read.

Documents come in a seeded random order, always from the source that is furthest behind its share of the tokens, so
that shares hold to one document and a source that runs out gives its share to the others. A document is dropped if
it was taken before (but for whitespace), or if more than half of its 13-word shingles were: word n-grams of that
length are what Brown et al. (arXiv 2005.14165, appendix C) call an overlap. Memory holds 8 bytes a document of a
source, and the hashes of what was taken.
"""

import hashlib
import json
import math
import random
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.progress import Progress, silent
from slimqwen.recipe import calibrate
from slimqwen.recipe.corpus import CorpusError

TINYWORLD = "tinyworld"
"""The source that needs no file: documents of the embedded world, without end."""

_SHINGLE = 13
_OVERLAP = 0.5
_TEXT_BLOCK = 2**13
"""Bytes of a .txt file that are one document, to the end of the line."""

_DRY = 5_000
"""Documents without end have run out when so many in a row were dropped."""

_END_OF_TEXT = "<|endoftext|>"
_GIVE = 'give {"text": …} or {"messages": […]}'


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    Attributes:
        name: stands in every line taken from it.
        path: a .txt file, a .jsonl file or a folder of parquet or JSON files; None for the tiny world.
        weight: its share of the tokens against the other sources'.
    """

    name: str
    path: Path | None
    weight: float = 1.0


@dataclass
class _Supply:
    """An opened source and what came of it."""

    source: Source
    sha256: str
    documents: int | None
    texts: Iterator[str]
    duplicates: int = 0
    near_duplicates: int = 0
    taken: int = 0
    tokens: int = 0
    ran_out: bool = False

    def described(self) -> dict[str, Any]:
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


def parse_source(given: str) -> Source:
    """NAME=FILE, tinyworld, or either with :WEIGHT at the end.

    Raises:
        CorpusError: it is neither, or the weight is no positive number.
    """
    place, colon, last = given.rpartition(":")
    weight = 1.0
    if colon:
        try:
            weight = float(last)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise CorpusError(f"source {given}: the weight {last!r} is no positive number; write NAME=FILE:2")
    name, equals, file = (place if colon else given).partition("=")
    if name == TINYWORLD and not equals:
        return Source(name, None, weight)
    if not name or not file or name == TINYWORLD:
        raise CorpusError(
            f"source {given}: write NAME=FILE, NAME=FILE:WEIGHT, {TINYWORLD} or {TINYWORLD}:WEIGHT"
        )
    return Source(name, Path(file), weight)


def manifest_path(destination: Path) -> Path:
    """Where `build` writes its account of destination: `<name>.manifest.json` beside it."""
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
        weights: the checkpoint whose tokenizer counts tokens and whose chat template renders messages.
        sources: at least one.
        tokens: how many to take from all sources together; the last document may go beyond. Fewer are taken where
            all sources run out.
        seed: of the order of documents.
        destination: the .jsonl file, replaced if there is one. It and its manifest appear when all is done.
        progress: hears the bytes read of each source, then the tokens taken.

    Returns:
        the manifest: {"schema", "seed", "tokens_wanted", "tokens", "documents", "sha256" (of destination),
        "tokenizer_sha256", "chat_template_sha256", "sources": [{"name", "file", "sha256", "weight", "documents"
        (in the source, None for the tiny world), "duplicates" and "near_duplicates" (met and dropped), "taken",
        "tokens", "ran_out"}]}.

    Raises:
        CorpusError: a source is missing, malformed or empty, two have one name, tokens is not positive, or
            destination is no .jsonl file in an existing folder; nothing is written.
    """
    # Heavy: paid by whoever builds.
    import transformers

    names = [source.name for source in sources]
    if not names or len(set(names)) < len(names):
        raise CorpusError(f"sources {', '.join(names) or 'none'}: give at least one, each under its own name")
    if tokens < 1:
        raise CorpusError(f"{tokens} tokens were asked for; ask for at least 1")
    if destination.suffix != ".jsonl" or not destination.parent.is_dir():
        raise CorpusError(f"{destination} is no .jsonl file in an existing folder; name one that is")
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as scratch:
        staging = Path(scratch)
        supplies = [
            _opened(source, seed, tokenizer, staging / str(place), progress)
            for place, source in enumerate(sources)
        ]
        result = staging / destination.name
        _fill(result, supplies, tokens, tokenizer, progress)
        template = getattr(tokenizer, "chat_template", None)
        manifest = {
            "schema": "calibration_corpus/1",
            "seed": seed,
            "tokens_wanted": tokens,
            "tokens": sum(supply.tokens for supply in supplies),
            "documents": sum(supply.taken for supply in supplies),
            "sha256": checkpoint.sha256(result),
            "tokenizer_sha256": checkpoint.sha256(weights / "tokenizer.json"),
            "chat_template_sha256": template and _sha256(json.dumps(template)),
            "sources": [supply.described() for supply in supplies],
        }
        account = staging / manifest_path(destination).name
        account.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        result.rename(destination)
        account.rename(manifest_path(destination))
    return manifest


def _fill(file: Path, supplies: list[_Supply], tokens: int, tokenizer: Any, progress: Progress) -> None:
    """Write documents until there are enough tokens or nothing is left."""
    seen: set[bytes] = set()
    total = 0
    left = list(supplies)
    with file.open("w", encoding="utf-8") as stream:
        while left and total < tokens:
            supply = min(left, key=lambda one: one.tokens / one.source.weight)
            text = _next_new(supply, seen)
            if text is None:
                supply.ran_out = True
                left.remove(supply)
                continue
            count = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            supply.taken += 1
            supply.tokens += count
            total += count
            # ASCII: U+2028 and its like would be ends of lines to whoever reads with str.splitlines.
            stream.write(json.dumps({"text": text, "source": supply.source.name}) + "\n")
            progress("taking documents", min(total, tokens), tokens)


def _next_new(supply: _Supply, seen: set[bytes]) -> str | None:
    """The source's next document that is no duplicate; its hashes join those seen."""
    for met, text in enumerate(supply.texts, start=1):
        words = text.split()
        whole = _hash(words)
        starts = range(max(1, len(words) - _SHINGLE + 1))
        shingles = {_hash(words[start : start + _SHINGLE]) for start in starts}
        if whole in seen:
            supply.duplicates += 1
        elif len(shingles & seen) > _OVERLAP * len(shingles):
            supply.near_duplicates += 1
        else:
            seen |= shingles | {whole}
            return text
        if supply.documents is None and met == _DRY:
            break
    return None


def _hash(words: Sequence[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _opened(source: Source, seed: int, tokenizer: Any, scratch: Path, progress: Progress) -> _Supply:
    """Read a source once to check it, hash it and find its documents."""
    if source.path is None:
        corpus = calibrate.Corpus(seed=seed)
        digests = calibrate.data(calibrate.CalibrateParameters(corpus=corpus))
        # Whoever reads the file ends every document with this mark.
        texts = (text.removesuffix(_END_OF_TEXT) for text in calibrate.documents(corpus))
        return _Supply(source, _sha256(json.dumps(digests, sort_keys=True)), None, texts)
    try:
        if source.path.is_dir():
            digest, places, text_at = _folder(source.path, tokenizer, scratch)
        else:
            digest, places, text_at = _file(source, tokenizer, progress)
    except OSError as error:
        raise CorpusError(
            f"{source.path}: cannot be read ({error.strerror or error}); put the text there"
        ) from None
    if not places:
        raise CorpusError(f"{source.path}: no text in it; put some there or take the source off")
    # By name, so that another source beside it changes nothing about this one's order.
    random.Random(f"{seed} {source.name}").shuffle(places)
    return _Supply(source, digest, len(places), map(text_at, places))


_Found = tuple[str, "array[int]", Callable[[int], str]]
"""A source's SHA-256, the places of its documents, and what reads the document at a place."""


def _file(source: Source, tokenizer: Any, progress: Progress) -> _Found:
    assert source.path is not None
    path, lines = source.path, source.path.suffix == ".jsonl"
    if path.suffix not in (".jsonl", ".txt"):
        raise CorpusError(f"{path}: neither .txt nor .jsonl nor a folder; convert it to one of them")
    places, digest, size, position = array("Q"), hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as stream:
        for number, block in enumerate(_blocks(stream, lines), start=1):
            digest.update(block)
            place = f"{path}, line {number}" if lines else str(path)
            if block.strip() and (_parsed(block, place) if lines else _decoded(block, place).strip()):
                places.append(position)
            position += len(block)
            progress(f"reading {source.name}", position, size)

    def text_at(start: int) -> str:
        with path.open("rb") as stream:
            stream.seek(start)
            block = next(_blocks(stream, lines))
            if not lines:
                return _decoded(block, str(path))
            record = _parsed(block, str(path))
            if "messages" not in record:
                return str(record["text"])
            stream.seek(0)
            return _rendered(record["messages"], tokenizer, lambda: f"{path}, line {_line(stream, start)}")

    return digest.hexdigest(), places, text_at


def _line(stream: Any, start: int) -> int:
    """The number of the line that begins at a byte; counted only for an error's sake."""
    number = 1
    while stream.tell() < start:
        stream.readline()
        number += 1
    return number


def _blocks(stream: Any, lines: bool) -> Iterator[bytes]:
    while block := stream.readline() if lines else b"".join(stream.readlines(_TEXT_BLOCK)):
        yield block


def _decoded(block: bytes, place: str) -> str:
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        raise CorpusError(f"{place}: not UTF-8 ({error.reason}); convert it") from None


def _parsed(block: bytes, place: str) -> dict[str, Any]:
    """A line's record; an empty one if there is no text in it."""
    try:
        record = json.loads(_decoded(block, place))
    except ValueError as error:
        raise CorpusError(f"{place}: not JSON ({error}); {_GIVE} a line") from None
    return _checked(record, place)


def _checked(record: Any, place: str) -> dict[str, Any]:
    if isinstance(record, dict):
        messages, text = record.get("messages"), record.get("text")
        if isinstance(messages, list):
            return {"messages": messages} if messages else {}
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CorpusError(f"{place}: not UTF-8 ({error.reason}); mend or remove it") from None
            return {"text": text} if text.strip() else {}
    raise CorpusError(f"{place}: no text in it; {_GIVE}")


def _rendered(messages: list[Any], tokenizer: Any, place: Callable[[], str]) -> str:
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        text.encode()
    # Templates raise what they like.
    except Exception as error:
        said = " ".join(str(error).split())
        raise CorpusError(
            f"{place()}: the chat template does not render it ({said}); mend or remove it"
        ) from None
    return text


def _folder(path: Path, tokenizer: Any, scratch: Path) -> _Found:
    """A folder of parquet or JSON files: the split `train` of it, which is all of it where files name no split."""
    import datasets

    datasets.disable_progress_bars()
    try:
        # A cache of its own: the user's would keep a second copy of the data set.
        rows = datasets.load_dataset(str(path), split="train", cache_dir=str(scratch))
    # The library raises whatever its readers do.
    except Exception as error:
        said = " ".join(str(error).split())
        raise CorpusError(f"{path}: not a data set ({said}); put parquet or .jsonl files there") from None
    kept = [name for name in ("messages", "text") if name in rows.column_names]
    if not kept:
        raise CorpusError(f"{path}: its columns are {', '.join(rows.column_names)}; {_GIVE}")
    rows = rows.select_columns(kept[:1])
    places = array("Q")
    for number, record in enumerate(rows):
        if _checked(record, f"{path}, row {number}"):
            places.append(number)

    def text_at(number: int) -> str:
        record = rows[number]
        if "messages" not in record:
            return str(record["text"])
        return _rendered(record["messages"], tokenizer, lambda: f"{path}, row {number}")

    files = {name: record.sha256 for name, record in checkpoint.file_records(path).items()}
    return _sha256(json.dumps(files, sort_keys=True)), places, text_at
