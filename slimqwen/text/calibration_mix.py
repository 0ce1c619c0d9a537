"""A calibration text mixed from several sources: one {"text": …, "source": …} per line, which `calibrate` can read.

Each document is the next, in a seeded random order, of the source that is furthest behind its share of the tokens. A
document is dropped if the same words, or more than half of its 13-word shingles, were in documents taken before: Brown
et al. (arXiv 2005.14165, appendix C) call word n-grams of that length an overlap.
"""

import contextlib
import hashlib
import json
import random
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slimqwen.checkpoint.files import sha256
from slimqwen.progress import Progress, silent
from slimqwen.text.chats import ChatRenderer
from slimqwen.text.corpus import text_digest
from slimqwen.text.documents import Division, Document, Understanding, read_documents
from slimqwen.text.files import CorpusError, reading

_MOST_FAULTS = 20


@dataclass(frozen=True)
class Source:
    """A file or folder of texts or chats in a mix.

    Attributes:
        weight: its share of the tokens, relative to the other sources' weights.
        division: how .txt files are divided into documents.
    """

    name: str
    path: Path
    weight: float = 1.0
    division: Division = "blocks"


Show = Callable[[str, Understanding], None]
"""Called with the name of a source and what was understood of it."""


def _ignore(_: str, __: Understanding) -> None:
    """Show nothing."""


class Public(NamedTuple):
    """How a public mix differs from a user's: it keeps chats as chats, and leaves unusable documents out.

    Attributes:
        leaves_out: function from a document's text to whether it must be left out.
        facts: further entries for the manifest.
    """

    leaves_out: Callable[[str], bool]
    facts: Mapping[str, Any]


def manifest_path(destination: Path) -> Path:
    """The path of a calibration text's manifest: `<name>.manifest.json` beside it."""
    return destination.with_suffix(".manifest.json")


