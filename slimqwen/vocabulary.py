"""A byte-level BPE vocabulary: read from tokenizer.json, its tokens ranked by use, cut to the ones worth a row.

BPE builds a token from two parts, those from theirs, down to single bytes. A set of tokens that holds the parts of
each of its members is closed: whatever text then needs a token outside the set is spelt with shorter ones, down to
bytes if need be, and text whose tokens are all in the set is spelt as before, because every merge on the way to them
is still there and in the same order (taking away merges that were never chosen changes no choice).

Tokens are ranked by how often BPE forms them on a text, finally or on the way to a longer token. Each forming makes
the text one token shorter, and a token is formed no more often than its parts, so the best N tokens are a closed set
for every N, and of all closed sets of N tokens the one that spells the text in fewest tokens (but for merges between
what is left of two broken tokens, which make it shorter still).
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

from slimqwen.errors import SlimqwenError

Ids = npt.NDArray[np.int64]
"""Token ids, one dimension."""

_BYTES = frozenset(pre_tokenizers.ByteLevel.alphabet())
_BATCH = 2**20
"""Characters that are encoded together: an encoding takes some hundred times the memory of its text."""


class UnsupportedTokenizerError(SlimqwenError):
    """A tokenizer.json that is no byte-level BPE, or has a part whose token ids cannot be renumbered."""


class VocabularySizeError(SlimqwenError):
    """No closed vocabulary of the wanted size exists."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer.json that was read and checked.

    Attributes:
        state: the file's content, in the form in which the tokenizers library writes it.
        tokenizer: the same, able to encode.
        ids: the id of every token, added tokens included.
        parts: id -> the ids of the two tokens that BPE joins last to form it. Bytes have none, nor have tokens
            that only a literal match yields.
        needed: the ids that no pruned form lacks: the 256 bytes, all added tokens, those of the post-processor.
    """

    state: Mapping[str, Any]
    tokenizer: Tokenizer
    ids: Mapping[str, int]
    parts: Mapping[int, tuple[int, int]]
    needed: frozenset[int]

    @property
    def rows(self) -> int:
        """How many rows an embedding needs at least: the largest id + 1."""
        return max(self.ids.values()) + 1


def read(file: Path) -> Vocabulary:
    """Read a tokenizer.json.

    Raises:
        UnsupportedTokenizerError: it is missing, broken, or not a byte-level BPE with all 256 bytes.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedTokenizerError(f"{file}: cannot be read ({error}); a checkpoint needs it") from None
    return parse(text, str(file))


