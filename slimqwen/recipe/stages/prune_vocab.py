"""The stage `prune_vocab`: makes vocabulary, embedding and lm_head smaller; every text still round-trips.

`slimqwen.models.vocabulary` decides which tokens stay, so that every text can still be encoded. This stage removes rows
of the embedding, of lm_head and of a draft head (`slimqwen.checkpoint.draft_head`), and changes the vocabulary size and
the token ids in every settings file. All other tensors, also the rest of `mtp.*`, pass through byte for byte. The
checkpoint is read once, front to back, in blocks. Files that repeat tokenizer.json, as vocab.json does, are left out.

vocab_map.json beside the checkpoint is for clients that send token ids:

    {"schema": "vocab_map/1",
     "old_vocab_size": rows of the embedding before, "new_vocab_size": rows after,
     "new_to_old": [old id of new id 0, of new id 1, …]}   # ascending; an old id that is not listed has no row

Old ids are those of the stage's input checkpoint. Every twentieth document of the corpus is held out;
prune_vocab.json beside the checkpoint states the share of the held-out tokens that stay.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, field_validator

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import VOCAB_MAP, carry_side_files, side_files
from slimqwen.checkpoint.tensors import (
    NewTensor,
    TensorInfo,
    from_ids,
    list_tensors,
    rewrite,
    selected_rows,
)
from slimqwen.formats import BY_ROW, BY_WEIGHT
from slimqwen.models import vocabulary
from slimqwen.models.outline import Outline
from slimqwen.models.vocabulary import Ids, Vocabulary
from slimqwen.progress import Progress, silent
from slimqwen.recipe.stage import D, Facts, Fault, Needs, Parameters, Stage, StageError
from slimqwen.recipe.text_check import inspect_text
from slimqwen.text.chats import read_texts
from slimqwen.text.corpus import SELF, TextSource
from slimqwen.text.files import CorpusError

REPORT = "prune_vocab.json"
"""File beside the checkpoint that states the effect of pruning on the held-out documents."""

HELD_OUT_EVERY = 20
"""One of this many documents of the corpus is held out, the last one."""

ROW_MULTIPLE = 64
"""Engines and quantised kernels need a multiple of this many rows."""

_REPETITIONS = (
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "vocab.txt",
    "tokenizer.model",
    "qwen.tiktoken",
)
"""Files that repeat tokenizer.json in older forms, with the old ids."""

_ID_KEY = re.compile(r"(token_ids?|suppress_tokens|bad_words_ids)$")
_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head|draft_head)\.(?!token_ids)(\w+)$")
_IMPORTS_BYTES = 300 * 2**20
_PUBLISHED_TOKENIZER_BYTES = 12 * 2**20
"""Size of Qwen3.5's tokenizer.json, bytes, for an estimate if the file is not here."""

_COUNTED_BYTES_PER_SECOND = 2e6
_TOKENIZER_FACTOR = 30
"""Bytes of memory per byte of tokenizer.json, for its JSON in Python, two tokenizers and the ranking."""


def _checked_size(size: object) -> object:
    share = float(size[:-1]) if isinstance(size, str) and re.fullmatch(r"\d+(\.\d+)?%", size) else 0.0
    if not 0 < share <= 100 and not (type(size) is int and size >= ROW_MULTIPLE):
        raise ValueError(f"write a number of tokens, {ROW_MULTIPLE} or more, or a share such as 50%")
    return size


VocabularySize = Annotated[int | str, BeforeValidator(_checked_size)]
"""Tokens, or a share of the vocabulary such as 50%."""


class CountedText(TextSource):
    """The text whose token counts decide which tokens stay.

    Attributes:
        documents: largest number of documents to read.
    """

    documents: Annotated[int, Field(ge=1)] = 20_000

    @field_validator("path")
    @classmethod
    def _is_what_users_write(cls, path: Path) -> Path:
        if path == SELF:
            raise ValueError(
                "a model's own text does not say what its users write, and whole languages would go; write `general`, "
                "or a file of texts like theirs"
            )
        return path


class PruneVocabParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        size: number of tokens to keep, or a share such as 50%; rounded up to a multiple of 64.
        corpus: text whose token counts decide which tokens stay.
    """

    size: Annotated[VocabularySize, Field(examples=["50%"])]
    corpus: CountedText = Field(default={})  # type: ignore[assignment]  # validated, as every default


def prune_vocabulary(
    source: Path, destination: Path, parameters: PruneVocabParameters, progress: Progress
) -> Facts:
    """Write source to destination with a smaller vocabulary.

    Raises:
        StageError: tables, config and tokenizer contradict each other, or lm_head is packed in an unknown way.
        VocabularyError: the tokenizer is not a byte-level BPE, has fewer tokens than `size`, or more tokens than `size`
            have to stay.
        CorpusError: the text is missing or malformed.
    """
    progress("reading the tokenizer", 0, 0)
    config = checkpoint.read_config(source)
    rows: int = checkpoint.text_config(config)["vocab_size"]
    stored = list_tensors(source)
    whole = {name: info for name, info in stored.items() if not name.startswith(draft_head.PREFIX)}
    tables = _tables(source, whole, rows)
    draft_ids = draft_head.read_token_ids(stored, rows)
    words = vocabulary.read_vocabulary(source / "tokenizer.json")
    if words.rows > rows:
        raise StageError(
            f"{source}: vocab_size is {rows}, but its tokenizer has ids up to {words.rows - 1}; correct its config.json"
        )
    held_out: list[str] = []
    counts = vocabulary.count_tokens(words, counted_documents(parameters.corpus, source, held_out, progress))
    if not counts.any():
        raise CorpusError(f"{parameters.corpus.path}: no text in it; add documents")
    token_ids = kept_ids(source, words, counts, rows_of(parameters.size, rows))
    tokenizer = vocabulary.prune_tokenizer(words, token_ids)
    if draft_ids is not None:
        draft_rows = np.flatnonzero(np.isin(draft_ids, token_ids))
        new_draft_ids = np.searchsorted(token_ids, draft_ids[draft_rows])
        drafted = {name: info for name, info in stored.items() if name.startswith(draft_head.PREFIX)}
        for name, prune in _tables(source, drafted, len(draft_ids)).items():
            tables[name] = lambda _, prune=prune: prune(draft_rows)  # type: ignore[misc]
        tables[draft_head.TOKEN_IDS] = lambda _: from_ids(new_draft_ids)
        config = draft_head.announced(config, len(draft_rows))

    def change(name: str, info: TensorInfo) -> dict[str, NewTensor] | None:
        return {name: tables[name](token_ids)} if name in tables else None

    rewrite(source, destination, change, progress)
    _write_settings(source, destination, token_ids, config)
    (destination / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    new_to_old = {"old_vocab_size": rows, "new_vocab_size": len(token_ids), "new_to_old": token_ids.tolist()}
    _write_json(destination / VOCAB_MAP, {"schema": "vocab_map/1", **new_to_old}, indent=None)
    facts: Facts = {
        "rows_before": rows,
        "rows_after": len(token_ids),
        "counted_tokens": int(counts.sum()),
        "held_out_documents": len(held_out),
    }
    if held_out:
        pruned = vocabulary.parse_vocabulary(tokenizer, f"{destination / 'tokenizer.json'}")
        facts |= measure_coverage(words, pruned, token_ids, held_out)
    _write_json(destination / REPORT, {"schema": "prune_vocab/1", **facts})
    return facts


def measure_coverage(
    words: Vocabulary, pruned: Vocabulary, token_ids: Ids, texts: Sequence[str]
) -> dict[str, int | float]:
    """Measure the effect of pruning on texts.

    Args:
        words: vocabulary before pruning.
        pruned: vocabulary after pruning.
        token_ids: ids of `words` that `pruned` keeps.

    Returns:
        held_out_tokens: tokens of the texts before pruning; coverage: share of these tokens whose ids are kept;
        inflation: tokens after pruning for each token before.
    """
    before, after = vocabulary.count_tokens(words, texts), vocabulary.count_tokens(pruned, texts)
    total = int(before.sum())
    return {
        "held_out_tokens": total,
        "coverage": round(float(before[token_ids].sum()) / total, 6),
        "inflation": round(float(after.sum()) / total, 6),
    }


def needs(outline: Outline, parameters: PruneVocabParameters) -> Needs:
    """Needs: disk of at most the input's size; memory for libraries and tokenizer, because tensors pass in blocks."""
    tokenizer, corpus = outline.folder / "tokenizer.json", parameters.corpus.path
    length = tokenizer.stat().st_size if tokenizer.is_file() else _PUBLISHED_TOKENIZER_BYTES
    counted = corpus.stat().st_size if corpus.is_file() else 0
    memory = _IMPORTS_BYTES + _TOKENIZER_FACTOR * length
    return Needs(outline.disk_bytes, memory, fixed_seconds=5 + counted / _COUNTED_BYTES_PER_SECOND)


