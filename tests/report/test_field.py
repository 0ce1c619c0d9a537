"""Field reports leave without a word of their owner, and those that were sent are checked; the table shows both."""

import json
import re
import shutil
import subprocess

import pytest

from slimqwen import variant
from slimqwen.records import collection, provenance, store
from slimqwen.records.record import Hardware, InstalledGpu
from slimqwen.report import cells, checks, field, site

ROOT = variant.repository_root()
SHIPPED = ("tiny", "tiny-best", "qwen3.5-4b")
OWNERS = ("janes-model", "janes-chats", "jane", "/home", "sk-12345", "what is my salary", "example.org")
"""Words of a person's own, planted in her records."""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Shipped variants with the committed records, and one of a person's own with a workload of her own."""
    experiments = tmp_path / "experiments"
    for name in SHIPPED:
        shutil.copytree(ROOT / "experiments" / name, experiments / name)
    shutil.copytree(
        ROOT / "eval", tmp_path / "eval", ignore=shutil.ignore_patterns("tasks", "texts", "field")
    )
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    mine = experiments / "janes-model"
    shutil.copytree(experiments / "tiny-best", mine, ignore=shutil.ignore_patterns("*_*"))
    newest = newest_timing()
    record = json.loads(newest.read_text()) | {"variant": "janes-model"}
    record["provenance"] |= {
        "command": "python /home/jane/bench.py --server jane@example.org",
        "environment": {"VLLM_API_KEY": "sk-12345", "HOME": "/home/jane"},
    }
    record["provenance"]["flags"]["chat-template"] = "/home/jane/what is my salary.jinja"
    chats = record | {"workload": "janes-chats", "classes": {"janes-chats": record["classes"]["short"]}}
    for day, content in (("26", record), ("27", chats)):
        file = mine / f"latency_2026-11-{day}T000000Z.json"
        content["items"] = {**record["items"], "file": file.with_suffix(".items.jsonl").name}
        file.write_text(json.dumps(content))
        shutil.copy(newest.with_suffix(".items.jsonl"), file.with_suffix(".items.jsonl"))
    hardware = store.read_record(newest).provenance.hardware
    monkeypatch.setattr(provenance, "hardware", lambda: hardware)
    return tmp_path


def newest_timing():
    return max((ROOT / "experiments" / "tiny-best").glob("latency_*Z.json"))


def change(file, edit):
    """Edit the first row of a field report."""
    content = json.loads(file.read_text())
    edit(content["rows"][0])
    file.write_text(json.dumps(content))


def faults(root):
    return field.read_reports(root)[1]


def test_a_report_has_the_figures_of_this_card_and_no_word_of_its_owner(repository):
    file, report, left_out = field.write_report(repository)
    text = file.read_text()
    assert left_out == []
    assert [word for word in OWNERS if word in text] == []
    rows = {(row.variant, row.prompt_class): row for row in report.rows}
    measured = store.read_record(newest_timing()).classes["short"]
    best = rows["tiny-best", "short"]
    assert best.tokens_per_s == round(measured.output_throughput_tokens_per_s, 2)
    assert best.tokens_per_step == round(measured.acceptance.length, 3)
    assert (best.baseline, best.drafted_per_step) == ("tiny", 4)
    own = [row for row in report.rows if row.variant.startswith("own-")]
    assert {(row.workload, row.baseline) for row in own} == {("classes", "tiny")}
    assert (report.card.name, report.card.driver) == (field.name_device(provenance.hardware(), ROOT)[0], None)
    assert faults(repository) == []


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda row: row.update(vllm="/home/jane/vllm"), r"does not match"),
        (lambda row: row.update(note="/home/jane"), "Additional properties are not allowed"),
        (
            lambda row: row.update(tokens_per_s=row["tokens_per_s"] * 1.5),
            "tokens a step x .* steps/s is .* not",
        ),
        (lambda row: row.update(tpot_ms=row["tpot_ms"] * 2), "tokens/s at a TPOT of"),
        (lambda row: row.update(tokens_per_step=6.0), "6 tokens a step of 4 drafted"),
        (lambda row: row.update(steps_per_s=None), "either drafts or no steps/s"),
        (lambda row: row.update(variant="janes-model-2"), "janes-model-2 is not shipped here"),
    ],
)
def test_a_report_with_a_path_or_a_figure_that_contradicts_its_own_is_refused(repository, edit, reason):
    file, _, _ = field.write_report(repository)
    content = json.loads(file.read_text())
    content["rows"].sort(key=lambda row: row["variant"] != "tiny-best")
    file.write_text(json.dumps(content))
    assert faults(repository) == []
    change(file, edit)
    (fault,) = faults(repository)
    assert fault.location == file.relative_to(repository).as_posix()
    assert re.search(reason, fault.reason)


