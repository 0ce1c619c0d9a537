"""`slimqwen fit`: what it prints and its exit code."""

from functools import partial
from types import SimpleNamespace

import pytest

from slimqwen import variant
from slimqwen.cli import fit as verb
from slimqwen.plan import trouble

ROOT = variant.repository_root()


@pytest.fixture
def fit(monkeypatch, run_here):
    """fit(word, …): the verb on a machine without a GPU; returns exit code, stdout and stderr."""
    monkeypatch.setattr(verb, "_find_gpu_here", lambda root: None)
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
    code, said, _ = fit("qwen3.5-27b", "--gpu", "rtx-3060")
    assert (code, "no recipe makes it fit" in said) == (1, True)


def test_trouble_is_that_of_the_recorded_plan_or_of_the_flags_alone(fit):
    known = {entry.name: entry.description for entry in trouble.read_known_trouble(ROOT)}
    _, planned, _ = fit("cyankiwi-seq8-best", "--gpu", "a10g")
    assert f"Known trouble (costs): {known['fp8-kv-loses-full-graphs']}" in planned
    _, unplanned, _ = fit("cyankiwi-seq8-best", "--gpu", "rtx-4090")
    assert f"Known trouble (costs): {known['prefix-cache-beside-mtp']}" in unplanned
    assert known["fp8-kv-loses-full-graphs"] not in unplanned
    _, turing, _ = fit("qwen3.5-0.8b", "--gpu", "t4")
    assert "vLLM refuses bfloat16 below compute capability 8.0, t4 has 7.5; set VLLM_DTYPE=float16." in turing


def test_without_a_gpu_all_of_them_are_shown(fit):
    code, said, _ = fit("qwen3-8b")
    assert code == 0
    rows = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert "11.5 GB too much" in rows["rtx-3060"]
    assert "64k tokens" in rows["rtx-3060"]
    assert "fits, 53.7 GB left" in rows["h100"]
    assert (
        said.rstrip()
        .splitlines()[-1]
        .startswith("Start from a new baseline: `slimqwen variant new --name base --checkpoint Qwen")
    )


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("NVIDIA GeForce RTX 3090\n", "rtx-3090"),
        ("NVIDIA A100-PCIE-40GB\nNVIDIA L4\n", "a100-40gb"),
        ("GPU\n", None),
        ("", None),
    ],
)
def test_the_gpu_of_this_machine_is_the_first_that_the_driver_shows(
    monkeypatch, shown: str, name: str | None
):
    monkeypatch.setattr("shutil.which", lambda command: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("subprocess.run", lambda *words, **options: SimpleNamespace(stdout=shown))
    found = verb._find_gpu_here(ROOT)
    assert (found and found.name) == name
    monkeypatch.setattr("shutil.which", lambda command: None)
    assert verb._find_gpu_here(ROOT) is None
