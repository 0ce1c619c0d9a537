"""The explorations of scripts/: their figures against direct computations, on the embedded model."""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import analyze_lmhead_svd
import analyze_vocab
import profile_model
import pytest
import torch

from slimqwen import variant
from slimqwen.cli import exploration
from slimqwen.errors import SlimqwenError
from slimqwen.models import vocabulary
from slimqwen.models.language_model import load_in_float32
from slimqwen.recipe.stages.prune_vocab import CountedText
from slimqwen.records.table import Table
from tests.checkpoints import TINY, stage_output

PROSE = variant.repository_root() / "eval" / "tasks" / "tinyworld" / "prose.jsonl"

WORKLOAD = """
documents: tinyworld
seed: 1
reference_context_tokens: 128
min_tokens: 2
warmup_requests: 0
rounds: 1
sampling: {temperature: 0}
classes:
  short: {prompt_tokens: 8, output_tokens: 24, requests: 2}
"""


@pytest.fixture
def tiny(
    tmp_path: Path, add_variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> variant.Variant:
    """A variant of a repository of its own that serves the embedded model."""
    add_variant(
        "tiny",
        "VLLM_MODEL=weights/tiny\nVLLM_DTYPE=bfloat16\nVLLM_MAX_MODEL_LEN=128\nVLLM_MAX_NUM_SEQS=1\n"
        "VLLM_ENABLE_PREFIX_CACHING=0\nVLLM_ENFORCE_EAGER=1\n",
    )
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(TINY)
    monkeypatch.setattr(exploration.variants, "load", partial(variant.load, root=tmp_path))
    return variant.load("tiny")


def test_an_exploration_prints_its_table_and_writes_its_figures(
    tiny: variant.Variant, capsys: pytest.CaptureFixture[str]
):
    table = Table("Sizes", ("size",), (("3",),))
    exploration.run_exploration(
        "sizes", argparse.ArgumentParser(), lambda *_: (table, {"sizes": [3]}), ["--variant", "tiny"]
    )
    file = tiny.root / "results" / "explorations" / "sizes_tiny.json"
    content = json.loads(file.read_text())
    assert content["sizes"] == [3]
    assert len(content["provenance"]["checkpoint"]["digest"]) == 64
    assert "| 3 |" in capsys.readouterr().out


def test_an_expected_error_of_an_exploration_is_one_line(
    tiny: variant.Variant, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        exploration.run_exploration(
            "sizes", argparse.ArgumentParser(), lambda *_: ({}, {}), ["--variant", "none"]
        )
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tiny.root / "results").exists()


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


@pytest.mark.engine
def test_requests_are_told_apart_by_phase_part_and_operator(
    tiny: variant.Variant, monkeypatch: pytest.MonkeyPatch
):
    # vLLM reads whether it records parts of a step once a process, and earlier tests have had an engine.
    monkeypatch.setattr("vllm.v1.utils._PROFILER_FUNC", None)
    (tiny.root / "eval" / "workloads").mkdir(parents=True)
    (tiny.root / "eval" / "workloads" / "small.yaml").write_text(WORKLOAD)
    options = argparse.Namespace(workload="small", requests=2)
    table, figures = profile_model.explore_requests(tiny, options)
    [row] = figures["classes"]
    assert row["class"] == "short 8 -> 24"
    assert row["seconds"].keys() == {"queue", "prefill", "decode"}
    assert {"forward", "sample"} <= row["step"].keys()
    assert sum(row["step"].values()) == pytest.approx(1)
    shares = [share for *_, share in row["operators"]]
    assert len(shares) == profile_model.OPERATORS
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1
    assert list((tiny.root / "logs" / "profile-tiny").glob("short_*.json.gz"))
    assert len(table.rows) == 1
