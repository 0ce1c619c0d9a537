import pytest

from slimqwen.evals.suites.exact_answers import Tolerance, contains, is_any, is_same

SAME = [
    ("４２。", "42"), ("1,000", "1000"), ("1 000", "1000"), ("1'000", "1000"), ("1,00,000", "100000"), ("3.0", "3"),
    ("٣٫١٤", "3.14"), ("३", "3"), ("3,14", "3.14"), ("0,125", "0.125"), ("1.234,56", "1234.56"), ("½", "0.5"),
    ("2½", "2.5"), ("1e3", "1000"), ("5 km", "5km"), ("$1,000", "$1000.00"), ("−5", "-5"), ("１,０００円", "1000円"),
    ("50 %", "50%"), ("**Paris.**", "paris"), ("「東京」。", "東京"), ("पेरिस।", "पेरिस"), ("پیرس۔", "پیرس"),
    (r"\boxed{42}", "42"), ("$42$", "42"), ("10²", "10^2"), ("m²", "m2"), ("Yes!", "yes"), ("ＰＡＲＩＳ", "Paris"),
]  # fmt: skip
DIFFERENT = [
    ("10²", "102"), ("2½", "10.5"), ("3.5", "35"), ("5!", "5"), ("3 or 4", "3"), ("12 34", "1234"), ("5 km", "5"),
    ("5 km", "5 mm"), ("", "3"), ("-5", "5"), ("London, not Paris", "Paris"), ("9" * 5000, "9"), ("1e99999", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("response", "answer"), SAME)
def test_the_form_of_an_answer_does_not_matter(response, answer):
    assert is_same(response, answer)
    assert is_same(answer, response)


@pytest.mark.parametrize(("response", "answer"), DIFFERENT)
def test_another_content_is_another_answer(response, answer):
    assert not is_same(response, answer)
    assert not is_same(answer, response)


def test_a_number_is_right_within_its_tolerance():
    assert is_same("3.2", "3", Tolerance(0.25, False))
    assert not is_same("3.3", "3", Tolerance(0.25, False))
    share = Tolerance(0.1, True)
    assert is_same("110", "100", share)
    for answers in (["100"], ["7", "100"]):
        assert is_any("About 110", ["110"], answers, share)
        assert not is_any("111", ["-90"], answers, share)  # 11 is less than a tenth of 111, not of 100
    assert not is_same("3.2 kg", "3 m", Tolerance(0.25, False))


@pytest.mark.parametrize(
    ("response", "answer", "is_in"),
    [
        ("It is 13", "3", False), ("It is 3.", "3", True), ("1, 2, 3", "2", True), ("1,000 m", "1000", True),
        ("I know", "no", False), ("No.", "no", True), ("서울입니다", "서울", True), ("是东京。", "东京", True),
        ("The code is 1234567.", "1234567", True), ("1234 567", "1234567", False),
    ],
)  # fmt: skip
def test_an_answer_is_contained_as_a_whole_word_or_number(response, answer, is_in):
    assert contains(response, answer) == is_in
