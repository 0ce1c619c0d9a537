import itertools
import re

import pytest

from eval.tasks.core.needle import make_needle_questions

TEXTS = ["\n".join(f"Line {n} of text {t}, which says nothing." for n in range(40)) for t in range(5)]
LENGTHS, DEPTHS = [2000, 12_000], [0.1, 0.5, 0.9]


def make(seed=1):
    return make_needle_questions(TEXTS, LENGTHS, DEPTHS, 2, seed)


def test_a_needle_lies_where_it_should_once_and_is_asked_for():
    places = list(itertools.product(LENGTHS, DEPTHS, range(2)))
    for question, (length, depth, _) in zip(make(), places, strict=True):
        needle = re.search(r"^The code of the (.*) is (\d{7})\.$", question.prompt, re.MULTILINE)
        assert question.answer == needle[2]
        assert question.prompt.count(needle[2]) == 1
        assert question.prompt.endswith(
            f"\n\nWhat is the code of the {needle[1]}, by that text? Answer with the code alone."
        )
        before = needle.start() - len("Read this text.\n\n")
        assert depth * length - 45 <= before <= depth * length + 1  # a line is shorter than 45 characters
        after = question.prompt[needle.end() + 1 :].rpartition("\n\nWhat is")[0]
        assert before + len(after) == length


def test_needles_are_the_same_for_a_seed_and_differ_from_each_other():
    assert make() == make() != make(seed=2)
    assert len({question.answer for question in make()}) == len(make())
    assert make()[0].prompt[:300] != make()[1].prompt[:300]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_haystack_longer_than_the_texts_begins_again(length):
    (question,) = make_needle_questions(TEXTS[:1], [length], [0.5], 1, 1)
    assert question.prompt.count("Line 0 of text 0,") == -(-length // (len(TEXTS[0]) + 2))
