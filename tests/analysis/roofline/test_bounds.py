"""Rooflines of variants as they are served, beside their baseline and what was measured."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.analysis.roofline import architecture, bounds, cost
from slimqwen.analysis.roofline import gpu as gpus
from slimqwen.analysis.roofline.architecture import read_model
from slimqwen.analysis.roofline.bounds import (
    ServedVariant,
    analyse,
    tokens_per_second_by_depth,
    with_baseline,
    write,
)
from slimqwen.analysis.roofline.gpu import RooflineError
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.records import store
from tests import record_files
from tests.analysis.roofline.shapes import (
    BODY_BYTES,
    CONFIG,
    HEAD_BYTES,
    KV,
    MTP_BYTES,
    SMALL,
    STATE,
    info,
    tensors,
)

ROOT = variant.repository_root()
A10G = gpus.read("a10g", ROOT)


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


def served(name: str, root: Path) -> ServedVariant:
    return ServedVariant.load(variant.load(name, root), A10G)


def accepted(root: Path, digest: str, length: float, split: dict | None = None) -> Path:
    example = record_files.example("acceptance")
    estimate = {"value": length, "standard_error": 0.1, "count": 2}
    example["depths"] = [{"depth": 4, "tokens_per_second": 1.0, "length": estimate, "settings": []}]
    example["provenance"]["checkpoint"]["digest"] = digest
    return record_files.write(
        root / "experiments" / "drafting", example | {"variant": "drafting", "split": split}, [{"group": 0}]
    )


def remove(record: Path) -> None:
    record.unlink()
    record.with_suffix(".items.jsonl").unlink()


def test_a_variant_is_bounded_beside_its_baseline(repository: Path):
    compared = with_baseline(variant.load("drafting", repository), ["tiny", "drafting"])
    assert [each.name for each in compared] == ["tiny", "drafting"]
    digest = checkpoint.digest(repository / "weights" / "tiny")

    unknown = analyse(compared, A10G)
    tiny, drafting = unknown["variants"]
    assert unknown["context_lens"] == (128, 2048, 4096)
    assert (tiny.acceptance_length.value, tiny.acceptance_length.source) == (1.0, "no speculation")
    assert {row.num_speculative_tokens for row in drafting.decode} == {0}
    assert "drafting: acceptance length at K = 4 (unknown, so only without speculation: there is no " in str(
        unknown["notes"]
    )
    assert [row.single_over_baseline for row in drafting.decode] == [1, 1, 1]
    assert [row.batch.batch_size for row in drafting.decode] == [8, 8, 8]
    assert drafting.decode[0].batch_over_baseline > 4
    assert {row.single.batch_size for row in (*tiny.decode, *drafting.decode)} == {1}
    # Its embedding is its head: all that is stored but the MTP head is read.
    assert tiny.decode[0].weight_bytes_per_step == sum(
        info.end - info.start
        for name, info in list_tensors(repository / "weights" / "tiny").items()
        if not name.startswith("mtp.")
    )

    assumed = analyse(compared, A10G, acceptance_length=3.0)["variants"][1]
    assert assumed.acceptance_length.source.startswith("assumed: there is no acceptance record")
    of_search = accepted(repository, digest, 4.9, {"side": "search", "proof_share": 0.5})
    assert (
        analyse(compared, A10G, acceptance_length=3.0)["variants"][1].acceptance_length
        == assumed.acceptance_length
    )
    remove(of_search)
    assert [row.num_speculative_tokens for row in assumed.decode] == [0, 0, 0, 4, 4, 4]
    for row, reference in zip(assumed.decode[3:], tiny.decode, strict=True):
        assert row.context_len == reference.context_len
        for ours, theirs, ratio in (
            (row.single, reference.single, row.single_over_baseline),
            (row.batch, reference.batch, row.batch_over_baseline),
        ):
            assert ratio == pytest.approx(ours.tokens_per_second / theirs.tokens_per_second, rel=1e-3)

    other = accepted(repository, "ab" * 32, 4.5)
    stale = analyse(compared, A10G)["variants"][1].acceptance_length
    assert (stale.value, stale.source.partition(": ")[2]) == (
        None,
        f"drafting/{other.name} is of another checkpoint",
    )

    remove(other)
    accepted(repository, digest, 4.5)
    record = write(compared[1], "a10g", acceptance_length=3.0, command=["x"])
    roofline = store.read(record)
    best = roofline.variants[1]
    assert (best.acceptance_length.value, best.acceptance_length.source.partition(", ")[2]) == (4.5, "K = 4")
    assert "drafting: not measured on this GPU" in roofline.notes
    decode, prefill = roofline.tables(record)
    assert len(decode.rows) == 3 + 6
    assert "600 GB/s, dense peak bf16 70, int8 140" in decode.notes[0]
    assert {row[0] for row in prefill.rows} == {"tiny", "drafting"}
    assert json.loads(record.read_text())["schema"] == "roofline/2"


def test_missing_weights_name_the_command_that_makes_them(repository: Path):
    absent = variant.load("absent", repository)
    with pytest.raises(MissingCheckpointError, match=r"`make recipe VARIANT=absent` makes it"):
        analyse([absent], A10G)


def test_a_gpu_without_room_is_refused(repository: Path):
    small = A10G.model_copy(update={"memory_gib": 0.005})
    with pytest.raises(RooflineError, match=r"may use 92% of a10g's .*; use a larger GPU"):
        analyse([variant.load("tiny", repository)], small)


def test_only_a_record_of_this_gpu_and_checkpoint_is_held_against_a_bound(repository: Path):
    one = variant.load("tiny", repository)
    of_cpu = next((ROOT / "experiments" / "tiny").glob("latency_*.json"))
    record = json.loads(of_cpu.read_text())
    file = repository / "experiments" / "tiny" / of_cpu.name
    file.write_text(json.dumps(record))
    assert analyse([one], A10G)["variants"][0].measured == ()

    gpu = {"name": "NVIDIA A10G", "memory_bytes": 24 * 10**9, "driver": "1"}
    record["provenance"]["hardware"]["gpus"] = [gpu]
    file.write_text(json.dumps(record))
    short = analyse([one], A10G)["variants"][0].measured[0]
    assert short.class_ == "short"
    assert short.tokens_per_second == record["classes"]["short"]["output_throughput_tokens_per_s"]
    # By hand: 31 prompt tokens at once, then 61 steps.
    of = read_model(list_tensors(one.weights), checkpoint.read_config(one.weights))
    seconds = cost.prefill(of, 31).seconds(A10G) + 61 * cost.verify(of, 1, 31).seconds(A10G)
    assert short.bound_tokens_per_second == pytest.approx(62 / seconds)
    assert short.share_of_bound == pytest.approx(short.tokens_per_second * seconds / 62)

    for changed in ({**gpu, "name": "NVIDIA A10"}, None):
        record["provenance"]["hardware"]["gpus"] = [changed or gpu]
        if changed is None:
            record["provenance"]["checkpoint"]["digest"] = "0" * 64
        file.write_text(json.dumps(record))
        assert analyse([one], A10G)["variants"][0].measured == ()


def test_speeds_by_depth_cover_the_batches_that_are_served(repository: Path):
    drafting = variant.load("drafting", repository)
    lengths = {0: 1.0, 4: 3.0}
    fixed = tokens_per_second_by_depth(drafting, "a10g", lengths, 128)
    varying = tokens_per_second_by_depth(drafting, "a10g", lengths, 128, always_drafts=True)
    assert {depth: len(rates) for depth, rates in fixed.items()} == {0: 8, 4: 8}
    for rates in fixed.values():
        assert rates == sorted(rates)
    assert varying[4] == fixed[4]
    model = read_model(list_tensors(drafting.weights), checkpoint.read_config(drafting.weights))
    step = cost.decode(model, A10G, 8, 128, 4, 3.0)
    assert fixed[4][-1] == step.tokens_per_second
    none = cost.decode(model, A10G, 8, 128)
    pass_seconds = cost.draft(model, 8, 128).seconds(A10G)
    assert varying[0][-1] == pytest.approx(8 / (none.seconds + pass_seconds))


def test_an_acceptance_record_without_the_served_depth_is_named_and_not_used(repository: Path):
    digest = checkpoint.digest(repository / "weights" / "tiny")
    file = accepted(repository, digest, 4.5)
    record = json.loads(file.read_text())
    record["depths"][0]["depth"] = 3
    file.write_text(json.dumps(record))
    drafting = [variant.load("drafting", repository)]
    assumed = analyse(drafting, A10G, acceptance_length=2.0)["variants"][0].acceptance_length
    assert (assumed.value, assumed.source) == (2.0, f"assumed: drafting/{file.name} has no K = 4")
    with pytest.raises(RooflineError, match="lies between 1 and 5"):
        analyse(drafting, A10G, acceptance_length=5.5)


def test_contexts_are_cut_to_the_shortest_server_and_are_at_least_one_token(repository: Path):
    tiny = variant.load("tiny", repository)
    found = analyse([tiny], A10G, [9999, 64, 64, 1, 8192])
    assert found["context_lens"] == (1, 64, 4096)
    [only] = found["variants"]
    assert (
        [row.context_len for row in only.decode] == [row.num_tokens for row in only.prefill] == [1, 64, 4096]
    )
    for none in ([], [0, 64]):
        with pytest.raises(RooflineError, match="at least one token"):
            analyse([tiny], A10G, none)


def test_the_l2_cache_is_noted_only_where_it_holds_a_tenth_of_the_weights(repository: Path):
    tiny = variant.load("tiny", repository)
    resident = served("tiny", repository).model.resident_bytes(0)
    for share, shown, is_noted in ((0.09, 0.09, False), (0.11, 0.11, True), (3.0, 1.0, True)):
        found = analyse([tiny], A10G.model_copy(update={"l2_cache_mb": share * resident / 1e6}))
        assert found["variants"][0].l2_share == pytest.approx(shown)
        assert (f"a10g's L2 cache holds {shown:.0%} of its weights" in str(found["notes"])) == is_noted
        assert not any("acceptance length" in note for note in found["notes"])
    exactly_a_tenth = found["variants"][0].model_copy(update={"l2_share": 0.1})
    assert "L2" not in str(bounds._notes(exactly_a_tenth, A10G))


def test_a_batch_is_as_large_as_flags_and_memory_allow(repository: Path, add_variant):
    add_variant("wide", "BASE=tiny\nVLLM_MAX_NUM_SEQS=2000\nVLLM_GPU_MEMORY_UTILIZATION=0.5\n")
    wide = served("wide", repository)
    small = A10G.model_copy(update={"memory_gib": 1})
    fitting = wide.model.fitting_batch(small, 4096, 0, 0.5)
    assert fitting < min(wide.max_num_seqs, wide.model.fitting_batch(small, 4096, 0))
    assert wide.largest_batch(small, 4096) == fitting
    assert wide.largest_batch(A10G, 128) == wide.max_num_seqs == 2000
    text = (repository / "experiments" / "tiny" / "config.env").read_text()
    add_variant("unsaid", text.replace("VLLM_MAX_NUM_SEQS=1\n", ""))
    unsaid = served("unsaid", repository)
    assert unsaid.max_num_seqs == unsaid.largest_batch(A10G, 128) == A10G.default_max_num_seqs


def test_a_prompt_is_bounded_alone_and_counts_per_token(repository: Path):
    tiny = served("tiny", repository)
    found, work = tiny.prefill(A10G, 100), cost.prefill(tiny.model, 100)
    assert (found.num_tokens, found.seconds, found.limited_by) == (100, work.seconds(A10G), work.limit(A10G))
    assert found.tokens_per_second == pytest.approx(100 / work.seconds(A10G))
    assert found.bytes_per_token == pytest.approx(work.bytes / 100)
    assert found.flops_per_token == pytest.approx(work.total_flops / 100)


def test_requests_at_once_hide_the_prefill_of_each_other(repository: Path):
    drafting = served("drafting", repository)
    alone = cost.decode(drafting.model, A10G, 1, 31, 4, 3.0).tokens_per_second
    both = cost.decode(drafting.model, A10G, 2, 31, 4, 3.0).tokens_per_second
    prompt = cost.prefill(drafting.model, 31, 4).seconds(A10G)
    assert drafting.request_rate(A10G, 31, 62, 1, 3.0) == pytest.approx(62 / (61 / alone + prompt))
    assert drafting.request_rate(A10G, 31, 62, 2, 3.0) == pytest.approx(62 / (61 / both))


@pytest.mark.parametrize(("counted", "length"), [({"length": 3.0}, 3.0), (None, 5.0)])
def test_drafts_of_a_measured_class_are_bounded_as_counted_or_as_all_accepted(
    repository: Path, counted: dict | None, length: float
):
    drafting = served("drafting", repository)
    record = record_files.example("latency", variant="drafting")
    row = record["classes"]["short"]
    row["acceptance"] = row["acceptance"] | counted if counted else None
    made = record["provenance"]
    made["flags"] |= {"speculative-config": drafting.flags["speculative-config"]}
    made["checkpoint"]["digest"] = drafting.digest
    made["hardware"]["gpus"] = [{"name": "NVIDIA A10G", "memory_bytes": 24 * 10**9, "driver": "1"}]
    folder = repository / "experiments" / "drafting"
    file = record_files.write(folder, record, [{"class": "short"}])
    [short] = drafting.measured(A10G)
    assert short.record == file.name
    assert (short.concurrency, short.prompt_tokens, short.output_tokens) == (8, 16, 16)
    assert short.bound_tokens_per_second == drafting.request_rate(A10G, 16, 16, 8, length)
    # With other drafts or another cache than the flags give it is the record of another server.
    whole = file.read_text()
    for changed in ({"speculative-config": None}, {"kv-cache-dtype": "fp8"}):
        fields = json.loads(whole)
        fields["provenance"]["flags"] |= changed
        file.write_text(json.dumps(fields))
        assert drafting.measured(A10G) == []


def test_what_a_draft_head_adds_is_listed_with_the_drafter(repository: Path):
    drafting = served("drafting", repository)
    rows = {"mtp.draft_head.weight": info((4, 8)), "mtp.draft_head.token_ids": info((4,), "I64")}
    trimmed = read_model(tensors(**rows), CONFIG)
    for model, drafter_bytes in ((SMALL, MTP_BYTES), (trimmed, MTP_BYTES + 2 * 4 * 8)):
        found = replace(drafting, model=model).bounds(A10G, [16], 3.0, None)
        assert found.weights.drafter == {"BF16": drafter_bytes}
        assert (found.weights.body, found.weights.head) == ({"BF16": BODY_BYTES}, {"BF16": HEAD_BYTES})
        assert (found.kv_bytes_per_token, found.state_bytes_per_sequence) == (KV, STATE)
        assert [row.weight_bytes_per_step for row in found.decode] == [
            model.weight_bytes_per_step(0),
            model.weight_bytes_per_step(4),
        ]


def test_flags_that_no_bound_is_known_for_are_refused_with_a_cure(repository: Path, add_variant, monkeypatch):
    add_variant("wide", "BASE=tiny\nVLLM_DTYPE=float32\n")
    with pytest.raises(RooflineError, match=r"served in float32.*set VLLM_DTYPE=bfloat16"):
        served("wide", repository)
    ngram = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}'
    add_variant("looking-up", f"BASE=tiny\nVLLM_SPECULATIVE_CONFIG='{ngram}'\n")
    with pytest.raises(RooflineError, match=r"drafts with 'ngram'.*set method to mtp"):
        served("looking-up", repository)
    monkeypatch.setattr(
        architecture,
        "list_tensors",
        lambda folder: {
            name: each for name, each in list_tensors(folder).items() if not name.startswith("mtp.")
        },
    )
    with pytest.raises(RooflineError, match="an MTP head that its checkpoint lacks"):
        served("drafting", repository)
