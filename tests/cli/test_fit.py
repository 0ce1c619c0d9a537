"""`slimqwen fit`: what it prints and its exit code."""

import re
from functools import partial

import pytest

from slimqwen import variant
from slimqwen.plan import host_gpus, trouble

ROOT = variant.repository_root()


@pytest.fixture
def fit(monkeypatch, run_here):
    """fit(word, …): the verb on a machine without a GPU; returns exit code, stdout and stderr."""
    monkeypatch.setattr(host_gpus, "_ask_driver", list)
    return partial(run_here, "fit")


def test_a_model_that_does_not_fit_ends_with_one_and_the_first_recipe_that_makes_it_fit(fit):
    code, said, _ = fit("qwen3.5-27b", "--gpu", "rtx-3090")
    assert code == 1
    assert said.startswith(
        "qwen3.5-27b with 1 x 32,768 tokens on one rtx-3090: does not fit as stored, 36.5 GB too much; fits with "
        "4-bit MLPs, 4-bit attention, 4-bit head\n"
    )
    for line in (
        "One sequence: 0.85 GB of states and 68 KiB per token, 3.18 GB in all; vLLM may use 90% of 23.69 GiB.",
        "Format: bfloat16; stages that support it: all. MTP head: present, 16 bits.",
        "with 4 drafts at the published acceptance length 3.97. Computed, not timed.",
        "Start from a new baseline: `slimqwen variant new --name base --checkpoint Qwen/Qwen3.5-27B`; flags",
    ):
        assert line in said
    assert "Known trouble" not in said


@pytest.mark.parametrize(
    ("name", "gpu"), [("qwen3.8-27b-16gb", "rtx-4060-ti"), ("qwen3.5-9b-8gb", "rtx-4060")]
)
def test_fewer_than_four_bits_fit_with_16000_tokens_and_say_what_they_cost_a_pretrained_model(fit, name, gpu):
    code, said, _ = fit(name, "--gpu", gpu)
    assert code == 0
    [kept] = re.findall(r"as stored .* (\d\d,\d{3}) ", said)
    assert int(kept.replace(",", "")) > 16_000
    assert re.search(r"3 bits cost smollm2-135m, in nats of divergence a token: W3 g32 \d\.\d\d", said)
    assert "cost smollm2-135m" not in fit("qwen3.5-9b-best", "--gpu", "l4")[1]


def test_a_model_that_fits_ends_with_zero_and_one_that_never_does_says_so(fit):
    code, said, _ = fit("qwen3-4b", "--gpu", "l4", "--context", "8192", "--sequences", "4")
    assert (code, said.partition("\n")[0]) == (
        0, "qwen3-4b with 4 x 8,192 tokens on one l4: fits, 6.8 GB left"
    )  # fmt: skip
    assert "drafted" not in said
    code, said, _ = fit("qwen3.8-27b-int4", "--gpu", "rtx-3090")
    assert code == 0
    assert said.rstrip().endswith(
        "Start from qwen3.8-27b-best: `slimqwen recipe run --variant qwen3.8-27b-best`"
    )


def test_trouble_is_that_of_the_recorded_plan_or_of_the_flags_alone(fit):
    known = {entry.name: entry.description for entry in trouble.read_known_trouble(ROOT)}
    _, planned, _ = fit("cyankiwi-seq8-best", "--gpu", "a10g")
    assert f"Known trouble (costs): {known['flashinfer-fp8-mtp-memory']}" in planned
    _, unplanned, _ = fit("cyankiwi-seq8-best", "--gpu", "rtx-4090")
    assert f"Known trouble (costs): {known['prefix-cache-beside-mtp']}" in unplanned
    assert known["flashinfer-fp8-mtp-memory"] not in unplanned
    _, turing, _ = fit("qwen3.5-0.8b", "--gpu", "t4")
    assert "vLLM refuses bfloat16 below compute capability 8.0" in turing
    assert "VLLM_DTYPE=float16." in turing


def test_without_a_gpu_all_of_them_are_shown(fit):
    code, said, _ = fit("qwen3-8b")
    assert code == 0
    assert said.startswith("qwen3-8b with ")
    assert (
        said.rstrip()
        .splitlines()[-1]
        .startswith("Start from a new baseline: `slimqwen variant new --name base --checkpoint Qwen")
    )


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        ("qwen3-4b --gpu l4 --sequences 9", ["--sequences 5", "--context 8768"]),
        ("qwen3.5-4b-best --gpu rtx-4060 --context 262144", ["--context"]),
        ("qwen3.5-27b --gpu rtx-3060", ["--gpus 2"]),
        ("qwen3.5-35b-a3b --gpu rtx-3090", ["--gpus 2"]),
    ],
)
def test_where_no_recipe_makes_it_fit_what_does_is_named_and_does(fit, words: str, ways: list[str]):
    verdict = fit(*words.split())[1].partition("\n")[0]
    assert "no recipe makes it fit; " in verdict
    for way in ways:
        option = re.search(rf"{way}( \d+)?", verdict)
        assert option, verdict
        said = fit(*words.split(), *option[0].split())[1].partition("\n")[0]
        assert ": fits, " in said or "; fits with " in said


def test_experts_that_no_stage_packs_are_named_where_they_are_published(fit):
    _, said, _ = fit("qwen3.5-35b-a3b", "--gpu", "rtx-5090")
    assert "fits with published 4-bit experts" in said.partition("\n")[0]
    assert "No stage packs experts; 4-bit ones are published: Qwen/Qwen3.5-35B-A3B-GPTQ-Int4." in said


def test_several_gpus_are_those_of_the_option_else_of_the_host(fit, monkeypatch):
    l4 = host_gpus._Row("0", "GPU-0", "NVIDIA L4", "8.9", "23034", "500", "[N/A]")
    monkeypatch.setattr(host_gpus, "_ask_driver", lambda: [l4] * 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "on 4 l4: fits, " in fit("qwen3.5-27b")[1]
    said = fit("qwen3.5-27b", "--gpus", "1")[1]
    assert "on one l4: " in said
    assert "This machine has 4 such GPUs: --gpus 4 shares the model among them." in said
    code, _, errors = fit("qwen3.5-4b", "--gpu", "l4", "--gpus", "3")
    assert code == 2
    assert "3 GPUs cannot share 16 heads (num_attention_heads) evenly; set --gpus to a divisor" in errors


def test_a_name_of_a_variant_and_a_shape_says_which_was_taken(fit):
    _, said, _ = fit("qwen3.5-4b", "--gpu", "l4")
    other = "slimqwen fit eval/shapes/qwen3.5-4b.json"
    assert f"qwen3.5-4b was taken as the variant of that name; `{other}` takes the other." in said
    assert fit(str(ROOT / "eval" / "shapes" / "qwen3.5-4b.json"), "--gpu", "l4")[0] == 0


def test_a_described_gpu_fits_by_its_figures(fit):
    code, said, _ = fit("qwen3.5-4b", "--gpu", "memory=16,bandwidth=448,capability=8.9")
    assert (code, ": fits, " in said.partition("\n")[0]) == (0, True)
    assert "by bandwidth alone, as no peak FLOP/s of memory=16,bandwidth=448,capability=8.9 is known" in said
    assert "vLLM may use 90% of 15.36 GiB (assumed: 96 % of its memory)." in said
