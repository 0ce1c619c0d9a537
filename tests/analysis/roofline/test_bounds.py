"""Rooflines of variants as they are served, beside their baseline and what was measured."""

import json
import shutil
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.analysis.roofline import cost
from slimqwen.analysis.roofline import gpu as gpus
from slimqwen.analysis.roofline.architecture import read_model
from slimqwen.analysis.roofline.bounds import analyse, tokens_per_second_by_depth, with_baseline, write
from slimqwen.analysis.roofline.gpu import RooflineError
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.records import store
from tests import record_files

ROOT = variant.repository_root()


@pytest.fixture
def repository(add_variant, tmp_path: Path) -> Path:
    """tiny, a variant of it that drafts, and a third without weights, in a repository of their own."""
    config = (ROOT / "experiments" / "tiny" / "config.env").read_text()
    add_variant("tiny", config)
    drafts = """VLLM_SPECULATIVE_CONFIG='{"method": "mtp", "num_speculative_tokens": 4}'"""
    add_variant("drafting", f"BASE=tiny\nVLLM_MAX_NUM_SEQS=8\n{drafts}\n", baseline="tiny")
    recipe = add_variant("absent", "BASE=tiny\nVLLM_MODEL=weights/absent\n").with_name("recipe.yaml")
    recipe.write_text("")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    (tmp_path / "eval").mkdir()
    shutil.copy(ROOT / "eval" / "devices.yaml", tmp_path / "eval")
    return tmp_path


def accepted(root: Path, digest: str, length: float, split: dict | None = None) -> Path:
    example = record_files.example("acceptance")
    estimate = {"value": length, "standard_error": 0.1, "count": 2}
    example["depths"] = [{"depth": 4, "tokens_per_second": 1.0, "length": estimate, "settings": []}]
    example["provenance"]["checkpoint"]["digest"] = digest
    return record_files.write(
        root / "experiments" / "drafting", example | {"variant": "drafting", "split": split}, [{"group": 0}]
    )


def test_a_variant_is_bounded_beside_its_baseline(repository: Path):
    a10g = gpus.read("a10g", repository)
    compared = with_baseline(variant.load("drafting", repository), ["tiny", "drafting"])
    assert [each.name for each in compared] == ["tiny", "drafting"]
    digest = checkpoint.digest(repository / "weights" / "tiny")

    unknown = analyse(compared, a10g)
    tiny, drafting = unknown["variants"]
    assert unknown["context_lens"] == (128, 2048, 4096)
    assert {row.num_speculative_tokens for row in drafting.decode} == {0}
    assert "drafting: acceptance length at K = 4 (unknown, so only without speculation: there is no " in str(
        unknown["notes"]
    )
    assert [row.single_over_baseline for row in drafting.decode] == [1, 1, 1]
    assert [row.batch.batch_size for row in drafting.decode] == [8, 8, 8]
    assert drafting.decode[0].batch_over_baseline > 4
    # Its embedding is its head: all that is stored but the MTP head is read.
    assert tiny.decode[0].weight_bytes_per_step == sum(
        info.end - info.start
        for name, info in list_tensors(repository / "weights" / "tiny").items()
        if not name.startswith("mtp.")
    )

    assumed = analyse(compared, a10g, acceptance_length=3.0)["variants"][1]
    assert assumed.acceptance_length.source.startswith("assumed: there is no acceptance record")
    of_search = accepted(repository, digest, 4.9, {"side": "search", "proof_share": 0.5})
    assert (
        analyse(compared, a10g, acceptance_length=3.0)["variants"][1].acceptance_length
        == assumed.acceptance_length
    )
    of_search.unlink()
    of_search.with_suffix(".items.jsonl").unlink()
    assert [row.num_speculative_tokens for row in assumed.decode] == [0, 0, 0, 4, 4, 4]

    other = accepted(repository, "ab" * 32, 4.5)
    stale = analyse(compared, a10g)["variants"][1].acceptance_length
    assert (stale.value, stale.source.partition(": ")[2]) == (
        None,
        f"drafting/{other.name} is of another checkpoint",
    )

    other.unlink()
    other.with_suffix(".items.jsonl").unlink()
    accepted(repository, digest, 4.5)
    record = write(compared[1], "a10g", acceptance_length=3.0, command=["x"])
    roofline = store.read(record)
    best = roofline.variants[1]
    assert (best.acceptance_length.value, best.acceptance_length.source.partition(", ")[2]) == (4.5, "K = 4")
    single, batch = roofline.panels()
    assert [line.label for line in single.lines] == ["tiny", "drafting, K = 4"]
    assert batch.lines[1].y == [row.batch.tokens_per_second for row in best.decode[3:]]
    assert "drafting: not measured on this GPU" in roofline.notes
    decode, prefill = roofline.tables(record)
    assert len(decode.rows) == 3 + 6
    assert "600 GB/s, dense peak bf16 70, int8 140" in decode.notes[0]
    assert {row[0] for row in prefill.rows} == {"tiny", "drafting"}
    assert json.loads(record.read_text())["schema"] == "roofline/2"


