"""Recorded plans: which one counts, the table of all, and what those of the committed variants have to show."""

import re
import shutil

import pytest

from slimqwen import variant
from slimqwen.analysis import plan as plans
from slimqwen.analysis.plan import PlanRecord
from slimqwen.plan import gpu_model, trouble
from slimqwen.records import store
from slimqwen.report import markdown
from tests.plan.example import kernels, plan, record

ROOT = variant.repository_root()
GPU_VARIANTS = [name for name in variant.names(ROOT) if variant.load(name, ROOT).platform == "cuda"]
OWN_FAMILY = ("cyankiwi-best", "qwen3.5-4b-best")
README_GPUS = re.compile(
    r"^GPUs(?P<toolkit>, on a host with nvcc and ninja)?: (?P<names>[a-z0-9, -]+)\.$", re.MULTILINE
)


@pytest.fixture
def root(tmp_path, add_variant):
    shutil.copytree(ROOT / "eval", tmp_path / "eval")
    add_variant("v", "PLATFORM=cuda\nVLLM_MODEL=weights/v\n")
    return tmp_path


def write_record(root, *plans, **ended):
    return store.write(root / "results", record(root, *plans, **ended))


def test_the_newest_plan_on_a_gpu_counts_whatever_else_is_newer(root):
    write_record(root, plan(drafts=2, compiler=False))
    write_record(root, plan(drafts=3, compiler=False), ended="2026-01-02T00:00:00Z")
    write_record(root, plan(gpu="h100", compiler=False), ended="2026-01-03T00:00:00Z")
    assert plans.newest_plan(root, "v", "a10g").engine.num_speculative_tokens == 3


def test_plans_for_hosts_with_and_without_a_toolkit_are_kept_apart(root):
    write_record(root, plan(compiler=False))
    assert plans.newest_plan(root, "v", "a10g", toolkit=True) is None
    write_record(root, plan(compiler=True), ended="2026-01-02T00:00:00Z")
    assert plans.newest_plan(root, "v", "a10g", toolkit=True).toolkit.nvcc
    assert not plans.newest_plan(root, "v", "a10g").toolkit.nvcc


def test_the_table_has_a_row_for_each_gpu_with_its_trouble(root):
    fp8 = plan(backend="FLASHINFER", kv_cache_dtype="fp8", full=(), compiler=False)
    write_record(root, fp8, plan(gpu="h100", compiler=False))
    table = plans.overview_table(root)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["variant"], row["GPU"], row["attention"], row["graphs"]) for row in rows] == [
        ("v", "a10g", "FLASHINFER", "PIECEWISE"),
        ("v", "h100", "FLASH_ATTN", "FULL_AND_PIECEWISE"),
    ]
    assert [row["dies"] for row in rows] == ["flashinfer-without-compiler", "-"]
    assert rows[0]["costs"] == "fp8-kv-loses-full-graphs, flashinfer-fp8-mtp-memory"
    assert rows[1]["tokens of full graphs"] == "5 10 15 20 25 30 35 40"
    assert "without nvcc" in table.notes[0]


def test_the_kernels_of_a_plan_are_on_its_page(root):
    path = write_record(root, plan(kernels=kernels()))
    facts, compiled = store.read(path, PlanRecord).tables(path)
    assert dict(facts.rows)["Triton kernels"] == "2 for sm_86, 1 lose choices, 0 cannot run"
    assert [row[1:4] for row in compiled.rows] == [
        ("prefill", "1 of 12 (needs 131852 bytes of shared memory, the GPU has 101376)", "12"),
        ("sample", "-", "2"),
    ]
    assert "not compiled: kernels of FLASH_ATTN" in compiled.notes[0]


def test_of_several_gpus_the_page_has_the_kernels_that_lose_choices(root):
    path = write_record(root, plan(kernels=kernels()), plan(gpu="l4", kernels=kernels(lost=())))
    _, compiled = store.read(path, PlanRecord).tables(path)
    assert [row[:2] for row in compiled.rows] == [("a10g", "prefill")]


