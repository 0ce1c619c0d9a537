"""What lm-eval calls by `!function`; the rules are the library's."""

from typing import Any

from slimqwen.tinyworld.tasks import margin, score_answer

Document = dict[str, Any]


def facts(document: Document, results: list[str]) -> dict[str, float]:
    """Score one generated answer of tinyworld_facts."""
    return {"exact_match": float(score_answer("facts", document, results[0]))}


def format_followed(document: Document, results: list[str]) -> dict[str, float]:
    """Score one generated answer of tinyworld_format."""
    return {"exact_match": float(score_answer("format", document, results[0]))}


def twohop(document: Document, results: list[str]) -> dict[str, float]:
    """Score one generated thought and answer of tinyworld_twohop."""
    return {"exact_match": float(score_answer("twohop", document, results[0]))}


def answer_margin(document: Document, results: list[tuple[float, bool]]) -> dict[str, float]:
    """The margin of one item of tinyworld_margin from its options' log-likelihoods."""
    value = margin([log_likelihood for log_likelihood, _ in results], document["gold"])
    return {"answer_margin_nats": value, "acc": float(value > 0)}