def inspect_pruning(outline: Outline, parameters: PruneVocabParameters) -> Iterator[Fault]:
    """Find faults: a size that leaves nothing to prune, and faults of the text."""
    tokens, size = outline.num_tokens, rows_of(parameters.size, outline.text["vocab_size"])
    if tokens is not None and size > tokens:
        yield Fault(
            f"the vocabulary of {outline.name} has only {tokens} tokens, but size is {size}; choose a smaller size",
            "size",
        )
    yield from inspect_text(outline, "corpus", parameters.corpus)


def data(parameters: PruneVocabParameters) -> dict[str, str]:
    """Digests of the text whose tokens are counted."""
    return parameters.corpus.digests("corpus")


def _tables(
    source: Path, stored: Mapping[str, TensorInfo], rows: int
) -> dict[str, Callable[[Ids], NewTensor]]:
    """For every tensor with a row per token, a function that prunes it to given ids."""
    tables: dict[str, Callable[[Ids], NewTensor]] = {}
    for name, info in stored.items():
        match = _TABLE.search(name)
        if match is None:
            continue
        if match[1] in ("bias", *BY_ROW) and info.shape[:1] == (rows,):
            tables[name] = partial(selected_rows, info)
        elif match[1] == "weight_shape":
            tables[name] = partial(_shape, info)
        elif match[1] in BY_WEIGHT or info.elements == 1:
            continue
        else:
            raise StageError(
                f"{source}: {name} {list(info.shape)} cannot be pruned from {rows} rows; put prune_vocab before the "
                "stages that quantise"
            )
    if not tables:
        raise StageError(f"{source} has neither embed_tokens nor lm_head; choose a language model")
    return tables


def _shape(info: TensorInfo, kept_ids: Ids) -> NewTensor:
    """The tensor in which compressed-tensors stores the unpacked shape, for the kept rows."""
    _, columns = np.frombuffer(b"".join(info.chunks()), "<i8")
    return from_ids(np.array([len(kept_ids), columns]))


def counted_documents(
    corpus: CountedText, source: Path, held_out: list[str], progress: Progress = silent
) -> Iterator[str]:
    """Yield the documents whose tokens are counted; append the held-out ones to `held_out`."""
    for number, document in enumerate(itertools.islice(read_texts(corpus.path, source), corpus.documents), 1):
        progress("counting tokens", number, corpus.documents)
        if number % HELD_OUT_EVERY:
            yield document
        else:
            held_out.append(document)


def kept_ids(source: Path, words: Vocabulary, counts: Ids, size: int) -> Ids:
    """Select the ids to keep by `select_tokens` for the rounded size, with every id that source's settings name."""
    named = named_ids(source)
    unknown = named - set(words.ids.values())
    if unknown:
        raise StageError(
            f"{source}: its settings name the token id {min(unknown)}, unknown to its tokenizer; correct the settings"
        )
    return vocabulary.select_tokens(words, counts, stored_rows(size), named)


