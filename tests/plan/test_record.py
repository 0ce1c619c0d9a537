"""Recorded plans: which one counts, the table of all, and what those of the committed variants have to show."""

import re
import shutil

import pytest

from slimqwen import variant
from slimqwen.plan import record as plans
from slimqwen.plan import trouble
from slimqwen.plan.devices import read_gpus
from slimqwen.plan.record import PlanRecord
from slimqwen.records import store
from slimqwen.report import markdown
from tests.plan.example import plan

ROOT = variant.repository_root()
GPU_VARIANTS = [name for name in variant.names(ROOT) if variant.load(name, ROOT).platform == "cuda"]
README_GPUS = re.compile(r"^GPUs: (?P<names>[a-z0-9, -]+)\.$", re.MULTILINE)


@pytest.fixture
def root(tmp_path, add_variant, stamps):
    shutil.copytree(ROOT / "eval", tmp_path / "eval")
    add_variant("v", "PLATFORM=cuda\nVLLM_MODEL=weights/v\n")
    return tmp_path


def write(root, *made):
    subject = variant.load("v", root)
    return plans.write_plans(subject, made, command=["x"], started="2026-01-01T00:00:00Z")


def test_the_newest_record_has_the_newest_plan_of_each_gpu(root):
    write(root, plan(drafts=2), plan(gpu="h100", drafts=2))
    path = write(root, plan(drafts=3))
    found = {
        each.gpu: each.engine.num_speculative_tokens for each in store.read_record(path, PlanRecord).plans
    }
    assert found == {"a10g": 3, "h100": 2}
    assert plans.find_gpu_plan(root, "v", "a10g").engine.num_speculative_tokens == 3
    assert plans.find_gpu_plan(root, "v", "l4") is None


def test_a_plan_by_another_vllm_is_not_found(root):
    write(root, plan(vllm="0.31.0"))
    assert plans.find_gpu_plan(root, "v", "a10g") is None


def test_gpus_and_variants_with_equal_facts_share_a_row_of_the_table(root, add_variant):
    fp8 = plan(backend="FLASHINFER", kv_cache_dtype="fp8", full=(), compiler=False)
    write(root, fp8, plan(gpu="h100"), plan(gpu="l4"))
    table = plans.overview_table(root)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["variants"], row["GPUs"], row["attention"], row["graphs"]) for row in rows] == [
        ("v", "a10g", "FLASHINFER", "PIECEWISE"),
        ("v", "l4, h100", "FLASH_ATTN", "FULL_AND_PIECEWISE"),
    ]
    assert [row["dies"] for row in rows] == ["flashinfer-without-compiler", "-"]
    assert rows[0]["costs"] == "flashinfer-fp8-mtp-memory, fp8-kv-loses-full-graphs"
    assert table.notes == (
        f"vLLM {locked_vllm()} by its own code, without loading weights. Simulated GPUs; 1.5 GiB assumed for "
        "activations, CUDA context and graphs.",
    )


def test_the_page_of_a_plan_has_its_facts_by_gpu():
    facts = plans.plan_table("v", [plan(), plan(gpu="l4")])
    assert facts.columns == ("fact", "a10g", "l4")
    by_name = {row[0]: row[1:] for row in facts.rows}
    assert by_name["tokens of full graphs"][0] == "5 10 15 20 25 30 35 40"


def test_known_trouble_is_listed_by_gpu_with_its_cure():
    fp8 = plan(backend="FLASHINFER", kv_cache_dtype="fp8", compiler=False)
    table = plans.trouble_table([fp8, plan(gpu="l4")], trouble.read_known_trouble(ROOT))
    assert [row[:2] for row in table.rows] == [("a10g", "dies"), ("a10g", "costs"), ("a10g, l4", "mended")]
    assert "VLLM_KV_CACHE_DTYPE=auto" in table.rows[0][3]


def test_the_committed_table_is_made_of_the_records():
    file = ROOT / "docs" / "plans.md"
    assert markdown.render_tables(ROOT, file) == file.read_text(encoding="utf-8")
    _, _, table = file.read_text(encoding="utf-8").partition("<!-- table:plans -->")
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    shown = [(row.split(" | ")[0].removeprefix("| "), row.split(" | ")[1]) for row in rows[1:]]
    for name in variant.names(ROOT):
        for each in plans.list_recorded_plans(ROOT, name):
            here = [row for row in shown if name in row[0].split(", ") and each.gpu in row[1].split(", ")]
            assert len(here) == 1, (name, each.gpu)


def named_gpus(name: str) -> list[str]:
    """GPUs that a variant's README names."""
    match = README_GPUS.search((ROOT / "experiments" / name / "README.md").read_text(encoding="utf-8"))
    assert match, f"experiments/{name}/README.md names no GPUs"
    return match["names"].split(", ")


@pytest.mark.parametrize("name", GPU_VARIANTS)
def test_a_gpu_variant_starts_on_each_gpu_of_its_readme(name):
    """By plans of the vLLM of the lock, for the flags that it has now."""
    from slimqwen.plan.rehearsal import decisive_flags
    from slimqwen.serving.command import ServerCommand

    gpus = named_gpus(name)
    flags = decisive_flags(ServerCommand.resolve(variant.load(name, ROOT), platform="cuda"))
    assert set(gpus) <= set(read_gpus(ROOT))
    for gpu in gpus:
        recorded = plans.find_gpu_plan(ROOT, name, gpu)
        entries = trouble.match_trouble(recorded, trouble.read_known_trouble(ROOT))
        assert [entry.name for entry in entries if entry.effect == "dies"] == [], gpu
        assert recorded.vllm == locked_vllm(), gpu
        assert recorded.flags == flags, gpu


def locked_vllm() -> str:
    lock = (ROOT / "requirements" / "cuda.txt").read_text(encoding="utf-8")
    return re.search(r"^vllm==([\w.]+)", lock, re.MULTILINE)[1]


@pytest.mark.parametrize("page", ["cyankiwi", "cyankiwi-seq8-best", "cyankiwi-best"])
def test_the_page_of_a_family_says_what_the_other_s_flags_cost(page):
    text = (ROOT / "experiments" / page / "README.md").read_text(encoding="utf-8")
    for name in ("cyankiwi-best", "cyankiwi-seq8-best"):
        cache = plans.find_gpu_plan(ROOT, name, "a10g").kv_cache
        assert f"{cache.sequences_at_max_model_len:.1f}" in text
    reachable = plans.find_gpu_plan(ROOT, "cyankiwi-seq8-best", "a10g").kv_cache.shortest_prompt_with_hit
    assert page != "cyankiwi-best" or f"{reachable:,} tokens" in text
