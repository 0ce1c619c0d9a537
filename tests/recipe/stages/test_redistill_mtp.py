"""Re-distilling the MTP head: what is learned, kept, resumed and refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slimqwen import checkpoint, progress
from slimqwen.checkpoint import draft_head
from slimqwen.recipe import head_training, variant_recipe
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.sampled_outputs import OUTPUTS, read_outputs
from slimqwen.recipe.stage import StageError
from slimqwen.recipe.stages import redistill_mtp, sample_outputs
from slimqwen.recipe.stages.redistill_mtp import CURVE, RedistillParameters
from slimqwen.recipe.stages.sample_outputs import CorpusError
from tests.checkpoints import TINY, edited_tensors, stage_output, stored
from tests.identity.coverage_by_keys import covered
from tests.recipe.stages.sampling import sampled_from
from tests.zoo.published_forms import PUBLISHED_FORMS

SHORT = RedistillParameters(steps=8, validate_every=2, learning_rate=1e-3)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def damaged(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with noise on the head's fc, so that there is something to learn."""
    folder = shutil.copytree(sampled, tmp_path_factory.mktemp("damaged") / "tiny")
    with edited_tensors(folder) as tensors:
        fc = tensors["mtp.fc.weight"].float()
        noise = torch.randn(fc.shape, generator=torch.Generator().manual_seed(0)) * fc.std()
        tensors["mtp.fc.weight"] = (fc + noise).bfloat16()
    return folder


def redistil(source: Path, folder: Path, parameters: RedistillParameters = SHORT) -> dict[str, Any]:
    """Run the stage without its vLLM measurements, which one test below has."""
    (folder / "out").mkdir(parents=True)
    (folder / "unfinished").mkdir(exist_ok=True)
    redistill_mtp.redistill_head(
        source, folder / "out", parameters, progress.silent, unfinished=folder / "unfinished"
    )
    record: dict[str, Any] = json.loads((folder / "out" / CURVE).read_text())
    return record


