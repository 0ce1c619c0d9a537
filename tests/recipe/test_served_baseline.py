"""What a trained draft head is worth beside the served baseline's."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint import Manifest
from slimqwen.models.vocabulary import read_tokenizer
from slimqwen.recipe import served_baseline
from slimqwen.recipe.sampled_outputs import OUTPUTS
from slimqwen.serving import draft_counts

ROOT = variant.repository_root()
SAMPLING = "{sample_outputs: {prompts: {path: tinyworld_prompts}}}"
RECIPE = f"description: A test.\nbase: tiny\nstages: [{SAMPLING}, {{redistill_mtp: {{depth: 3}}}}]\n"
PROMPT = "Where does the weaver live?"


@pytest.fixture
def trained(tmp_path: Path) -> tuple[variant.Variant, list[Any]]:
    """A variant, and the outcomes of its recipe, whose second stage kept a trained head."""
    for folder in ("experiments/tiny", "weights/tiny"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    folder = tmp_path / "experiments" / "trained"
    folder.mkdir()
    (folder / "config.env").write_text("BASE=tiny\nVLLM_MODEL=weights/trained\n")
    (folder / "recipe.yaml").write_text(RECIPE)
    claims = json.loads((tmp_path / "experiments" / "tiny" / "measurements.json").read_text())
    (folder / "measurements.json").write_text(json.dumps({**claims, "baseline": "tiny"}))
    outcomes = []
    for number, stage in enumerate(("sample_outputs", "redistill_mtp")):
        output = shutil.copytree(tmp_path / "weights" / "tiny", tmp_path / "weights" / "store" / str(number))
        kept = {"acceptance_length_kept_vllm": 3.5} if number else {}
        manifest = Manifest.read(output).model_copy(update={"facts": kept})
        manifest.write(output)
        outcomes.append(SimpleNamespace(stage=stage, folder=output, manifest=manifest))
    ids = read_tokenizer(ROOT / "weights" / "tiny" / "tokenizer.json").encode(PROMPT).ids
    rows = [{"prompt": ids, "continuation": [5] * 7, "held_out": held_out} for held_out in (True, False)]
    (outcomes[0].folder / OUTPUTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return variant.load("trained", tmp_path), outcomes


def test_a_trained_head_is_compared_with_the_served_baselines_once(
    trained: tuple[variant.Variant, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, outcomes = trained
    asked = []

    def count(weights: Path, prompts: list[list[int]], tokens: int, depth: int) -> SimpleNamespace:
        asked.append((weights.name, prompts, tokens, depth))
        return SimpleNamespace(mean_length=3.74)

    monkeypatch.setattr(draft_counts, "count_drafts_in_vllm", count)
    digest = checkpoint.digest(outcomes[1].folder)
    for _ in range(2):
        said = served_baseline.compare_drafts(subject, outcomes)
        assert said is not None
        assert said.startswith(
            "against the served baseline tiny: acceptance length 3.50 with the head that was kept"
        )
        assert "3.74 with the baseline's own" in said
        outcomes[1].manifest = Manifest.read(outcomes[1].folder)
    ids = read_tokenizer(ROOT / "weights" / "tiny" / "tokenizer.json").encode(PROMPT).ids
    assert asked == [("tiny", [ids], 7, 3)]
    assert outcomes[1].manifest.facts["acceptance_length_baseline_vllm"] == 3.74
    assert checkpoint.digest(outcomes[1].folder) == digest


@pytest.mark.parametrize("lacking", ["head", "baseline", "stage"])
def test_nothing_is_compared_where_there_is_nothing_to_compare(
    trained: tuple[variant.Variant, list[Any]], lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, outcomes = trained
    if lacking == "head":
        monkeypatch.setattr(served_baseline, "has_mtp_head", lambda folder: False)
    if lacking == "baseline":
        shutil.rmtree(subject.root / "weights" / "tiny")
    if lacking == "stage":
        outcomes = outcomes[:1]
    assert served_baseline.compare_drafts(subject, outcomes) is None