def build_calibration_text(
    weights: Path,
    sources: Sequence[Source],
    tokens: int,
    seed: int,
    destination: Path,
    progress: Progress = silent,
    show: Show = _ignore,
    public: Public | None = None,
) -> dict[str, Any]:
    """Write a calibration text and its manifest, and return the manifest; the same inputs give the same bytes.

    Args:
        weights: checkpoint whose tokenizer counts tokens, and whose chat templates render chats.
        sources: files or folders to mix, at least one; their names must differ.
        tokens: number of tokens to take from all sources together; the last document may exceed it, and a text whose
            sources all run out has fewer.
        seed: seed of the order of each source's documents.
        destination: .jsonl file, replaced if it exists.
        show: called with each source's counts after all are read, before any document is taken.
        public: how a public mix is made; None for a user's own text.

    Raises:
        CorpusError: a source is missing, malformed or empty, or an argument is wrong; nothing is written. The
            message lists all faults of a source's documents.
    """
    if not sources:
        raise CorpusError("there is no source; give at least one, as by --source NAME=FILE")
    name, count = Counter(source.name for source in sources).most_common(1)[0]
    if count > 1:
        raise CorpusError(
            f"{count} sources have the name {name}; give each a name of its own, as by --source NAME=FILE"
        )
    if tokens < 1:
        raise CorpusError(f"{tokens} tokens were asked for; ask for at least 1")
    if destination.suffix != ".jsonl" or not destination.parent.is_dir():
        raise CorpusError(f"{destination} is not a .jsonl file in an existing folder; choose such a path")
    chats = ChatRenderer(weights)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as scratch:
        text, staged = Path(scratch) / "text", Path(scratch) / "manifest"
        remaining: list[_Supply] = []
        faults: list[str] = []
        for number, source in enumerate(sources):
            try:
                spool = Path(scratch) / f"source-{number}"
                remaining.append(_Supply(source, seed, chats, spool, progress))
            except CorpusError as error:
                faults += error.faults
        if faults:
            raise CorpusError(*faults)
        for supply in remaining:
            show(supply.facts["name"], supply.understanding)
        facts = [supply.facts for supply in remaining]
        seen, total = set[bytes](), 0
        with text.open("w", encoding="utf-8") as stream:
            while remaining and total < tokens:
                supply = min(remaining, key=lambda supply: supply.facts["tokens"] / supply.facts["weight"])
                try:
                    taken = supply.take_new(seen, public.leaves_out if public else None)
                except CorpusError as error:
                    if public:
                        supply.facts["unusable"] += 1
                        continue
                    faults += error.faults
                    if len(faults) == _MOST_FAULTS:
                        break
                    continue
                if taken is None:
                    remaining.remove(supply)
                    continue
                document, rendered = taken
                length = len(chats.tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
                supply.facts["tokens"] += length
                total += length
                content: dict[str, Any] = {"text": rendered}
                if public and document.messages is not None:
                    content = {"messages": document.messages, "tools": document.tools}
                stream.write(json.dumps({**content, "source": supply.facts["name"]}) + "\n")
                progress("taking documents", min(total, tokens), tokens)
        if faults:
            raise CorpusError(*faults)
        manifest = {
            "schema": "calibration_corpus/1",
            "seed": seed,
            "tokens_wanted": tokens,
            "tokens": total,
            "documents": sum(each["taken"] for each in facts),
            "sha256": sha256(text),
            "tokenizer_sha256": sha256(weights / "tokenizer.json"),
            "chat_template_sha256": _digest({name: each.text for name, each in chats.templates.items()}),
            **({"template_date": chats.date} if chats.date else {}),
            **(public.facts if public else {}),
            "sources": facts,
        }
        staged.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        text.rename(destination)
        staged.rename(manifest_path(destination))
    return manifest


class _Supply:
    """The documents of a source in a seeded order.

    They are spooled to a file, because packed files and tables cannot be read from the middle; memory holds only the
    position of each, 8 bytes.
    """

    def __init__(
        self, source: Source, seed: int, chats: ChatRenderer, spool: Path, progress: Progress
    ) -> None:
        self._chats, self._spool = chats, spool
        self._positions = array("Q")
        self.understanding = Understanding()
        with spool.open("wb") as stream:
            found = read_documents(source.path, source.division, self.understanding)
            for number, document in enumerate(found, start=1):
                if not document.is_blank:
                    if not self._positions:
                        with contextlib.suppress(CorpusError):  # the document's turn will come
                            self.understanding.example = chats.text_of(document)
                    self._positions.append(stream.tell())
                    stream.write(json.dumps(asdict(document)).encode() + b"\n")
                progress(f"reading {source.name}", number, 0)
        if not self._positions:
            raise CorpusError(f"{source.path} has no text; add documents to it or remove the source")
        with reading(source.path):
            digest = text_digest(source.path)
        self.facts: dict[str, Any] = {"name": source.name, "file": source.path.name, "sha256": digest}
        self.facts |= {"styles": dict(self.understanding.styles), "empty": self.understanding.empty}
        if self.understanding.division:
            self.facts["division"] = self.understanding.division
        self.facts |= {"weight": source.weight, "documents": len(self._positions), "ran_out": False}
        counts = ("duplicates", "near_duplicates", "taken", "tokens", "overlapping", "unusable")
        self.facts |= dict.fromkeys(counts, 0)
        # The seed includes the name, so that adding a source does not change the order of the others.
        random.Random(f"{seed} {source.name}").shuffle(self._positions)

    def _read(self, position: int) -> Document:
        with self._spool.open("rb") as stream:
            stream.seek(position)
            return Document(**json.loads(stream.readline()))

    def take_new(
        self, seen: set[bytes], leaves_out: Callable[[str], bool] | None = None
    ) -> tuple[Document, str] | None:
        """The next document that is no duplicate, with its text; None at the end; adds its hashes to `seen`."""
        while self._positions:
            document = self._read(self._positions.pop())
            text = self._chats.text_of(document)
            words = text.split()
            shingles = {_hash(words[start : start + 13]) for start in range(max(1, len(words) - 12))}
            if _hash(words) in seen:
                self.facts["duplicates"] += 1
            elif 2 * len(shingles & seen) > len(shingles):
                self.facts["near_duplicates"] += 1
            elif leaves_out and leaves_out(text):
                self.facts["overlapping"] += 1
            else:
                self.facts["taken"] += 1
                seen |= shingles | {_hash(words)}
                return document, text
        self.facts["ran_out"] = True
        return None


def _hash(words: Sequence[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
