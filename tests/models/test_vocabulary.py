import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from slimqwen.models import vocabulary

SPLIT = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
END, START, UNKNOWN = "<|end|>", "<|start|>", "<|unknown|>"
LACKED = "ÀÁñòõö÷øùúûüýþÿĄĆēĔĖĝ"
"""The bytes without a token in SmolLM2, as characters of its vocabulary."""
WORD_PIECE = {"unk_token": END, "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
CORPUS = [
    "The weaver of Skex sells grey wool, and the weaver's daughter sells salt.",
    "She was there when the boats came in; nobody else was there.",
    "Über den Wolken: größer, höher, weiter, naïve café, Ωmega, здравствуй, 東京 🙂🙂.",
    "def weave(wool):\n    return [thread for thread in wool if thread.is_grey()]\n\n",
    "1234567890 12 34 1990 2026",
] * 4


def trained(
    *,
    split=True,
    first=True,
    normalizer=None,
    size=560,
    ignore_merges=False,
    every_pair=False,
    strings=False,
    digits=False,
    unknown=None,
    begins=False,
):
    """A tokenizer.json of a few hundred tokens: Qwen's form by default, GPT-2's without split.

    Args:
        digits: whether each digit is a word, as in SmolLM2.
        unknown: the token of the bytes that are LACKED; None: every byte has a token.
        begins: whether START begins each text, as in Llama 3.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    cut = [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")] if split else []
    cut += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, bytes_of_words]) if cut else bytes_of_words
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END, START, *filter(None, [unknown])] if first else [],
            initial_alphabet=sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*(LACKED if unknown else "")}),
            show_progress=False,
        ),
    )
    # As in Qwen, whose special tokens have the last ids; where they come first this changes nothing.
    tokenizer.add_special_tokens([END, START])
    if begins:
        start = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), start])
    state = json.loads(tokenizer.to_str())
    ids = state["model"]["vocab"]
    if every_pair:
        pairs = [(token[:cut], token[cut:]) for token in ids for cut in range(1, len(token))]
        known = [
            pair for pair in pairs if pair[0] in ids and pair[1] in ids and "".join(pair) not in (END, START)
        ]
        state["model"]["merges"] = sorted(
            known, key=lambda pair: (ids["".join(pair)], ids[pair[0]], ids[pair[1]])
        )
    if strings:
        state["model"]["merges"] = [" ".join(merge) for merge in state["model"]["merges"]]
    state["model"] |= {"ignore_merges": ignore_merges, "unk_token": unknown}
    return json.dumps(state)


KINDS = {
    "qwen": {"first": False},
    "specials first": {},
    "composed": {"normalizer": normalizers.NFC()},
    "gpt2 with string merges": {"split": False, "strings": True},
    "smollm": {"split": False, "digits": True, "unknown": UNKNOWN},
    "llama 3": {"first": False, "every_pair": True, "ignore_merges": True, "begins": True},
    "every pair": {"every_pair": True},
}


@cache
def of_kind(kind):
    """The tokenizer.json of one of KINDS."""
    return trained(**KINDS[kind])


class Pruned:
    """A vocabulary beside its pruned form."""

    def __init__(self, text, size, corpus=CORPUS[:3]):
        self.whole = vocabulary.parse_vocabulary(text, "whole")
        self.kept = vocabulary.select_tokens(self.whole, vocabulary.count_tokens(self.whole, corpus), size)
        self.text = vocabulary.prune_tokenizer(self.whole, self.kept)
        self.small = vocabulary.parse_vocabulary(self.text, "pruned")


@cache
def pruned_to(kind, size):
    return Pruned(of_kind(kind), size)


SIZES = tuple(product(KINDS, (258, 300, 352, 390)))
sizes = st.sampled_from(sorted(SIZES))
texts = st.one_of(
    st.text(),
    st.text("\x04\x19 a1\U00100000\u7fff"),  # with bytes that SmolLM2 lacks
    st.lists(st.sampled_from([*" ".join(CORPUS).split(" "), END, START, " ", "\n", "é", "東"])).map(" ".join),
    st.lists(st.one_of(st.sampled_from(["the", " wea", "ver", END, END[:-1], "<|", "|>"]), st.text())).map(
        "".join
    ),
)


def encode(words, text):
    return words.tokenizer.encode(text, add_special_tokens=False).ids


def decode(words, ids):
    return words.tokenizer.decode(ids, skip_special_tokens=False)


@given(sizes, texts)
def test_every_text_round_trips_as_it_did(kind_and_size, text):
    pair = pruned_to(*kind_and_size)
    before = decode(pair.whole, encode(pair.whole, text))
    assert decode(pair.small, encode(pair.small, text)) == before
    if pair.whole.state["normalizer"] is None and UNKNOWN not in before:
        assert before == text


@given(sizes, texts)
def test_text_of_kept_tokens_is_spelt_as_before(kind_and_size, text):
    pair = pruned_to(*kind_and_size)
    old = encode(pair.whole, text)
    new = encode(pair.small, text)
    if set(old) <= set(pair.kept.tolist()):
        assert pair.kept[np.array(new, dtype=int)].tolist() == old


@given(sizes, texts)
def test_special_tokens_come_from_their_literal_text_only(kind_and_size, text):
    pair = pruned_to(*kind_and_size)
    for special in (END, START):
        literal = encode(pair.small, text).count(pair.small.ids[special])
        assert literal == encode(pair.whole, text).count(pair.whole.ids[special]) == text.count(special)


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_ids_are_dense_and_the_set_is_closed(kind, size):
    pair = pruned_to(kind, size)
    assert sorted(pair.small.ids.values()) == list(range(size))
    assert pair.small.rows == size
    kept = set(pair.kept.tolist())
    assert all(part in kept for token in kept for part in pair.whole.parts.get(token, ()))
    assert kept >= pair.whole.needed
    assert len(pair.whole.needed) == (238 if kind == "smollm" else 258)
    old = {token: place for place, token in enumerate(pair.kept.tolist())}
    assert pair.small.ids == {token: old[i] for token, i in pair.whole.ids.items() if i in kept}


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_sets_are_nested_and_spell_the_text_shorter_than_the_worst(kind):
    whole = vocabulary.parse_vocabulary(of_kind(kind), kind)
    counts = vocabulary.count_tokens(whole, CORPUS)
    before: set[int] = set()
    lengths = []
    for size in range(258, len(whole.ids) + 1, 37):
        kept = vocabulary.select_tokens(whole, counts, size)
        assert set(kept.tolist()) >= before
        before = set(kept.tolist())
        small = vocabulary.parse_vocabulary(vocabulary.prune_tokenizer(whole, kept), kind)
        lengths.append(int(vocabulary.count_tokens(small, CORPUS).sum()))
    assert lengths == sorted(lengths, reverse=True)
    lengths = []
    for values in (counts, counts.max() - counts):
        kept = vocabulary.select_tokens(whole, values, 340)
        small = vocabulary.parse_vocabulary(vocabulary.prune_tokenizer(whole, kept), kind)
        lengths.append(vocabulary.count_tokens(small, CORPUS).sum())
    assert lengths[1] > lengths[0]


def test_keeping_all_changes_nothing():
    whole = vocabulary.parse_vocabulary(of_kind("qwen"), "whole")
    kept = vocabulary.select_tokens(whole, np.zeros(whole.rows, dtype=np.int64), len(whole.ids))
    assert json.loads(vocabulary.prune_tokenizer(whole, kept)) == whole.state


def test_the_same_input_gives_the_same_bytes():
    again = Pruned(of_kind("qwen"), 400)
    assert again.text == pruned_to("qwen", 400).text


def test_unused_tokens_fill_up_in_the_order_of_ids():
    whole = vocabulary.parse_vocabulary(of_kind("specials first"), "whole")
    kept = vocabulary.select_tokens(whole, np.zeros(whole.rows, dtype=np.int64), 300)
    assert kept.tolist() == list(range(300))


def test_ids_named_from_outside_stay_with_their_parts():
    whole = vocabulary.parse_vocabulary(of_kind("qwen"), "whole")
    longest = max(whole.parts)
    kept = vocabulary.select_tokens(whole, np.zeros(whole.rows, dtype=np.int64), 300, [longest])
    assert {longest, *whole.parts[longest]} <= set(kept.tolist())


def test_whole_texts_are_counted_although_a_training_left_truncation_and_padding_on():
    tokenizer = Tokenizer.from_str(of_kind("qwen"))
    plain = vocabulary.parse_vocabulary(tokenizer.to_str(), "plain")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(END), pad_token=END)
    saved = vocabulary.parse_vocabulary(tokenizer.to_str(), "saved")
    texts = ["the wool of the house by the river", "a"]
    assert vocabulary.count_tokens(saved, texts).tolist() == vocabulary.count_tokens(plain, texts).tolist()
    assert saved.state == plain.state


def test_ids_of_a_post_processor_follow():
    tokenizer = Tokenizer.from_str(of_kind("qwen"))
    end, start = tokenizer.token_to_id(END), tokenizer.token_to_id(START)
    template = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, start)])
    for processor in (
        processors.Sequence([processors.ByteLevel(), template]),
        processors.RobertaProcessing((END, end), (START, start)),
        processors.BertProcessing((END, end), (START, start)),
    ):
        tokenizer.post_processor = processor
        pair = Pruned(tokenizer.to_str(), 320)
        small, whole = (words.tokenizer.encode("the wool").ids for words in (pair.small, pair.whole))
        assert small[0] == pair.small.ids[START]
        assert decode(pair.small, small) == decode(pair.whole, whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"byte_fallback": True}, "SentencePiece"),
        ({"end_of_word_suffix": "</w>"}, "inside or the end of words"),
        ({"type": "WordPiece", **WORD_PIECE}, "WordPiece"),
    ],
)
def test_another_kind_of_model_is_refused(changes, message):
    state = json.loads(of_kind("specials first"))
    state["model"] |= changes
    with pytest.raises(vocabulary.VocabularyError, match=f"here: .*{message}"):
        vocabulary.parse_vocabulary(json.dumps(state), "here")


def test_a_model_on_characters_is_refused():
    tokenizer = Tokenizer.from_str(of_kind("specials first"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    with pytest.raises(vocabulary.VocabularyError, match="does not turn text into bytes"):
        vocabulary.parse_vocabulary(tokenizer.to_str(), "here")


def test_a_broken_or_missing_file_is_one_line(tmp_path: Path):
    with pytest.raises(vocabulary.VocabularyError, match=r"tokenizer.json cannot be read"):
        vocabulary.read_vocabulary(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"model": ', encoding="utf-8")
    with pytest.raises(vocabulary.VocabularyError, match="is no usable"):
        vocabulary.read_vocabulary(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("size", "message"),
    [(2**20, r"has only \d+ tokens, not 1048576"), (257, "258 are always kept, .*; keep at least 258")],
)
def test_a_size_that_cannot_be_met_is_refused(size, message):
    whole = vocabulary.parse_vocabulary(of_kind("specials first"), "whole")
    with pytest.raises(vocabulary.VocabularyError, match=message):
        vocabulary.select_tokens(whole, np.zeros(whole.rows, dtype=np.int64), size)
