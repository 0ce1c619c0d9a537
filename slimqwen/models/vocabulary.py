"""A byte-level BPE vocabulary: read from tokenizer.json, its tokens ranked by use and pruned to a size.

BPE forms a token from two parts, each part from two others, down to single bytes. A set of tokens is closed if it
contains the parts of each of its members. Text that needs a token outside a closed set is encoded with shorter tokens,
down to bytes. Text whose tokens are all in the set is encoded as before: all merges of these tokens are kept in the
same order, and removing merges that were never chosen changes no choice.

Tokens are ranked by how often BPE forms them on a text, as a final token or on the way to a longer one. Each time a
token is formed, the text gets one token shorter, and a token is formed no more often than its parts. So the best N
tokens are a closed set for every N, and of all closed sets of N tokens the one that encodes the text in the fewest
tokens (apart from merges between the remains of two broken tokens, which make the text shorter still).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, pre_tokenizers

from slimqwen.checkpoint.stored_file import refuse_pointer
from slimqwen.errors import SlimqwenError

Ids = npt.NDArray[np.int64]
"""Token ids, one dimension."""

_BYTES = frozenset(pre_tokenizers.ByteLevel.alphabet())
_BATCH = 2**20
"""Characters that are encoded at a time: an encoding takes about a hundred times the memory of its text."""


class VocabularyError(SlimqwenError):
    """A tokenizer.json cannot be read, or cannot be pruned to the requested size."""


@dataclass(frozen=True)
class Vocabulary:
    """A validated tokenizer.json.

    Attributes:
        state: content of the file, in the form in which the tokenizers library writes it.
        tokenizer: the tokenizer of that content.
        ids: token -> id, including added tokens.
        parts: id of a token -> ids of the two tokens that BPE joins last to form it. Bytes, and tokens that only a
            literal match yields, have no entry.
        needed: ids that every pruned form keeps: the bytes, all added tokens, the token of unknown bytes, the tokens of
            the post-processor.
    """

    state: Mapping[str, Any]
    tokenizer: Tokenizer
    ids: Mapping[str, int]
    parts: Mapping[int, tuple[int, int]]
    needed: frozenset[int]

    @property
    def rows(self) -> int:
        """Number of rows that an embedding needs: the largest id + 1."""
        return max(self.ids.values()) + 1


def read_vocabulary(file: Path) -> Vocabulary:
    """Read a tokenizer.json.

    Raises:
        VocabularyError: the file is missing, broken, or not a byte-level BPE.
        CorruptCheckpointError: it is a git-lfs pointer, or begins with a byte order mark.
    """
    return parse_vocabulary(_read_text(file), str(file))


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer.json of any kind, to encode whole texts.

    Raises:
        VocabularyError: the file is missing or broken.
        CorruptCheckpointError: it is a git-lfs pointer, or begins with a byte order mark.
    """
    return _parse_tokenizer(_read_text(file), str(file))


def _read_text(file: Path) -> str:
    try:
        refuse_pointer(file)
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VocabularyError(
            f"{file} cannot be read ({error}); make or download the checkpoint anew"
        ) from None