def test_the_table_of_kernels_is_of_the_newest_plan_that_has_them(root):
    write_record(root, plan(kernels=kernels(), compiler=False))
    write_record(root, plan(compiler=False), ended="2026-01-02T00:00:00Z")
    (row,) = plans.kernels_overview(root).rows
    assert row[:3] == ("v", "a10g", "sm_86")
    assert row[3].startswith("prefill: 1 of 12 (needs 131852 bytes")
    assert row[4:] == ("-", "2", "14")
    assert plans.newest_plan(root, "v", "l4", kernels=True) is None


def test_the_committed_table_is_made_of_the_records():
    file = ROOT / "docs" / "plans.md"
    assert markdown.fresh(ROOT, file) == file.read_text(encoding="utf-8")
    _, _, table = file.read_text(encoding="utf-8").partition("<!-- table:plans -->")
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    for name in GPU_VARIANTS:
        for gpu in plans.DEFAULT_GPUS:
            assert sum(row.startswith(f"| {name} | {gpu} |") for row in rows) == 1, (name, gpu)


def named_gpus(name: str) -> tuple[list[str], bool]:
    """GPUs that a variant's README names, and whether it asks for a CUDA toolkit there."""
    match = README_GPUS.search((ROOT / "experiments" / name / "README.md").read_text(encoding="utf-8"))
    assert match, f"experiments/{name}/README.md names no GPUs"
    return match["names"].split(", "), match["toolkit"] is not None


@pytest.mark.parametrize("name", GPU_VARIANTS)
def test_a_gpu_variant_starts_on_each_gpu_of_its_readme(name):
    """By plans of the vLLM of the lock, for the flags that it has now."""
    from slimqwen.plan.rehearsal import decisive_flags
    from slimqwen.serving.command import ServerCommand

    gpus, toolkit = named_gpus(name)
    flags = decisive_flags(ServerCommand.resolve(variant.load(name, ROOT), platform="cuda"))
    assert set(gpus) <= set(gpu_model.read(ROOT))
    for gpu in gpus:
        recorded = plans.newest_plan(ROOT, name, gpu, toolkit=toolkit)
        entries = trouble.matches(recorded, trouble.read(ROOT))
        assert [entry.name for entry in entries if entry.effect == "dies"] == [], gpu
        assert recorded.vllm == locked_vllm(), gpu
        assert recorded.flags == flags, gpu


def locked_vllm() -> str:
    lock = (ROOT / "requirements" / "cuda.txt").read_text(encoding="utf-8")
    return re.search(r"^vllm==([\w.]+)", lock, re.MULTILINE)[1]


@pytest.mark.parametrize("name", OWN_FAMILY)
def test_the_project_s_own_family_captures_each_verify_step_as_a_full_graph(name):
    gpus, toolkit = named_gpus(name)
    assert {"a10g", "rtx-3090", "l4", "h100"} <= set(gpus)
    assert not toolkit
    for gpu in gpus:
        recorded = plans.newest_plan(ROOT, name, gpu)
        step = recorded.engine.num_speculative_tokens + 1
        assert recorded.graphs.mode == "FULL_AND_PIECEWISE"
        assert recorded.graphs.captured["FULL"] == [
            step * count for count in range(1, recorded.engine.max_num_seqs + 1)
        ]
        assert trouble.matches(recorded, trouble.read(ROOT)) == []
        assert {layers.prefill for layers in recorded.attention} <= {"", "triton"}
        assert {module.module for module in recorded.jit} <= {"Humming W4A16"}


@pytest.mark.parametrize("page", ["cyankiwi", "cyankiwi-seq8-best", "cyankiwi-best"])
def test_the_page_of_a_family_says_what_the_other_s_flags_cost(page):
    text = (ROOT / "experiments" / page / "README.md").read_text(encoding="utf-8")
    for name in ("cyankiwi-best", "cyankiwi-seq8-best"):
        cache = plans.newest_plan(ROOT, name, "a10g").kv_cache
        assert f"{cache.sequences_at_max_model_len:.1f}" in text
    reachable = plans.newest_plan(ROOT, "cyankiwi-seq8-best", "a10g").kv_cache.shortest_prompt_with_hit
    assert page != "cyankiwi-best" or f"{reachable:,} tokens" in text
