"""Rehearsals: what vLLM resolves a variant to, on this CPU or, with a CUDA build of torch, on simulated GPUs."""

import json
import shutil

import pytest
import torch

from slimqwen import variant
from slimqwen.fit.memory import ServerSettings
from slimqwen.fit.subject import find_subject
from slimqwen.fit.tables import list_notes
from slimqwen.fit.verdict import fit_on_gpus
from slimqwen.plan import rehearsal, shapes, simulated_gpu, trouble
from slimqwen.plan.devices import read_gpu, read_gpus
from slimqwen.serving.command import ServerCommand
from tests.checkpoints import stage_output
from tests.plan import every_card
from tests.plan.example import needs_cuda_build
from tests.zoo.published_forms import PUBLISHED_FORMS
from tests.zoo.verbs import write_outputs

ROOT = variant.repository_root()
pytestmark = pytest.mark.engine

needs_cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")


@pytest.fixture(scope="module")
def cpu_plans(tmp_path_factory):
    log = tmp_path_factory.mktemp("plans") / "plan.log"
    variants = [variant.load(name) for name in ("tiny", "tiny-mtp4")]
    return {plan.variant: plan for plan in rehearsal.rehearse_variants(variants, None, log=log)}


@needs_cpu_build
def test_a_cpu_variant_is_resolved_to_its_end(cpu_plans):
    for plan in cpu_plans.values():
        assert (plan.failed_at, plan.error) == (None, None)
        assert plan.gpu == "cpu"
    assert [layers.drafts for layers in cpu_plans["tiny-mtp4"].attention].count(True) == 1
    assert cpu_plans["tiny-mtp4"].graphs.decode_query_len == 5


@needs_cpu_build
def test_a_plan_holds_the_flags_that_it_was_made_for_wherever_the_server_listens(cpu_plans):
    for port in (8080, 8081):
        command = ServerCommand.resolve(variant.load("tiny-mtp4"), port=port, platform="cpu")
        assert cpu_plans["tiny-mtp4"].flags == rehearsal.decisive_flags(command)
    assert cpu_plans["tiny"].flags != cpu_plans["tiny-mtp4"].flags


@needs_cpu_build
def test_weights_are_those_of_the_checkpoint(cpu_plans):
    """3.45 M parameters and an MTP head of half a million, as weights/tiny has them."""
    assert sum(cpu_plans["tiny"].weight_bytes.values()) == pytest.approx(7.79e6, rel=0.01)
    assert cpu_plans["tiny-mtp4"].weight_bytes["draft head"] == 1_526_656


@needs_cpu_build
def test_one_of_two_devices_holds_half_of_packed_linears_and_tables(add_variant, tmp_path, tmp_path_factory):
    """Two CPUs in place of two GPUs: vLLM's own classes divide, and its loaders take each tensor of the checkpoint."""
    (tmp_path / "weights").mkdir()
    packed, trimmed, made = (
        tmp_path_factory.mktemp("weights") / name for name in ("packed", "trimmed", "made")
    )
    stage_output(
        "calibrate", PUBLISHED_FORMS["w4a16"].build(tmp_path / "published"), packed, targets={"mtp": "W4A16"}
    )
    write_outputs(packed)
    stage_output("trim_draft_vocab", packed, trimmed, size=4096, bits=4)
    stage_output("quantise_embedding", trimmed, made)
    (tmp_path / "weights" / "made").symlink_to(made)
    add_variant("tiny", (ROOT / "experiments" / "tiny" / "config.env").read_text())
    drafts = (ROOT / "experiments" / "tiny-mtp4" / "config.env").read_text()
    plans = []
    for name, more in (("one", ""), ("two", "VLLM_TENSOR_PARALLEL_SIZE=2\n")):
        add_variant(name, f"{drafts}VLLM_MODEL=weights/made\n{more}")
        subject = variant.load(name, tmp_path)
        plans.append(rehearsal.rehearse_variant(subject, None, log=tmp_path / "plan.log"))
    assert [(plan.failed_at, plan.error) for plan in plans] == [(None, None)] * 2
    one, two = (plan.weight_bytes for plan in plans)
    assert one.keys() == two.keys()
    for kind in ("MLP", "embedding", "linear attention"):
        assert two[kind] == pytest.approx(one[kind] / 2, rel=0.02), kind
    # The one KV head is on both, and so are fc of the MTP head and the ids.
    for kind in ("attention", "draft head"):
        assert one[kind] / 2 < two[kind] < 0.7 * one[kind], kind


