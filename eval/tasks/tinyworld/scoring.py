"""Scores of the items of this folder, which lm-eval calls by `!function`."""

import json
from typing import Any

Document = dict[str, Any]

_LISTS = {
    "goods": "salt wool iron tar grain honey glass cloth timber copper oil wine pepper silk clay coal",
    "pets": "goat hound raven cat mule hare owl fox otter swan toad badger falcon pony crab stoat",
    "colours": "red blue green black white gold silver purple brown orange yellow grey",
    "crafts": "smith weaver baker sailor potter mason tailor miller scribe hunter fisher farmer tanner brewer "
    "cooper healer",
}


def facts(document: Document, results: list[str]) -> dict[str, float]:
    """Score one generated answer of tinyworld_facts."""
    return {"exact_match": float(_without_end(results[0]).strip() == document["answer"])}


def format_followed(document: Document, results: list[str]) -> dict[str, float]:
    """Score one generated answer of tinyworld_format; white space around it is ignored."""
    arguments = json.loads(document["arguments"])
    answer = _without_end(results[0]).strip()
    return {"exact_match": float(_is_followed(document["kind"], arguments, answer))}


def twohop(document: Document, results: list[str]) -> dict[str, float]:
    """Score one generated thought and answer of tinyworld_twohop; an answer counts after the end of the thought."""
    _, closed, answer = _without_end(results[0]).partition("</think>")
    return {"exact_match": float(bool(closed) and answer.strip() == document["answer"])}


def answer_margin(document: Document, results: list[tuple[float, bool]]) -> dict[str, float]:
    """The log-probability of the right option minus that of the best wrong one, nats."""
    options = [log_likelihood for log_likelihood, _ in results]
    margin = options.pop(document["gold"]) - max(options)
    return {"answer_margin_nats": margin, "acc": float(margin > 0)}


def _without_end(text: str) -> str:
    return text.split("<|im_end|>")[0].split("<|endoftext|>")[0]


def _is_followed(kind: str, arguments: dict[str, Any], answer: str) -> bool:
    words = answer.split()
    if kind == "list":
        entries = answer.split(", ")
        return (
            len(entries) == len(set(entries)) == arguments["count"]
            and arguments["banned"] not in entries
            and set(entries) <= set(_LISTS[arguments["list"]].split())
        )
    if kind in ("ends", "starts"):
        word = words[-1].strip(".") if kind == "ends" and words else words[0] if words else ""
        return arguments["person"] in words and len(words) > 3 and word == arguments["word"]
    return bool(answer == arguments["answer"])
