"""Compares responses with right answers by content; case, width, markup, full stops and number formats do not count."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Final, NamedTuple

FULL_STOPS: Final = ".。।॥۔։።။។།᠃᠉܀꓿꘎꛳⳹꯫⸼"
"""Full stops of all scripts, in the compatibility form of Unicode (NFKC)."""

_WRAPPERS = (
    ("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("``", "``"), ("`", "`"), ('"', '"'), ("'", "'"),
    ("「", "」"), ("『", "』"), ("«", "»"), ("‹", "›"), ("《", "》"), ("【", "】"), ("$$", "$$"), ("$", "$"),
    (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), (r"\fbox{", "}"), (r"\text{", "}"), (r"\textbf{", "}"),
    (r"\mathrm{", "}"), (r"\mathbf{", "}"), (r"\mathbf{", "}"),
)  # fmt: skip
_SAME = {
    **dict.fromkeys(map(ord, "‐‑‒–—―−﹣"), "-"),
    **dict.fromkeys(map(ord, "“”„‟〝〞"), '"'),
    **dict.fromkeys(map(ord, "‘’‚‛´ʼ"), "'"),
    ord("٫"): ".",
    ord("٬"): ",",
}
_SUPERSCRIPT_AFTER_DIGIT = re.compile(r"(?<=\d)[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_FRACTION_AFTER_DIGIT = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")

_UNSIGNED = r"\d[\d.,' ]*|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?(?P<currency>[$€£¥₹₩₽]?) ?(?P<whole>{_UNSIGNED}?)(?P<power>e[-+]?\d+)?"
    r"(?:(?P<top>(?<= )\d+|(?<!\d)\d+)?[/⁄](?P<bottom>\d+))?(?P<unit> ?(?:[^\W\d_]|[%‰°€£¥$₹₩₽]).*)?",
    re.DOTALL,
)
_IN_TEXT = re.compile(r"(?:(?<!\w)[-+])?\d+(?:[.,' ]\d+)*")
_MOST_DIGITS = 400
_PLAIN_DECIMAL = re.compile(r"\d+\.?\d*|\.\d+")
_GROUPED = re.compile(
    r"[1-9]\d{0,2}(?:([,' ])\d{3})(?:\1\d{3})*(?:\.\d+)?|[1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d+)?"
)
_GROUPED_COMMA_DECIMAL = re.compile(
    r"[1-9]\d{0,2}(?:(?:\.\d{3}){2,}(?:,\d+)?|(?:\.\d{3})+,\d+|(?: \d{3})+,\d+)"
)
_COMMA_DECIMAL = re.compile(r"\d+,\d+")


class Tolerance(NamedTuple):
    """How far a number may be from a right one; a difference of exactly so much is allowed.

    Attributes:
        amount: absolute, or as a share of the right number.
        is_relative: whether the amount is a share.
    """

    amount: Fraction
    is_relative: bool


def read_tolerance(text: str) -> Tolerance:
    """Read a tolerance such as "0.5", "0,5" or "5 %".

    Raises:
        ValueError: the text is no tolerance; the message is cause and cure.
    """
    match = re.fullmatch(r"\s*(\d+(?:[.,]\d+)?(?:[eE]-?\d{1,2})?)\s*(%?)\s*", text)
    if match is None:
        raise ValueError(f'{text!r} is no tolerance; write a number such as 0.5, or a share such as "5%"')
    amount = Fraction(match[1].replace(",", "."))
    return Tolerance(amount / 100 if match[2] else amount, bool(match[2]))


def compatible(text: str) -> str:
    """The text in Unicode's compatibility form (NFKC), without format characters, and with ASCII dashes and quotes.

    Superscript digits after a digit stay a power and a fraction after a digit stays beside it: NFKC alone would turn
    10² into 102 and 2½ into 21/2.
    """
    text = _SUPERSCRIPT_AFTER_DIGIT.sub(lambda match: f"^{match[0]}", text)
    text = _FRACTION_AFTER_DIGIT.sub(" ", text)
    text = unicodedata.normalize("NFKC", text).translate(_SAME)
    return "".join(character for character in text if unicodedata.category(character) != "Cf")


def normalised(text: str) -> str:
    """The text in the form in which answers are compared; empty if it holds nothing but white space and full stops.

    Upper and lower case, markup and quotes around the whole, full stops at the end and forms of Unicode are evened out.
    """
    text, before = " ".join(compatible(text).split()), ""
    while text != before:
        before = text
        text = text.strip().rstrip(FULL_STOPS).strip().removeprefix("# ").lstrip("#")
        text = re.sub(r"(?<=[^\W\d_]{2})!+$", "", text)
        for start, end in _WRAPPERS:
            inner = text[len(start) : len(text) - len(end)]
            if len(text) > len(start + end) and text.startswith(start) and text.endswith(end):
                text = inner if start not in inner and end not in inner else text
    return unicodedata.normalize("NFKC", text.casefold())


def is_same(response: str, answer: str, tolerance: Tolerance | None = None) -> bool:
    """Whether a response equals an answer: as numbers with the same unit where both are numbers, else as texts.

    Args:
        response: the model's response.
        answer: the right answer.
        tolerance: how far a number may be from the right one; None for not at all.
    """
    given, right = normalised(response), normalised(answer)
    number, right_number = _number(given), _number(right)
    if number is None or right_number is None:
        return given == right
    (value, unit), (right_value, right_unit) = number, right_number
    limit = Fraction(0) if tolerance is None else tolerance.amount
    if tolerance is not None and tolerance.is_relative:
        limit *= abs(right_value)
    return unit == right_unit and abs(value - right_value) <= limit


def contains(response: str, answer: str) -> bool:
    """Whether a response contains an answer: a number among its numbers, or a text of whole words.

    In scripts without spaces between words, a text may be anywhere.
    """
    text, right = normalised(response), normalised(answer)
    number = _number(right)
    if number is not None and not number[1]:
        found = (match[0] for match in _IN_TEXT.finditer(text))
        # "1 2 3" is no number, but three.
        parts = (part for each in found for part in ([each] if _number(each) else re.split("[,' ]", each)))
        return number in map(_number, parts)
    before, after = ("(?<![a-zß-ɏͰ-ӿ0-9])" if _has_words(right[end]) else "" for end in (0, -1))
    return re.search(before + re.escape(right) + after.replace("?<!", "?!"), text) is not None


def is_any(
    response: str, statements: Iterable[str], answers: Iterable[str], tolerance: Tolerance | None
) -> bool:
    """Whether a response as a whole, or one of its statements, equals one of the answers.

    Args:
        response: the model's response.
        statements: parts of the response that state an answer (`stated_choices.stated_texts`).
        answers: texts that are each right.
        tolerance: how far a number may be from a right one; None for not at all.
    """
    answers = tuple(answers)
    return any(is_same(text, answer, tolerance) for text in (response, *statements) for answer in answers)


def is_number(text: str) -> bool:
    """Whether a text is a number, with a unit or without."""
    return _number(normalised(text)) is not None


def _has_words(character: str) -> bool:
    return re.match("[a-zß-ɏͰ-ӿ0-9]", character) is not None


def _number(text: str) -> tuple[Fraction, str] | None:
    """Value and unit of a normalised text that is one number; None if it is none."""
    digits = "".join(str(unicodedata.decimal(each, each)) for each in text)
    match = _NUMBER.fullmatch(digits)
    # A number of a response must not fill the memory, and Python refuses to read very long ones.
    if match is None or len(match["whole"]) > _MOST_DIGITS or len(match["bottom"] or "") > _MOST_DIGITS:
        return None
    value = next(_values(match), None)
    if value is None:
        return None
    unit = (match["currency"] + (match["unit"] or "")).replace(" ", "").rstrip(FULL_STOPS)
    return (-value if match["sign"] == "-" else value), unit


def _values(match: re.Match[str]) -> Iterator[Fraction]:
    """The value of a match of `_NUMBER`, if its digits are grouped as numbers are."""
    whole, bottom = match["whole"].strip(), match["bottom"]
    if bottom is not None and match["power"] is None:
        parts = [part for part in (*whole.split(), match["top"]) if part]
        if 1 <= len(parts) <= 2 and all(part.isdecimal() for part in (*parts, bottom)) and int(bottom):
            yield sum(map(int, parts[:-1])) + Fraction(int(parts[-1]), int(bottom))
        return
    if _PLAIN_DECIMAL.fullmatch(whole):
        plain = whole
    elif _GROUPED.fullmatch(whole):
        plain = re.sub("[,' ]", "", whole)
    elif _GROUPED_COMMA_DECIMAL.fullmatch(whole):
        plain = re.sub("[. ]", "", whole).replace(",", ".")
    elif _COMMA_DECIMAL.fullmatch(whole):
        plain = whole.replace(",", ".")
    else:
        return
    power = int((match["power"] or "e0")[1:][:5])
    if abs(power) <= _MOST_DIGITS:
        yield Fraction(plain if plain != "." else "0") * Fraction(10) ** power