@needs_cpu_build
def test_a_cpu_build_of_torch_is_refused_in_one_line(tmp_path):
    with pytest.raises(rehearsal.RehearsalError, match="CPU build"):
        rehearsal.rehearse_variant(
            variant.load("cyankiwi"),
            read_gpu("a10g", ROOT),
            log=tmp_path / "plan.log",
        )


def test_a_cuda_build_of_torch_plans_no_cpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(simulated_gpu.SimulationError, match=r"CUDA build,.* name a GPU with --gpu"):
        simulated_gpu.require_cpu_build()


@pytest.fixture(scope="module")
def faulty_root(tmp_path_factory):
    """A repository of variants of cyankiwi-best, each with one fault in its config.env or its dimensions."""
    root = tmp_path_factory.mktemp("faults")
    shutil.copytree(ROOT / "eval", root / "eval")
    shutil.copytree(ROOT / "weights" / "tiny", root / "weights" / "tiny")
    for name, (settings, shape) in FAULTS.items():
        folder = root / "experiments" / name
        shutil.copytree(ROOT / "experiments" / "cyankiwi-best", folder)
        (root / shapes.FOLDER / f"{name}.json").write_text(json.dumps(shape))
        lines = [
            line
            for line in (folder / "config.env").read_text().splitlines()
            if line.partition("=")[0] not in {"VLLM_MODEL", *settings}
        ]
        lines += [f"{key}={value}" for key, value in {"VLLM_MODEL": f"weights/{name}", **settings}.items()]
        (folder / "config.env").write_text("\n".join(lines) + "\n")
    return root


def quantised_shape(group_size=32):
    packing = {"bits": 4, "group_size": group_size}
    return {"source": "a test", "base": "qwen3.5-4b", "quantised": {"mlp": packing}}


def shape_with_heads_of(dimension):
    published = shapes.published_shape(ROOT, "qwen3.5-4b")
    text = {**published.text, "head_dim": dimension}
    half = int(dimension * text["partial_rotary_factor"]) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": sections}
    return {"source": "a test", "config": {**published.config, "text_config": text}}


LOOKUP = """'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'"""

FAULTS = {
    "sound": ({}, quantised_shape()),
    "fp8-kv-with-mtp": ({"VLLM_KV_CACHE_DTYPE": "fp8"}, quantised_shape()),
    "sampler-of-flashinfer": ({"VLLM_USE_FLASHINFER_SAMPLER": "1"}, quantised_shape()),
    "sizes-no-multiple-of-5": ({"VLLM_CUDAGRAPH_CAPTURE_SIZES": "8,16,24,32,40"}, quantised_shape()),
    "long-context": (
        {"VLLM_MAX_MODEL_LEN": "262144", "VLLM_GPU_MEMORY_UTILIZATION": "0.4"},
        quantised_shape(),
    ),
    "groups-of-16": ({"VLLM_DISABLED_KERNELS": "HummingLinearKernel"}, quantised_shape(16)),
    "groups-of-48": ({}, quantised_shape(48)),
    "prompt-lookup": (
        {"VLLM_SPECULATIVE_CONFIG": LOOKUP, "VLLM_ENABLE_PREFIX_CACHING": "1"},
        quantised_shape(),
    ),
    "heads-of-24-with-fp8-kv": ({"VLLM_KV_CACHE_DTYPE": "fp8"}, shape_with_heads_of(24)),
    "heads-of-192-with-fp8-kv": ({"VLLM_KV_CACHE_DTYPE": "fp8"}, shape_with_heads_of(192)),
}


@pytest.fixture(scope="module")
def faulty_plans(faulty_root):
    """Plans of all of them for an A10G."""
    a10g, log = read_gpu("a10g", ROOT), faulty_root / "plan.log"
    variants = [variant.load(name, faulty_root) for name in FAULTS]
    return {plan.variant: plan for plan in rehearsal.rehearse_variants(variants, a10g, log=log)}


