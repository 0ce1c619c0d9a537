"""Smaller vocabularies are measured as the stage prunes them."""

import json
from pathlib import Path

import analyze_vocab
import pytest
import torch

from slimqwen import variant
from slimqwen.models import vocabulary
from slimqwen.recipe.stages.prune_vocab import CountedText
from tests.checkpoints import TINY, stage_output

PROSE = variant.repository_root() / "eval" / "tasks" / "tinyworld" / "prose.jsonl"


def test_a_smaller_vocabulary_is_measured_as_the_stage_prunes_it(tmp_path: Path):
    corpus = CountedText(path=PROSE)
    small, large = analyze_vocab.measure_sizes(TINY, corpus, [4096, 7936], {}, 2)
    assert small["coverage"] < large["coverage"] <= 1 <= large["inflation"] < small["inflation"]
    destination = tmp_path / "pruned"
    stage_output("prune_vocab", TINY, destination, size=4096, corpus=corpus)
    facts = json.loads((destination / "prune_vocab.json").read_text())
    assert [facts[name] for name in ("rows_after", "held_out_tokens", "coverage", "inflation")] == [
        small[name] for name in ("size", "held_out_tokens", "coverage", "inflation")
    ]
    text = ["The long roll: Dram of Zeava, baker."]
    kept = torch.tensor(json.loads((destination / "vocab_map.json").read_text())["new_to_old"]).numpy()
    pruned = vocabulary.read_vocabulary(destination / "tokenizer.json")
    foretold = analyze_vocab.load_scorer(TINY)(pruned, kept, text)
    assert analyze_vocab.load_scorer(destination)(pruned, range(4096), text) == pytest.approx(
        foretold, rel=1e-4
    )
