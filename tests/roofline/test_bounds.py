"""Rooflines of variants as they are served, and the waterfall of what their recipes do."""

import shutil
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.models.shape import ShapeError
from slimqwen.plan.devices import read_gpu
from slimqwen.records import store
from slimqwen.roofline import RooflineError, bounds, cost
from slimqwen.roofline.architecture import read_model
from slimqwen.roofline.bounds import ServedModel, compute_roofline
from slimqwen.roofline.record import Roofline

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


def served(name: str, root: Path = ROOT) -> ServedModel:
    return ServedModel.load(variant.load(name, root))


def written(name: str, root: Path, **arguments) -> Roofline:
    record = compute_roofline(variant.load(name, root), "a10g", command=["x"], **arguments)
    return store.read_record(store.write_record(root / "experiments" / name, record), Roofline)


def test_each_optimisation_saves_the_bytes_that_it_is_for():
    steps = list(served("qwen3.5-4b-best").list_waterfall_steps(A10G, 2048))
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
    assert trimmed.part_bytes["draft head"] == 4 * 32768 * 2560 * 2
    assert packed_drafts.part_bytes["draft layers"] < 0.3 * trimmed.part_bytes["draft layers"]


def test_a_variant_without_a_recipe_or_drafts_is_one_step():
    (step,) = served("qwen3.5-4b").list_waterfall_steps(A10G, 128)
    assert (step.optimisation, step.num_speculative_tokens) == ("qwen3.5-4b", 0)


def test_dtypes_of_states_and_cache_are_steps_of_their_own(repository: Path, add_variant):
    lines = "VLLM_MAMBA_SSM_CACHE_DTYPE=float32\nVLLM_KV_CACHE_DTYPE=fp8\n"
    add_variant("wide", f"BASE=drafting\n{lines}")
    steps = list(served("wide", repository).list_waterfall_steps(A10G, 2048))
    assert [step.optimisation for step in steps] == [
        "tiny",
        "drafts, K = 4",
        "states in float32",
        "KV cache in fp8",
    ]
    sizes = [step.part_bytes["states and KV cache"] for step in steps]
    assert sizes[0] < sizes[1] < sizes[2] > sizes[3]


def test_a_checkpoint_that_is_here_counts_as_it_is_stored(repository: Path, add_variant):
    model = read_model(
        list_tensors(ROOT / "weights" / "tiny"), checkpoint.read_config(ROOT / "weights" / "tiny")
    )
    tiny = served("tiny", repository)
    assert (tiny.model, tiny.dimensions) == (model, "weights/tiny")
    # One of a form that no recipe describes is a single stage.
    packed = repository / "weights" / "own"
    shutil.copytree(ROOT / "weights" / "tiny", packed)
    config = checkpoint.read_config(packed)
    checkpoint.config.write_config(packed, {**config, "quantization_config": {}})
    add_variant("own", "BASE=tiny\nVLLM_MODEL=weights/own\n")
    own = served("own", repository)
    assert (own.model, own.dimensions, len(own.stages)) == (model, "weights/own", 1)
    add_variant("elsewhere", "BASE=tiny\nVLLM_MODEL=weights/elsewhere\n")
    with pytest.raises(ShapeError, match="weights/elsewhere are not known"):
        served("elsewhere", repository)


def test_the_record_bounds_contexts_depths_and_batches(repository: Path):
    record = written("drafting", repository, acceptance_length=3.0, acceptance_source="3, assumed")
    # tiny serves 4,096 tokens.
    assert [
        (row.context_len, row.num_speculative_tokens, row.batch_size, row.acceptance_length)
        for row in record.decode
    ] == [
        (context, depth, batch, length)
        for context in (128, 2048, 4096)
        for depth, length in ((0, 1.0), (4, 3.0))
        for batch in (1, 8)
    ]
    model = served("drafting", repository).model
    assert record.decode[-1] == cost.bound_decode_step(model, A10G, 8, 4096, 4, 3.0)
    assert record.prefill_seconds["2048"] == cost.count_prefill_work(model, 2048, 4).seconds(A10G)
    assert record.l2_share == pytest.approx(min(1, 6e6 / model.resident_bytes(4)))
    waterfall, by_context = record.tables(repository / "x.json")
    assert [row[0] for row in waterfall.rows] == [step.optimisation for step in record.waterfall]
    assert waterfall.columns[2] == "layers, MB"
    assert float(waterfall.rows[0][2]) == pytest.approx(
        record.waterfall[0].part_bytes["layers"] / 1e6, abs=0.01
    )
    assert (record.context_len, len(by_context.rows)) == (2048, 6)
    assert "Acceptance length: 3, assumed." in by_context.notes