def _parse_tokenizer(text: str, name: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    # The tokenizers library raises plain Exception.
    except Exception as error:
        raise VocabularyError(
            f"{name} is no usable tokenizer.json ({error}); use that of the checkpoint"
        ) from None
    # A training may have saved these switched on: texts would be cut and padded as transformers and vLLM never do.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def parse_vocabulary(text: str, name: str) -> Vocabulary:
    """Read the content of a tokenizer.json; `name` names the file in errors.

    Raises:
        VocabularyError: the content is broken, or not a byte-level BPE.
    """
    tokenizer = _parse_tokenizer(text, name)
    # The library's own form has every section, and merges are pairs even if the file has "a b".
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    model = state["model"]
    problem = _why_not_byte_level(state, model)
    if problem:
        raise VocabularyError(f"{name}: {problem}; only a byte-level BPE vocabulary can be pruned")
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if len(set(ids.values())) != len(ids):
        raise VocabularyError(f"{name}: two tokens have the same id; give each token its own id")
    # SmolLM2 has no token for 21 bytes, most of which are not in UTF-8.
    needed = {ids[byte] for byte in _BYTES & model["vocab"].keys()}
    needed |= {ids[added["content"]] for added in state["added_tokens"]}
    if model["unk_token"] in ids:
        needed.add(ids[model["unk_token"]])

    def note(old: int) -> int:
        needed.add(old)
        return old

    _renumbered_processor(state["post_processor"], note)
    return Vocabulary(state, tokenizer, ids, _parts(ids, model["merges"]), frozenset(needed))


def count_tokens(vocabulary: Vocabulary, documents: Iterable[str]) -> Ids:
    """Count how often each token occurs in documents.

    Returns:
        Occurrences by token id, int64 [vocabulary.rows].
    """
    counts = np.zeros(vocabulary.rows, dtype=np.int64)
    for batch in _batches(documents):
        encodings = vocabulary.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids = [token for encoding in encodings for token in encoding.ids]
        counts += np.bincount(ids, minlength=vocabulary.rows)
    return counts


def select_tokens(vocabulary: Vocabulary, counts: Ids, size: int, needed: Iterable[int] = ()) -> Ids:
    """The closed set of exactly `size` tokens that encodes the counted text in the fewest tokens.

    Args:
        counts: occurrences by id, from `count_tokens`. Of tokens with equal counts those with smaller ids are kept.
        size: number of tokens to keep.
        needed: ids to keep in addition to `vocabulary.needed`.

    Returns:
        The kept ids, ascending; the new id of a kept token is its position in this array.

    Raises:
        VocabularyError: the vocabulary has fewer tokens than `size`, or has to keep more.
    """
    if size > len(vocabulary.ids):
        raise VocabularyError(
            f"the tokenizer has only {len(vocabulary.ids)} tokens, not {size}; keep fewer tokens"
        )
    lengths = np.fromiter(map(len, vocabulary.ids), dtype=np.int64)
    ids = np.fromiter(vocabulary.ids.values(), dtype=np.int64)
    shortest_first = ids[np.lexsort((ids, lengths))]
    value: list[float] = counts.tolist()
    for token in (*vocabulary.needed, *needed):
        value[token] = math.inf
    order = list(range(len(value)))
    for token in reversed(shortest_first.tolist()):
        for part in vocabulary.parts.get(token, ()):
            value[part] += value[token]
            # Of tokens of equal value, parts come before the tokens that they form, whatever their ids are.
            order[part] = min(order[part], order[token])
    # The sort is stable: tokens that are otherwise equal stay ordered by length, so parts come first here too.
    ranked = shortest_first[np.lexsort((np.array(order)[shortest_first], -np.array(value)[shortest_first]))]
    forced = sum(map(math.isinf, value))
    if forced > size:
        raise VocabularyError(
            f"{size} tokens are too few: {forced} are always kept, the single bytes and the added tokens with their "
            f"parts; keep at least {forced}"
        )
    return np.sort(ranked[:size])


def prune_tokenizer(vocabulary: Vocabulary, kept_ids: Ids) -> str:
    """The content of tokenizer.json with only the tokens `kept_ids` (`select_tokens`); all else stays the same.

    Raises:
        VocabularyError: the tokenizers library would number the kept tokens differently.
    """
    new = {old: position for position, old in enumerate(kept_ids.tolist())}
    state, model = dict(vocabulary.state), dict(vocabulary.state["model"])
    tokens = {token: new[old] for token, old in model["vocab"].items() if old in new}
    model["vocab"] = dict(sorted(tokens.items(), key=lambda item: item[1]))
    model["merges"] = [
        [left, right] for left, right in model["merges"] if tokens.keys() >= {left, right, left + right}
    ]
    state["model"] = model
    state["added_tokens"] = [{**added, "id": new[added["id"]]} for added in state["added_tokens"]]
    state["post_processor"] = _renumbered_processor(state["post_processor"], new.__getitem__)
    text = json.dumps(state, indent=2, ensure_ascii=False) + "\n"
    if Tokenizer.from_str(text).get_vocab() != {
        token: new[old] for token, old in vocabulary.ids.items() if old in new
    }:
        raise VocabularyError(
            "tokenizer.json: added tokens that are not in the vocabulary have ids between those of other tokens; give "
            "them the largest ids"
        )
    return text


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    length = 0
    for document in documents:
        batch.append(document)
        length += len(document)
        if length >= _BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _why_not_byte_level(state: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    if model["type"] != "BPE":
        return f"its model is {model['type']}, not BPE"
    if model["byte_fallback"]:
        return "it falls back to bytes as SentencePiece does"
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return "it marks the inside or the end of words in its tokens"
    outer = state["pre_tokenizer"] or {}
    if not any(part["type"] == "ByteLevel" for part in outer.get("pretokenizers", [outer] if outer else [])):
        return "its pre-tokenizer does not turn text into bytes"
    return None


def _parts(ids: Mapping[str, int], merges: list[list[str]]) -> dict[int, tuple[int, int]]:
    ranks = {(first, right): rank for rank, (first, right) in enumerate(merges)}
    last = {first + right: (first, right) for first, right in ranks}
    if len(last) < len(ranks):
        # Vocabularies converted from tiktoken list every pair that forms a token: find the pair that BPE joins.
        last = {token: pair for token in last if (pair := _joined_last(token, ranks))}
    return {ids[token]: (ids[first], ids[right]) for token, (first, right) in last.items()}


def _joined_last(token: str, ranks: Mapping[tuple[str, str], int]) -> tuple[str, str] | None:
    """The pair that BPE joins last when it encodes the text of a token; None if BPE does not form the token."""
    pieces = list(token)
    while len(pieces) > 1:
        rank, position = min(
            (ranks.get(pair, math.inf), position) for position, pair in enumerate(pairwise(pieces))
        )
        if math.isinf(rank):
            return None
        if len(pieces) == 2:
            return pieces[0], pieces[1]
        pieces[position : position + 2] = [pieces[position] + pieces[position + 1]]
    return None


def _renumbered_processor(
    processor: Mapping[str, Any] | None, new_id: Callable[[int], int]
) -> dict[str, Any] | None:
    """The post-processor, which adds tokens around a text, with new ids for these tokens."""
    if processor is None:
        return None
    match processor["type"]:
        case "ByteLevel":
            return dict(processor)
        case "Sequence":
            inner = [_renumbered_processor(part, new_id) for part in processor["processors"]]
            return {**processor, "processors": inner}
        case "TemplateProcessing":
            tokens = {
                name: {**token, "ids": [new_id(old) for old in token["ids"]]}
                for name, token in processor["special_tokens"].items()
            }
            return {**processor, "special_tokens": tokens}
        case "BertProcessing" | "RobertaProcessing":
            ends = {end: [processor[end][0], new_id(processor[end][1])] for end in ("sep", "cls")}
            return {**processor, **ends}
        case kind:
            raise VocabularyError(
                f"tokenizer.json has the post-processor {kind}, whose ids cannot be changed; keep the whole vocabulary"
            )
