from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimqwen.text import prompts
from slimqwen.text.files import CorpusError


def words(text):
    return [hash(word) for word in text.split()]


def numbered(size=7):
    """Documents without a shared word."""
    return (" ".join(f"{n}-{k}" for k in range(size)) for n in count())


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=5))
def test_prompts_have_the_exact_length_and_share_no_text(orders):
    cutter = prompts.PromptCutter(numbered(), words)
    seen = set()
    for number, length in orders:
        cut = cutter.cut(number, length)
        assert [len(prompt) for prompt in cut] == [length] * number
        for prompt in cut:
            assert seen.isdisjoint(prompt)
            seen.update(prompt)


def test_a_prompt_is_never_given_twice_even_if_the_text_repeats():
    cutter = prompts.PromptCutter(iter(["the same start"] * 5 + ["another start here"]), words)
    assert len(set(map(tuple, cutter.cut(2, 3)))) == 2


def test_text_that_does_not_last_is_an_error():
    with pytest.raises(CorpusError, match="used up"):
        prompts.PromptCutter(islice(numbered(), 3), words).cut(2, 20)


def test_passages_of_the_world_depend_on_the_seed_alone(tmp_path):
    first, again, other = (
        list(islice(prompts.documents("tinyworld", seed, tmp_path), 20)) for seed in (1, 1, 2)
    )
    assert first == again
    assert len(set(first)) > 15
    assert not set(first) & set(other)


def test_a_text_file_is_cut_at_its_empty_lines(tmp_path):
    (tmp_path / "book.txt").write_text("one\nline\n\n\ntwo\n\n", encoding="utf-8")
    assert list(prompts.documents("book.txt", 0, tmp_path)) == ["one\nline", "two"]
    with pytest.raises(CorpusError, match=r"gone\.txt"):
        next(prompts.documents("gone.txt", 0, tmp_path))


def test_a_digest_tells_prompts_and_their_order_apart():
    digests = {prompts.digest(p) for p in ([[1, 2], [3]], [[3], [1, 2]], [[1], [2, 3]])}
    assert len(digests) == 3
