"""Acceptance as vLLM counts it, at one depth and over several."""

import json
from pathlib import Path

import pytest

from slimqwen.evaluation.acceptance import ServedAcceptance, sweep

ROOT = Path(__file__).parents[2]


def test_length_and_rates_follow_from_the_counters() -> None:
    counted = ServedAcceptance(depth=3, drafts=10, accepted_per_position=(8, 5, 1))
    assert counted.mean_length == pytest.approx(2.4)
    assert counted.rates == (0.8, 0.5, 0.1)


@pytest.mark.engine
def test_a_deeper_draft_is_accepted_for_longer_on_the_same_prompts() -> None:
    from transformers import AutoTokenizer

    folder = ROOT / "weights" / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (ROOT / "eval/tasks/tinyworld/prose.jsonl").read_text().splitlines()[:8]
    prompts = [tokenizer(json.loads(line)["text"])["input_ids"][:16] for line in lines]
    heard: list[tuple[float, float]] = []
    found = sweep(folder, prompts, 32, (1, 3), lambda activity, done, total: heard.append((done, total)))
    one, three = found["depths"]
    assert [len(row["rates"]) for row in (one, three)] == [1, 3]
    assert 1 < one["acceptance_length"] <= 2
    assert one["acceptance_length"] < three["acceptance_length"] <= 4
    assert three["rates"] == sorted(three["rates"], reverse=True)
    assert heard[-1] == (2, 2)
