"""What an optimisation decides: the first recipe, the step that a failed check points at, and where it goes on."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimqwen import variant
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.layer_error import measure_kind_divergences
from slimqwen.recipe import variant_recipe
from slimqwen.records.record import Finding
from slimqwen.search import optimise
from slimqwen.search.candidate import Candidate
from slimqwen.search.proof import Finalist
from slimqwen.stats.verdict import Verdict
from tests.checkpoints import TINY

FULL = Candidate(mlp="W4A16", draft_vocabulary=0.25, vocabulary=0.5, head_bits=4, mtp="W4A16", depth=4)


def judged(*failed: str) -> Finalist:
    findings = [
        Finding(
            gate=gate,
            figure="figure",
            value=1.0,
            limit=0.5,
            verdict=Verdict.FAIL if gate in failed else Verdict.PASS,
        )
        for gate in ("fidelity", "acceptance", "quality", "engine")
    ]
    return Finalist(
        variant="v",
        verdict=Verdict.FAIL,
        reason="it failed",
        p_value=1.0,
        adjusted_p_value=1.0,
        findings=tuple(findings),
        record=None,
    )


def take_back(candidate: Candidate, *failed: str) -> tuple[Candidate, str] | None:
    return optimise.take_back(candidate, judged(*failed), variant.load("tiny"))


def test_fit_chooses_the_first_recipe_for_tiny() -> None:
    chosen = optimise.choose_first(variant.load("tiny"), "self")
    assert chosen.calibrated == dict.fromkeys(("mlp", "attention", "linear_attention"), "W4A16")
    assert (chosen.head_bits, chosen.embedding_bits, chosen.mtp, chosen.depth) == (4, 8, "W4A16", 4)
    assert (chosen.vocabulary, chosen.draft_vocabulary) == (1.0, 1.0)


def test_acceptance_points_at_the_drafts() -> None:
    expected = (0.5, 1.0, 1.0)
    candidate = FULL
    for share, mtp in zip(expected, ("W4A16", "W4A16", "none"), strict=True):
        back = take_back(candidate, "acceptance")
        assert back is not None
        candidate = back[0]
        assert (candidate.draft_vocabulary, candidate.mtp) == (share, mtp)
        assert candidate.calibrated == FULL.calibrated
    assert take_back(candidate, "acceptance") is None


def test_fidelity_points_at_the_weights_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimise, "_find_costliest", lambda _, kinds, __: (kinds[0], ""))
    candidate, said = FULL, []
    while (back := take_back(candidate, "fidelity", "acceptance")) is not None:
        candidate, why = back
        said.append(why)
    assert said == [
        "acceptance and fidelity: 8 bits for mlp",
        "acceptance and fidelity: the output head in 16 bits",
        "acceptance and fidelity: the whole vocabulary",
    ]


def test_packed_tables_are_taken_back_too() -> None:
    candidate = Candidate(draft_vocabulary=1.0, draft_bits=4, embedding_bits=8, depth=4)
    back = take_back(candidate, "acceptance")
    assert back == (replace(candidate, draft_bits=16), "acceptance: the draft head in 16 bits")
    back = take_back(candidate, "quality")
    assert back == (replace(candidate, embedding_bits=16), "quality: the embedding in 16 bits")
    # Rows of a packed head lose nothing.
    assert take_back(replace(candidate, head_bits=4), "acceptance") is None


def test_a_failed_engine_points_at_no_step() -> None:
    assert take_back(FULL, "engine") is None


def plant_outliers(folder: Path, layer: int) -> Path:
    """A fine-tune of tiny with outlier channels in the MLP of one layer: one large weight in each group of 32."""
    shutil.copytree(TINY, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if f".layers.{layer}.mlp.down_proj" in name and not name.startswith("mtp"):
                rows = torch.arange(len(tensor))
                for group in range(0, tensor.shape[1], 32):
                    # In another channel for each row: no scale of a channel takes them back.
                    tensor[rows, group + rows % 32] *= 60
        save_file(tensors, file, {"format": "pt"})
    return folder


def test_the_kind_with_outliers_costs_most(tmp_path: Path) -> None:
    ids = list(range(300, 428))
    kinds = ("mlp", "attention", "linear_attention", "lm_head")
    forms = {kind: (kind, PackedIntegers(4, 32)) for kind in kinds}
    before = measure_kind_divergences(TINY, forms, ids)
    assert min(before.values()) > 0
    planted = measure_kind_divergences(plant_outliers(tmp_path / "source", 1), forms, ids)
    assert max(planted, key=lambda kind: planted[kind]) == "mlp"


def test_failed_fidelity_takes_back_the_kind_with_the_planted_outliers(
    tmp_path: Path, add_variant: Callable[..., Path]
) -> None:
    plant_outliers(tmp_path / "weights" / "planted", 1)
    add_variant("planted", "VLLM_MODEL=weights/planted\nEVALUATION=tinyworld\n")
    base = variant.load("planted", tmp_path)
    candidate = Candidate(mlp="W4A16", attention="W4A16", linear_attention="W4A16")
    text = {"sequences": 4, "length": 64}
    stages = {"calibrate": {"scaling": "none", "layer_error_ratio": 9, "corpus": text}}
    made = optimise.make_variant(candidate, base, "tinyworld", stages=stages)
    variant_recipe.run_recipe(made)
    back = optimise.take_back(candidate, judged("fidelity"), made)
    assert back is not None
    assert back[1].startswith("fidelity: 8 bits for mlp, which costs most (")
    assert back[0] == replace(candidate, mlp="W8A16")


def test_a_journal_goes_on_where_it_was_left_if_the_same_is_asked(tmp_path: Path) -> None:
    asked = {"checkpoint": "1", "text": "self"}
    journal = optimise.Optimisation.open(tmp_path, "tiny", asked)
    journal.candidate, journal.steps = {"mlp": "W4A16"}, {"proof": optimise.Ended("fail: it failed", False)}
    journal.write()
    assert optimise.Optimisation.open(tmp_path, "tiny", asked) == journal
    assert optimise.Optimisation.find(tmp_path, "tiny") == journal
    assert optimise.Optimisation.open(tmp_path, "tiny", asked | {"checkpoint": "2"}).steps == {}
    assert optimise.Optimisation.find(tmp_path, "other") is None