@needs_cuda_build
@pytest.mark.parametrize(
    ("fault", "trouble_names"),
    [
        ("sound", []),
        ("fp8-kv-with-mtp", ["flashinfer-fp8-mtp-memory"]),
        ("sampler-of-flashinfer", []),
        ("sizes-no-multiple-of-5", ["graphs-not-multiples"]),
        ("long-context", ["request-does-not-fit"]),
        ("groups-of-16", ["no-linear-kernel"]),
        ("groups-of-48", ["refused-by-vllm"]),
        ("prompt-lookup", ["prefix-hits-out-of-reach"]),
        ("heads-of-24-with-fp8-kv", ["no-attention-backend"]),
        ("heads-of-192-with-fp8-kv", ["no-attention-backend"]),
    ],
)
def test_a_planted_fault_is_known_trouble_before_a_start(faulty_plans, fault, trouble_names):
    plan = faulty_plans[fault]
    met = trouble.match_trouble(plan, trouble.read_known_trouble(ROOT))
    assert [entry.name for entry in met if entry.effect != "mended"] == trouble_names, plan.error


@needs_cuda_build
def test_prompt_lookup_has_no_draft_model_and_drops_no_block_of_a_hit(faulty_plans):
    plan = faulty_plans["prompt-lookup"]
    assert (plan.failed_at, plan.error) == (None, None)
    assert "draft head" not in plan.weight_bytes
    assert not any(layers.drafts for layers in plan.attention)
    assert plan.kv_cache.shortest_prompt_with_hit == plan.kv_cache.block_size + 1


CUDA_VARIANTS = [name for name in variant.names(ROOT) if variant.load(name).platform == "cuda"]
CARDS = [gpu for gpu in read_gpus(ROOT).values() if gpu.is_served]


@needs_cuda_build
@pytest.mark.parametrize("name", [*CUDA_VARIANTS, "qwen3.5-0.8b", "qwen3.5-0.8b-best"])
def test_a_variant_starts_by_its_plan_where_it_starts_by_its_fit(name, tmp_path):
    """On every card that vLLM has kernels for, by its memory: weights, blocks of the cache, blocks of states."""
    subject = find_subject(name, ROOT)
    fits = fit_on_gpus(subject, ServerSettings.of(subject, None, None), CARDS)
    cards = sorted(
        CARDS, key=lambda gpu: gpu.capability < (8, 0)
    )  # the first is simulated: it takes bfloat16
    errors = every_card.plan_errors(name, ROOT, cards, tmp_path / "plan.log")
    assert errors.keys() == fits.keys()
    assert {gpu for gpu, error in errors.items() if error is None} == {
        gpu for gpu, fit in fits.items() if fit[0].starts
    }


def first_cards_by_capability():
    """A card of each compute capability, with the memory of the largest, which holds any variant of one GPU."""
    cards = {gpu.compute_capability: gpu for gpu in reversed(CARDS)}
    return [pytest.param(card.with_memory(178), id=each) for each, card in sorted(cards.items())]


@needs_cuda_build
@pytest.mark.parametrize("gpu", first_cards_by_capability())
@pytest.mark.parametrize("name", ["qwen3.5-4b", "cyankiwi-seq8-best"])
def test_a_plan_dies_where_fit_says_so(name, gpu, tmp_path):
    """On a card of each compute capability: 16-bit and 4-bit weights, with a 16-bit and an FP8 KV cache."""
    plan = rehearsal.rehearse_variant(variant.load(name), gpu, log=tmp_path / "plan.log")
    subject = find_subject(name, ROOT)
    settings = ServerSettings.of(subject, None, None)
    fits = fit_on_gpus(subject, settings, [gpu])[gpu.name]
    said = [line for line in list_notes(subject, settings, gpu, fits, ROOT) if "Known trouble (dies)" in line]
    assert bool(plan.error) == bool(said), (plan.failed_at, plan.error, said)


@needs_cuda_build
def test_a_sound_variant_captures_each_verify_step_and_a_misaligned_list_does_not(faulty_plans):
    assert faulty_plans["sound"].graphs.captured["FULL"] == list(range(5, 45, 5))
    assert faulty_plans["sizes-no-multiple-of-5"].graphs.captured["FULL"] != list(range(5, 45, 5))