@pytest.fixture(scope="module")
def learned(damaged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a damaged head was trained without a break."""
    folder = tmp_path_factory.mktemp("learned")
    with pytest.MonkeyPatch.context() as patched:
        leave_out_vllm(patched)
        redistil(damaged, folder)
    return folder / "out"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as 4-bit checkpoints are published, multimodal, and what it says."""
    folder = tmp_path_factory.mktemp("published")
    source = PUBLISHED_FORMS["multimodal-w4a16"].build(folder / "published")
    with covered(sample_outputs.write_sampled_outputs, tmp_path_factory.mktemp("calls")):
        return sampled_from(source, folder / "sampled")


@pytest.fixture(scope="module")
def one_step(published: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a training of one step, counted in vLLM too; the key of the stage has all that it executes."""
    one = SHORT.model_copy(update={"steps": 1})
    with covered(redistill_mtp.redistill_head, tmp_path_factory.mktemp("calls")):
        return redistil(published, tmp_path_factory.mktemp("one-step"), one)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """A stage has a process of its own, where it may ask torch for deterministic kernels for good."""
    yield
    torch.use_deterministic_algorithms(False)


def leave_out_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting in vLLM takes 10 s a checkpoint."""
    monkeypatch.setattr(redistill_mtp, "_check_agreement", lambda *_: None)
    monkeypatch.setattr(redistill_mtp, "_served", lambda *_: 1.0)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_vllm(monkeypatch)


def test_a_damaged_head_learns_and_its_target_stays(damaged: Path, learned: Path) -> None:
    record = json.loads((learned / CURVE).read_text())
    assert record["kept"] == "trained"
    assert record["acceptance_length_after"] > record["acceptance_length_before"]
    before, after = stored(damaged), stored(learned)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "mtp.fc.weight" in changed
    assert all(name.startswith("mtp.") and "_proj" not in name for name in changed)
    steps = [Step(redistill_mtp.STAGE, SHORT)]
    assert variant_recipe.unexplained_by(steps, damaged, learned) == []
    assert (learned / OUTPUTS).read_bytes() == (damaged / OUTPUTS).read_bytes()


def test_a_head_learns_for_the_ids_that_it_may_draft_and_these_stay(
    damaged: Path, tmp_path: Path, without_vllm: None
) -> None:
    trimmed = stage_output("trim_draft_vocab", damaged, tmp_path / "trimmed", size=1024)
    record = redistil(trimmed, tmp_path, SHORT.model_copy(update={"rows": "drafted"}))
    assert record["kept"] == "trained"
    assert record["acceptance_length_after"] > record["acceptance_length_before"]
    before, after = stored(trimmed), stored(tmp_path / "out")
    for name in (draft_head.WEIGHT, draft_head.TOKEN_IDS):
        assert torch.equal(before[name], after[name])
    assert checkpoint.read_config(tmp_path / "out")[draft_head.SIZE_KEY] == 1024


def test_training_for_a_draft_head_needs_one(sampled: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="there is no draft head; put trim_draft_vocab before"):
        redistil(sampled, tmp_path, SHORT.model_copy(update={"rows": "drafted"}))


def test_a_killed_run_goes_on_to_the_same_bytes(
    damaged: Path, learned: Path, tmp_path: Path, without_vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = head_training.Training._advance
    steps = []

    def killed_at_five(training: Any) -> None:
        if training.step == 5 and len(steps) < 6:
            raise KeyboardInterrupt
        steps.append(training.step)
        advance(training)

    monkeypatch.setattr(head_training.Training, "_advance", killed_at_five)
    with pytest.raises(KeyboardInterrupt):
        redistil(damaged, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "out")
    steps.append(-1)
    redistil(damaged, tmp_path / "cut")
    assert steps == [0, 1, 2, 3, 4, -1, 4, 5, 6, 7]
    assert checkpoint.digest(tmp_path / "cut" / "out") == checkpoint.digest(learned)


def test_a_head_that_got_worse_is_not_kept(sampled: Path, tmp_path: Path, without_vllm: None) -> None:
    record = redistil(sampled, tmp_path, SHORT.model_copy(update={"head": "fresh", "trainable": "all"}))
    assert record["kept"] == "original"
    before, after = stored(sampled), stored(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_acceptance_that_vllm_counts_is_the_one_counted_here(one_step: dict[str, Any]) -> None:
    here, there = one_step["acceptance_length_before"], one_step["acceptance_length_before_vllm"]
    # The same counts but for a text that bfloat16 words otherwise; without the steps across an end it is 5 %.
    assert there == pytest.approx(here, rel=0.02)
    assert there > 2


def test_drafts_across_the_end_of_a_text_are_counted(published: Path, one_step: dict[str, Any]) -> None:
    """A server's steps leave out no token of a text and end beyond it by less than a whole draft."""
    held_out = [output for output in read_outputs(published) if output.held_out]
    gained = one_step["before"]["drafts"] + sum(one_step["before"]["accepted_per_position"])
    # The first token of a text comes before any draft.
    written = sum(len(output.continuation) - 1 for output in held_out)
    assert written <= gained < written + len(held_out) * SHORT.depth


def test_a_count_that_vllm_does_not_share_is_an_error() -> None:
    with pytest.raises(StageError, match=r"4\.000 in this stage and 1\.000 in vLLM"):
        redistill_mtp._check_agreement(4.0, 1.0, "before")


@pytest.mark.parametrize(
    ("kept", "low", "said"),
    [
        ("trained", 0.05, "difference +0.05 to +0.30 (95 %)"),
        (
            "trained",
            -0.1,
            "difference -0.10 to +0.30 (95 %); a gain within noise: kept, not proven",
        ),
        ("original", -0.1, "difference -0.10 to +0.30 (95 %)"),
    ],
)
def test_what_was_decided_is_said_with_its_noise(kept: str, low: float, said: str) -> None:
    lengths = {"acceptance_length_before": 2.0, "acceptance_length_after": 2.1}
    facts = {"kept": kept, **lengths, "gain_low": low, "gain_high": 0.3}
    summary = redistill_mtp.summarise_head(facts)
    lengths_said = "2.00 with the head of this stage's input and 2.10 after training, on held-out texts"
    assert summary == (f"{kept} head kept; acceptance length {lengths_said}, {said}")


def test_a_loss_that_is_no_number_is_an_error(damaged: Path, tmp_path: Path, without_vllm: None) -> None:
    source = shutil.copytree(damaged, tmp_path / "nan")
    with edited_tensors(source) as tensors:
        tensors["mtp.norm.weight"][0] = float("nan")
    with pytest.raises(StageError, match="lower learning_rate"):
        redistil(source, tmp_path / "run")


def test_a_checkpoint_without_sampled_outputs_names_the_stage_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="put the stage sample_outputs before"):
        redistil(TINY, tmp_path)
