"""Smaller output heads, against direct computations."""

import argparse
import json
import math
from pathlib import Path

import analyze_lmhead_svd
import pytest
import torch

from slimqwen import variant
from slimqwen.errors import SlimqwenError
from slimqwen.models.language_model import load_in_float32
from tests.checkpoints import TINY, stage_output

PROSE = variant.repository_root() / "eval" / "tasks" / "tinyworld" / "prose.jsonl"


def test_smaller_heads_have_the_errors_and_scores_of_the_changed_matrices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(analyze_lmhead_svd, "BLOCK_ROWS", 70)  # several blocks, the last one shorter
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(300, 64, generator=generator)
    states = torch.randn(9, 64, generator=generator)
    targets = torch.randint(0, 300, (9,), generator=generator)
    left, singular_values, right = torch.linalg.svd(head.double(), full_matrices=False)
    values, vectors = analyze_lmhead_svd.decompose_head(head)
    assert values.tolist() == pytest.approx(singular_values.tolist())
    heads = analyze_lmhead_svd.list_heads(head, vectors)
    assert list(heads) == ["16 bit", "rank 8", "rank 16", "rank 32", "rank 48", *(
        f"4 bit, groups of {group}" for group in (32, 64)
    )]  # fmt: skip
    assert heads["rank 8"][0] == 2 * 8 * (300 + 64)
    assert heads["4 bit, groups of 32"][0] == 300 * 64 // 2 + 2 * 300 * 2
    for label, (_, change) in heads.items():
        if label.startswith("rank"):
            rank = int(label.split()[1])
            changed = ((left[:, :rank] * singular_values[:rank]) @ right[:rank]).float()
        else:
            changed = change(head)
        error, log_probabilities = analyze_lmhead_svd.measure_head(head, change, states, targets)
        assert error == pytest.approx(float((changed - head).norm() / head.norm()), rel=1e-4)
        direct = (states @ changed.T).log_softmax(1)[range(9), targets]
        assert log_probabilities.tolist() == pytest.approx(direct.tolist(), abs=1e-4)


def test_the_head_of_a_checkpoint_is_scored_on_text(tiny: variant.Variant, tmp_path: Path):
    options = argparse.Namespace(text=PROSE, documents=3)
    table, figures = analyze_lmhead_svd.explore_heads(tiny, options)
    model = load_in_float32(TINY)
    states, targets, lengths = analyze_lmhead_svd.read_states(
        TINY, [json.loads(line)["text"] for line in PROSE.read_text().splitlines()[:3]]
    )
    nats = torch.nn.functional.cross_entropy(model.lm_head(states), targets, reduction="sum").item()
    characters = sum(len(json.loads(line)["text"]) for line in PROSE.read_text().splitlines()[:3])
    full = figures["heads"]["16 bit"]["bits_per_byte"]
    assert sum(lengths) == len(targets)
    assert full == pytest.approx(nats / math.log(2) / characters, rel=1e-4)
    assert figures["heads"]["rank 24"]["bits_per_byte"] > full
    assert len(table.rows) == len(figures["heads"])
    stage_output("quantise_lm_head", TINY, tmp_path / "packed")
    (tiny.root / "weights" / "tiny").unlink()
    (tiny.root / "weights" / "tiny").symlink_to(tmp_path / "packed")
    with pytest.raises(SlimqwenError, match="output head in 16 bits"):
        analyze_lmhead_svd.explore_heads(tiny, options)
