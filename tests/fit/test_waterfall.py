"""The waterfall of what the recipes of variants do."""

import shutil
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.fit import FitError, waterfall
from slimqwen.fit.memory import ServerSettings
from slimqwen.fit.subject import find_subject
from slimqwen.fit.waterfall import WaterfallStep
from slimqwen.models.shape import ShapeError
from slimqwen.plan.devices import read_gpu

ROOT = variant.repository_root()
A10G = read_gpu("a10g", ROOT)
DRAFTS = """VLLM_SPECULATIVE_CONFIG='{"method": "mtp", "num_speculative_tokens": 4}'"""


@pytest.fixture
def repository(add_variant, tmp_path: Path) -> Path:
    """tiny and a variant of it that drafts, in a repository of their own."""
    add_variant("tiny", (ROOT / "experiments" / "tiny" / "config.env").read_text())
    add_variant("drafting", f"BASE=tiny\nVLLM_MAX_NUM_SEQS=8\n{DRAFTS}\n", baseline="tiny")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    for name in ("devices.yaml", "shapes"):
        (tmp_path / "eval").mkdir(exist_ok=True)
        (tmp_path / "eval" / name).symlink_to(ROOT / "eval" / name)
    return tmp_path


def steps_of(name: str, root: Path = ROOT, context_len: int = 2048) -> list[WaterfallStep]:
    subject = find_subject(name, root)
    return list(waterfall.list_steps(subject, ServerSettings.of(subject, None, None), A10G, context_len))


def test_each_optimisation_saves_the_bytes_that_it_is_for():
    steps = steps_of("qwen3.5-4b-best")
    assert [step.optimisation for step in steps] == [
        "qwen3.5-4b",
        "drafts, K = 4",
        "calibrate",
        "prune_vocab",
        "trim_draft_vocab",
        "calibrate again",
    ]
    base, drafts, packed, pruned, trimmed, packed_drafts = steps
    assert [step.num_speculative_tokens for step in steps[:3]] == [0, 4, 4]
    assert base.part_bytes["draft head"] == 0
    assert drafts.part_bytes["draft head"] == 4 * base.part_bytes["output head"] == 4 * 248320 * 2560 * 2
    assert packed.part_bytes["layers"] < 0.7 * drafts.part_bytes["layers"]
    assert packed.part_bytes["output head"] == drafts.part_bytes["output head"]
    assert pruned.part_bytes["output head"] == 65536 * 2560 * 2
    assert pruned.seconds < packed.seconds
    # 4 bits, and a scale of 16 bits for 32 weights.
    assert trimmed.part_bytes["draft head"] == 4 * 32768 * 2560 * 4.5 / 8
    assert packed_drafts.part_bytes["draft layers"] < 0.3 * trimmed.part_bytes["draft layers"]


def test_a_variant_without_a_recipe_or_drafts_is_one_step():
    (step,) = steps_of("qwen3.5-4b", context_len=128)
    assert (step.optimisation, step.num_speculative_tokens) == ("qwen3.5-4b", 0)


def test_dtypes_of_states_and_cache_are_steps_of_their_own(repository: Path, add_variant):
    lines = "VLLM_MAMBA_SSM_CACHE_DTYPE=float32\nVLLM_KV_CACHE_DTYPE=fp8\n"
    add_variant("wide", f"BASE=drafting\n{lines}")
    steps = steps_of("wide", repository)
    assert [step.optimisation for step in steps] == [
        "tiny",
        "drafts, K = 4",
        "states in float32",
        "KV cache in fp8",
    ]
    sizes = [step.part_bytes["states and KV cache"] for step in steps]
    assert sizes[0] < sizes[1] < sizes[2] > sizes[3]


def test_a_checkpoint_that_is_here_counts_as_it_is_stored(repository: Path, add_variant):
    (step,) = steps_of("tiny", repository)
    stored = list_tensors(ROOT / "weights" / "tiny")
    table = stored["model.embed_tokens.weight"]
    assert step.part_bytes["output head"] == table.end - table.start
    # One of a form that no recipe describes is a single stage.
    packed = repository / "weights" / "own"
    shutil.copytree(ROOT / "weights" / "tiny", packed)
    config = checkpoint.read_config(packed)
    checkpoint.config.write_config(packed, {**config, "quantization_config": {}})
    add_variant("own", "BASE=tiny\nVLLM_MODEL=weights/own\n")
    assert [(each.optimisation, each.part_bytes) for each in steps_of("own", repository)] == [
        ("own", step.part_bytes)
    ]
    add_variant("elsewhere", "BASE=tiny\nVLLM_MODEL=weights/elsewhere\n")
    with pytest.raises(ShapeError, match="weights/elsewhere are not known"):
        steps_of("elsewhere", repository)


def test_drafts_that_are_looked_up_in_the_prompt_are_left_out(repository: Path, add_variant):
    ngram = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}'
    add_variant("looking-up", f"BASE=tiny\nVLLM_SPECULATIVE_CONFIG='{ngram}'\n")
    assert {step.num_speculative_tokens for step in steps_of("looking-up", repository)} == {0}


def test_what_is_no_variant_has_no_waterfall():
    with pytest.raises(FitError, match="has no recipe whose stages --waterfall could show; name a variant"):
        steps_of("qwen3.5-27b")


def test_the_table_has_a_row_for_each_step_in_a_unit_that_shows_it(repository: Path):
    subject = find_subject("drafting", repository)
    table = waterfall.waterfall_table(subject, ServerSettings.of(subject, None, None), A10G)
    steps = steps_of("drafting", repository)
    assert [row[0] for row in table.rows] == [step.optimisation for step in steps]
    assert table.columns[2] == "layers, MB"
    assert float(table.rows[0][2]) == pytest.approx(steps[0].part_bytes["layers"] / 1e6, abs=0.01)
    assert table.notes[0].startswith("One sequence of 2,048 cached tokens at 600 GB/s")