def test_missing_weights_name_the_command_that_makes_them(repository: Path):
    absent = variant.load("absent", repository)
    with pytest.raises(MissingCheckpointError, match=r"`make recipe VARIANT=absent` makes it"):
        analyse([absent], gpus.read("a10g", repository))


def test_a_gpu_without_room_is_refused(repository: Path):
    small = gpus.read("a10g", repository).model_copy(update={"memory_gib": 0.005})
    with pytest.raises(RooflineError, match=r"may use 92% of a10g's .*; use a larger GPU"):
        analyse([variant.load("tiny", repository)], small)


def test_only_a_record_of_this_gpu_and_checkpoint_is_held_against_a_bound(repository: Path):
    on = gpus.read("a10g", repository)
    one = variant.load("tiny", repository)
    of_cpu = next((ROOT / "experiments" / "tiny").glob("latency_*.json"))
    record = json.loads(of_cpu.read_text())
    file = repository / "experiments" / "tiny" / of_cpu.name
    file.write_text(json.dumps(record))
    assert analyse([one], on)["variants"][0].measured == ()

    gpu = {"name": "NVIDIA A10G", "memory_bytes": 24 * 10**9, "driver": "1"}
    record["provenance"]["hardware"]["gpus"] = [gpu]
    file.write_text(json.dumps(record))
    short = analyse([one], on)["variants"][0].measured[0]
    assert short.class_ == "short"
    assert short.tokens_per_second == record["classes"]["short"]["output_throughput_tokens_per_s"]
    # By hand: 31 prompt tokens at once, then 61 steps.
    of = read_model(list_tensors(one.weights), checkpoint.read_config(one.weights))
    seconds = cost.prefill(of, 31).seconds(on) + 61 * cost.verify(of, 1, 31).seconds(on)
    assert short.bound_tokens_per_second == pytest.approx(62 / seconds)
    assert short.share_of_bound == pytest.approx(short.tokens_per_second * seconds / 62)

    for changed in ({**gpu, "name": "NVIDIA A10"}, None):
        record["provenance"]["hardware"]["gpus"] = [changed or gpu]
        record["provenance"]["checkpoint"]["digest"] = (
            "0" * 64 if changed is None else record["provenance"]["checkpoint"]["digest"]
        )
        file.write_text(json.dumps(record))
        assert analyse([one], on)["variants"][0].measured == ()


def test_speeds_by_depth_cover_the_batches_that_are_served(repository: Path):
    drafting = variant.load("drafting", repository)
    lengths = {0: 1.0, 4: 3.0}
    fixed = tokens_per_second_by_depth(drafting, "a10g", lengths, 128)
    varying = tokens_per_second_by_depth(drafting, "a10g", lengths, 128, always_drafts=True)
    assert {depth: len(rates) for depth, rates in fixed.items()} == {0: 8, 4: 8}
    for rates in fixed.values():
        assert rates == sorted(rates)
    assert varying[4] == fixed[4]
    model = read_model(
        list_tensors(drafting.weights),
        checkpoint.read_config(drafting.weights),
        kv_cache_dtype="auto",
        state_dtype="auto",
    )
    step = cost.decode(model, gpus.read("a10g", repository), 8, 128, 4, 3.0)
    assert fixed[4][-1] == step.tokens_per_second
    none = cost.decode(model, gpus.read("a10g", repository), 8, 128)
    pass_seconds = cost.draft(model, 8, 128).seconds(gpus.read("a10g", repository))
    assert varying[0][-1] == pytest.approx(8 / (none.seconds + pass_seconds))