def test_any_other_file_among_the_reports_is_a_fault_of_the_records(repository):
    (repository / field.FOLDER).mkdir(parents=True)
    for number, content in enumerate(("not JSON", '{"schema": "latency/1"}', "[]")):
        (repository / field.FOLDER / f"{number}.json").write_text(content)
    found = [
        each for each in checks.check_records(repository).faults if each.location.startswith("eval/field")
    ]
    assert [fault.location for fault in found] == [f"eval/field/{number}.json" for number in range(3)]
    assert all(fault.cure for fault in found)


def test_where_nothing_was_timed_the_command_is_named(repository, monkeypatch):
    gpu = InstalledGpu(name="NVIDIA A10G", memory_bytes=23 * 10**9, driver="580.1")
    other = Hardware.model_validate({**provenance.hardware().model_dump(), "gpus": (gpu,)})
    monkeypatch.setattr(provenance, "ask_driver", lambda *_: "300.00\n")
    card = field.describe_card(other, ROOT)
    assert (card.name, card.count, card.power_limit_w, card.driver) == ("a10g", 1, 300, "580.1")
    monkeypatch.setattr(provenance, "hardware", lambda: other)
    with pytest.raises(
        field.NothingMeasuredError, match="nothing was timed on a10g yet; `slimqwen bench latency"
    ):
        field.write_report(repository)


@pytest.mark.parametrize(("device", "seen"), [("cpu", ("block_size",)), ("a10g", None)])
def test_the_last_start_of_a_variant_on_this_card_is_reported_beside_its_plan(repository, device, seen):
    kept = repository / ".cache" / "starts" / "tiny-best.json"
    kept.parent.mkdir(parents=True)
    compared = {"plan": f"vLLM 0.32.0 on {device}", "facts": 24, "differences": ["block_size"]}
    kept.write_text(json.dumps(compared))
    rows = [row for row in field.write_report(repository)[1].rows if row.variant == "tiny-best"]
    assert {row.start and row.start.differences for row in rows} == {seen}


def test_the_table_has_what_was_predicted_measured_and_reported(repository):
    def row(name, card):
        table = cells.cells_table(collection.collect(repository))
        (found,) = (
            dict(zip(table.columns, row, strict=True)) for row in table.rows if row[:2] == (name, card)
        )
        return found

    planned = row("qwen3.5-4b", "a10g")
    assert planned["planned"] == "starts"
    assert float(planned["bound, tok/s"]) > 50
    card = field.name_device(provenance.hardware(), ROOT)[0]
    assert row("tiny-best", card)["reported"] == "-"
    file, report, _ = field.write_report(repository)
    first = next(row for row in report.rows if row.variant == "tiny-best")
    speed = f"{first.tokens_per_s:.0f} ({first.tokens_per_step:.2f})"
    both = row("tiny-best", card)
    assert (both["measured, tok/s (tokens a step)"], both["reported"]) == (speed, speed)
    again = file.with_name("again.json")
    shutil.copy(file, again)
    change(again, lambda row: row.update(tokens_per_s=row["tokens_per_s"] * 0.95))
    assert row(report.rows[0].variant, card)["reported"].endswith(", 2 reports")
    assert "Variants and cards" in site.build_page(repository, repository / "page").index.read_text()
