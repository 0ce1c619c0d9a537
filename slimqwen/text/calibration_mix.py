"""A calibration text mixed from several sources: one {"text": …, "source": …} a line, which `calibrate` can read.

Documents come in a seeded random order, always from the source that is furthest behind its share of the tokens. One is
dropped if its words or more than half of its 13-word shingles were in documents taken before: Brown et al. (arXiv
2005.14165, appendix C) call word n-grams of that length an overlap.
"""

import hashlib
import json
import random
import re
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.files import file_records, sha256
from slimqwen.progress import Progress, silent
from slimqwen.text.chats import ChatRenderer
from slimqwen.text.corpus import resolve_text
from slimqwen.text.files import CorpusError, DataSet, TextFile

_SHINGLE_WORDS = 13
_LARGEST_OVERLAP = 0.5


@dataclass(frozen=True)
class Source:
    """A .txt file, a .jsonl file, or a folder of parquet or JSON files; `weight` is its share of the tokens."""

    name: str
    path: Path
    weight: float = 1.0


def parse_source(text: str) -> Source:
    """Parse NAME=FILE, or the NAME of a text in eval/texts, either with :WEIGHT at the end.

    Raises:
        CorpusError: it is neither, or the weight is zero.
    """
    match = re.fullmatch(r"([^=:]+)(?:=(.+?))?(?::([\d.]+))?", text)
    weight = float(match[3] or 1) if match else 0.0
    if match is None or not weight:
        raise CorpusError(
            f"source {text}: write NAME=FILE, or NAME=FILE:2 for twice the weight of the others"
        )
    return Source(match[1], Path(match[2]) if match[2] else resolve_text(match[1], Path()), weight)


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
        weights: checkpoint whose tokenizer counts tokens and whose chat templates render chats.
        tokens: to take from all sources together: at most one document more, fewer if all sources run out.
        destination: .jsonl file, replaced if it exists. It and its manifest, which is returned, appear when complete.

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
    chats = ChatRenderer(weights, tokenizer)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as scratch:
        text, staged = Path(scratch) / "text", Path(scratch) / "manifest"
        remaining = [_Supply(each, seed, chats, Path(scratch) / each.name, progress) for each in sources]
        facts = [supply.facts for supply in remaining]
        seen: set[bytes] = set()
        total = 0
        with text.open("w", encoding="utf-8") as stream:
            while remaining and total < tokens:
                supply = min(remaining, key=lambda supply: supply.facts["tokens"] / supply.facts["weight"])
                document = supply.take_new(seen)
                if document is None:
                    remaining.remove(supply)
                    continue
                length = len(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"])
                supply.facts["tokens"] += length
                total += length
                stream.write(json.dumps({"text": document, "source": supply.facts["name"]}) + "\n")
                progress("taking documents", min(total, tokens), tokens)
        manifest = {
            "schema": "calibration_corpus/1",
            "seed": seed,
            "tokens_wanted": tokens,
            "tokens": total,
            "documents": sum(each["taken"] for each in facts),
            "sha256": sha256(text),
            "tokenizer_sha256": sha256(weights / "tokenizer.json"),
            "chat_template_sha256": _digest({name: each.text for name, each in chats.templates.items()}),
            "sources": facts,
        }
        staged.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        text.rename(destination)
        staged.rename(manifest_path(destination))
    return manifest


class _Supply:
    """The documents of a source in a seeded order, of which 8 bytes each are held in memory.

    Attributes:
        facts: its part of the manifest.
    """

    facts: dict[str, Any]

    def __init__(
        self, source: Source, seed: int, chats: ChatRenderer, cache: Path, progress: Progress
    ) -> None:
        path = source.path
        is_folder = path.is_dir()
        self._reader = DataSet(path, cache) if is_folder else TextFile(path)
        self._chats = chats
        self._positions = array("Q")
        for number, document in enumerate(self._reader, start=1):
            if not document.is_blank:
                self._positions.append(document.position)
            progress(f"reading {source.name}", number, 0)
        if not self._positions:
            raise CorpusError(f"{path}: no text in it; put some there or remove the source")
        files = {name: record.sha256 for name, record in file_records(path).items()} if is_folder else {}
        digest = _digest(files) if is_folder else sha256(path)
        self.facts = {"name": source.name, "file": path.name, "sha256": digest, "weight": source.weight}
        self.facts |= {"documents": len(self._positions), "duplicates": 0, "near_duplicates": 0}
        self.facts |= {"taken": 0, "tokens": 0, "ran_out": False}
        # Seeded by name, so that another source does not change this one's order; taken from the end.
        random.Random(f"{seed} {source.name}").shuffle(self._positions)
        self._positions.reverse()

    def take_new(self, seen: set[bytes]) -> str | None:
        """The next document that is not a duplicate; its hashes are added to `seen`."""
        while self._positions:
            text = self._chats.text_of(self._reader, self._positions.pop())
            words = text.split()
            starts = range(max(1, len(words) - _SHINGLE_WORDS + 1))
            shingles = {_hash(words[start : start + _SHINGLE_WORDS]) for start in starts}
            if _hash(words) in seen:
                self.facts["duplicates"] += 1
            elif len(shingles & seen) > _LARGEST_OVERLAP * len(shingles):
                self.facts["near_duplicates"] += 1
            else:
                self.facts["taken"] += 1
                seen |= shingles | {_hash(words)}
                return text
        self.facts["ran_out"] = True
        return None


def _hash(words: Sequence[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