def named_ids(source: Path) -> set[int]:
    """The token ids that a checkpoint's settings files name: end and begin of text, padding, image tokens."""
    named: set[int] = set()

    def note(old: int) -> int:
        named.add(old)
        return old

    _renumbered([checkpoint.read_config(source), *_settings(source).values()], note)
    return named


def _settings(source: Path) -> dict[str, Any]:
    """Read the JSON files beside the checkpoint that may name token ids, by file name."""
    settings = {}
    for name, path in side_files(source).items():
        if name.endswith(".json") and name not in (*_REPETITIONS, "tokenizer.json", VOCAB_MAP):
            try:
                settings[name] = json.loads(path.read_bytes())
            except ValueError as error:
                raise StageError(f"{path} is not JSON ({error}); correct or remove it") from None
    return settings


def _write_settings(source: Path, destination: Path, kept_ids: Ids, config: Mapping[str, Any]) -> None:
    carry_side_files(source, destination)
    for name in _REPETITIONS:
        (destination / name).unlink(missing_ok=True)
    new_id = dict(zip(kept_ids.tolist(), range(len(kept_ids)), strict=True)).__getitem__
    for name, settings in _settings(source).items():
        if (renumbered := _renumbered(settings, new_id)) != settings:
            _write_json(destination / name, renumbered)
    resized = _renumbered(config, new_id)
    for part in (resized, resized.get("text_config", {})):
        if "vocab_size" in part:
            part["vocab_size"] = len(kept_ids)
    write_config(destination, resized)


def _renumbered(settings: Any, new_id: Callable[[int], int]) -> Any:
    """The same JSON settings with every token id replaced by `new_id` of it."""
    if isinstance(settings, list):
        return [_renumbered(item, new_id) for item in settings]
    if not isinstance(settings, dict):
        return settings
    renumbered = {}
    for key, value in settings.items():
        if key == "added_tokens_decoder":
            renumbered[key] = {str(new_id(int(old))): token for old, token in value.items()}
        else:
            renumbered[key] = (_renumbered_ids if _ID_KEY.search(key) else _renumbered)(value, new_id)
    return renumbered


def _renumbered_ids(value: Any, new_id: Callable[[int], int]) -> Any:
    if isinstance(value, list):
        return [_renumbered_ids(item, new_id) for item in value]
    # Some configs write -1 for none.
    return new_id(value) if isinstance(value, int) and value >= 0 else value


def _write_json(file: Path, content: Any, indent: int | None = 2) -> None:
    file.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def stored_rows(size: int) -> int:
    """Number of rows that are kept for `size` tokens: the next multiple of `ROW_MULTIPLE`."""
    return -(-size // ROW_MULTIPLE) * ROW_MULTIPLE


def rows_of(size: int | str, vocab_size: int) -> int:
    """Number of rows that are kept for a `VocabularySize` of a vocabulary of `vocab_size` tokens."""
    return stored_rows(size if isinstance(size, int) else round(vocab_size * float(size[:-1]) / 100))


def reshape(shape: D, parameters: PruneVocabParameters, /) -> D:
    """The dimensions with fewer rows in embedding and output head."""
    return shape.with_vocabulary(rows_of(parameters.size, shape.text["vocab_size"]))


STAGE = Stage(
    name="prune_vocab",
    parameters=PruneVocabParameters,
    run=prune_vocabulary,
    needs=needs,
    inspect=inspect_pruning,
    summarise=lambda facts: (
        f"{facts['rows_after']} of {facts['rows_before']} rows kept"
        + (f", which cover {facts['coverage']:.1%} of the held-out text" if "coverage" in facts else "")
    ),
    data=data,
    reshape=reshape,
    changes=lambda _: (_TABLE.pattern, re.escape(draft_head.PREFIX)),
)