def parse(text: str, place: str) -> Vocabulary:
    """Read the content of a tokenizer.json; place is what errors name.

    Raises:
        UnsupportedTokenizerError: as `read`.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    # The tokenizers library raises plain Exception.
    except Exception as error:
        raise UnsupportedTokenizerError(f"{place}: not a usable tokenizer.json ({error})") from None
    # The library's own form of it: no part left out, merges as pairs even where an older file has "a b".
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    model = state["model"]
    problem = _why_not_byte_level(state, model)
    if problem:
        raise UnsupportedTokenizerError(f"{place}: {problem}; only byte-level BPE vocabularies can be pruned")
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if len(set(ids.values())) != len(ids):
        raise UnsupportedTokenizerError(f"{place}: two tokens have the same id; mend the file")
    needed = {ids[byte] for byte in _BYTES} | {ids[added["content"]] for added in state["added_tokens"]}

    def note(old: int) -> int:
        needed.add(old)
        return old

    _renumbered_processor(state["post_processor"], note)
    return Vocabulary(state, tokenizer, ids, _parts(ids, model["merges"]), frozenset(needed))


def count(vocabulary: Vocabulary, documents: Iterable[str]) -> Ids:
    """How often each token occurs when documents are encoded.

    Returns:
        counts by id, shape [vocabulary.rows].
    """
    counts = np.zeros(vocabulary.rows, dtype=np.int64)
    for batch in _batches(documents):
        encodings = vocabulary.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids = [token for encoding in encodings for token in encoding.ids]
        counts += np.bincount(ids, minlength=vocabulary.rows)
    return counts


def choose(vocabulary: Vocabulary, counts: Ids, size: int, needed: Iterable[int] = ()) -> Ids:
    """The closed set of exactly size tokens that is worth most.

    Args:
        vocabulary: the tokens to choose from.
        counts: how often each occurs, by id; see `count`. Equal tokens are taken by id, small ones first.
        size: how many to keep.
        needed: ids to keep in addition to `vocabulary.needed`.

    Returns:
        the ids kept, ascending: a kept token's new id is its place.

    Raises:
        VocabularySizeError: there are fewer tokens than size, or more that must be kept.
    """
    if size > len(vocabulary.ids):
        raise VocabularySizeError(
            f"the tokenizer has {len(vocabulary.ids)} tokens, not {size}; ask for fewer"
        )
    lengths = np.fromiter(map(len, vocabulary.ids), dtype=np.int64)
    ids = np.fromiter(vocabulary.ids.values(), dtype=np.int64)
    shortest_first = ids[np.lexsort((ids, lengths))]
    worth: list[float] = counts.tolist()
    for token in (*vocabulary.needed, *needed):
        worth[token] = math.inf
    turn = list(range(len(worth)))
    for token in reversed(shortest_first.tolist()):
        for part in vocabulary.parts.get(token, ()):
            worth[part] += worth[token]
            # Among tokens of equal worth parts come first, in whatever order a vocabulary numbers them.
            turn[part] = min(turn[part], turn[token])
    # The sort keeps the order of length where all else is equal: again parts first.
    ranked = shortest_first[np.lexsort((np.array(turn)[shortest_first], -np.array(worth)[shortest_first]))]
    forced = sum(map(math.isinf, worth))
    if forced > size:
        raise VocabularySizeError(
            f"bytes, added tokens and their parts are {forced} tokens; keep at least these"
        )
    return np.sort(ranked[:size])


def prune(vocabulary: Vocabulary, kept: Ids) -> str:
    """The tokenizer.json of the kept tokens alone; what it does not concern stays as it was.

    Args:
        vocabulary: the whole one.
        kept: from `choose`.

    Raises:
        UnsupportedTokenizerError: the library numbers the result's tokens in another way than kept does.
    """
    new = {old: place for place, old in enumerate(kept.tolist())}
    state, model = dict(vocabulary.state), dict(vocabulary.state["model"])
    tokens = {token: new[old] for token, old in model["vocab"].items() if old in new}
    model["vocab"] = dict(sorted(tokens.items(), key=lambda item: item[1]))
    model["merges"] = [
        [left, right] for left, right in model["merges"] if tokens.keys() >= {left, right, left + right}
    ]
    state["model"] = model
    state["added_tokens"] = [{**added, "id": new[added["id"]]} for added in state["added_tokens"]]
    state["post_processor"] = _renumbered_processor(state["post_processor"], new.__getitem__)
    if state["padding"]:
        state["padding"] = {**state["padding"], "pad_id": new[state["padding"]["pad_id"]]}
    text = json.dumps(state, indent=2, ensure_ascii=False) + "\n"
    if Tokenizer.from_str(text).get_vocab() != {
        token: new[old] for token, old in vocabulary.ids.items() if old in new
    }:
        raise UnsupportedTokenizerError(
            "tokenizer.json: added tokens are numbered in between others yet not in the vocabulary; renumber them"
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
        return f"its model is {model['type']}"
    if model["byte_fallback"]:
        return "it falls back to bytes as SentencePiece does"
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return "it marks the inside or the end of words"
    outer = state["pre_tokenizer"] or {}
    if not any(one["type"] == "ByteLevel" for one in outer.get("pretokenizers", [outer] if outer else [])):
        return "its pre-tokenizer does not turn text into bytes"
    missing = len(_BYTES - model["vocab"].keys())
    return f"{missing} of the 256 bytes have no token" if missing else None


def _parts(ids: Mapping[str, int], merges: list[list[str]]) -> dict[int, tuple[int, int]]:
    ranks = {(left, right): rank for rank, (left, right) in enumerate(merges)}
    last = {left + right: (left, right) for left, right in ranks}
    if len(last) < len(ranks):
        # Vocabularies that come from tiktoken list every pair that gives a token: find the one that BPE takes.
        last = {token: pair for token in last if (pair := _joined_last(token, ranks))}
    return {ids[token]: (ids[left], ids[right]) for token, (left, right) in last.items()}


def _joined_last(token: str, ranks: Mapping[tuple[str, str], int]) -> tuple[str, str] | None:
    """The pair that BPE joins last when it encodes a token's own text; None where it does not arrive at it."""
    pieces = list(token)
    while len(pieces) > 1:
        rank, place = min((ranks.get(pair, math.inf), place) for place, pair in enumerate(pairwise(pieces)))
        if math.isinf(rank):
            return None
        if len(pieces) == 2:
            return pieces[0], pieces[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return None


def _renumbered_processor(
    processor: Mapping[str, Any] | None, new_id: Callable[[int], int]
) -> dict[str, Any] | None:
    """What adds tokens around a text, with their ids replaced."""
    if processor is None:
        return None
    match processor["type"]:
        case "ByteLevel":
            return dict(processor)
        case "Sequence":
            inner = [_renumbered_processor(one, new_id) for one in processor["processors"]]
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
        case other:
            raise UnsupportedTokenizerError(
                f"its post-processor is {other}, whose token ids are not known here"
            )