def test_drafts_of_unknown_acceptance_have_no_rate(repository: Path):
    record = written("drafting", repository, acceptance_source="no record")
    assert {row.num_speculative_tokens for row in record.decode} == {0}
    assert record.waterfall[-1].num_speculative_tokens == 4
    assert written("tiny", repository).acceptance == "1, as there are no drafts"
    with pytest.raises(RooflineError, match="give one between 1 and 5"):
        written("drafting", repository, acceptance_length=5.5)


def test_contexts_are_cut_to_the_server_and_are_at_least_one_token(repository: Path):
    record = written("tiny", repository, context_lens=[9999, 64, 64, 1, 8192])
    assert list(record.prefill_seconds) == ["1", "64", "4096"]
    for none in ([], [0, 64]):
        with pytest.raises(RooflineError, match="at least 1 token"):
            written("tiny", repository, context_lens=none)


def test_a_batch_is_as_large_as_flags_and_memory_allow(repository: Path, add_variant):
    add_variant("wide", "BASE=tiny\nVLLM_MAX_NUM_SEQS=2000\nVLLM_GPU_MEMORY_UTILIZATION=0.5\n")
    wide = served("wide", repository)
    small = A10G.model_copy(update={"memory_gib": 1})
    fitting = wide.model.fitting_batch(small, 4096, 0, 0.5)
    assert fitting < min(2000, wide.model.fitting_batch(small, 4096, 0))
    assert wide.largest_batch(small, 4096) == fitting
    assert wide.largest_batch(A10G, 128) == 2000
    text = (repository / "experiments" / "tiny" / "config.env").read_text()
    add_variant("unsaid", text.replace("VLLM_MAX_NUM_SEQS=1\n", ""))
    assert served("unsaid", repository).largest_batch(A10G, 128) == A10G.default_max_num_seqs
    with pytest.raises(RooflineError, match=r"may use only 50% of the .* of a10g; use a larger GPU"):
        wide.largest_batch(A10G.model_copy(update={"memory_gib": 0.005}), 128)


def test_drafts_that_are_looked_up_in_the_prompt_are_left_out(repository: Path, add_variant):
    ngram = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}'
    add_variant("looking-up", f"BASE=tiny\nVLLM_SPECULATIVE_CONFIG='{ngram}'\n")
    assert ServedModel.load(variant.load("looking-up", repository)).num_speculative_tokens == 0


def test_flags_that_no_bound_is_known_for_are_refused_with_a_cure(repository: Path, add_variant, monkeypatch):
    add_variant("wide", "BASE=tiny\nVLLM_DTYPE=float32\n")
    with pytest.raises(RooflineError, match=r"served in float32.*set VLLM_DTYPE=bfloat16"):
        served("wide", repository)
    suffix = '{"method": "suffix", "num_speculative_tokens": 2}'
    add_variant("looking-up", f"BASE=tiny\nVLLM_SPECULATIVE_CONFIG='{suffix}'\n")
    with pytest.raises(RooflineError, match=r"drafts with 'suffix'.*set method to mtp"):
        served("looking-up", repository)
    without = {n: i for n, i in list_tensors(ROOT / "weights" / "tiny").items() if not n.startswith("mtp.")}
    monkeypatch.setattr(bounds, "list_tensors", lambda folder: without)
    with pytest.raises(RooflineError, match="an MTP head that its checkpoint lacks"):
        served("drafting", repository)
