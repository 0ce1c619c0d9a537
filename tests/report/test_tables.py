import io
import json

import pytest
import rich.console

from slimqwen import variant
from slimqwen.bench.latency import Latency
from slimqwen.bench.latency import record as latency_record
from slimqwen.bench.latency.speedups import LATENCY_MEASURES
from slimqwen.bench.workload import FIGURES, Workload
from slimqwen.evals import acceptance
from slimqwen.evals.fidelity_figures import judge_figures
from slimqwen.evals.quality import Quality
from slimqwen.records import store
from slimqwen.records.record import Estimate
from slimqwen.report import tables
from tests import record_files
from tests.evals.gate_checks import LIMITS, figures_of
from tests.record_files import example
from tests.report.two_variants import TIMES


def shown(table, width=250):
    console = rich.console.Console(file=io.StringIO(), width=width)
    console.print(table.as_rich())
    return console.file.getvalue()


def test_both_forms_show_every_cell():
    table = tables.Table("Title", ("name", "figure"), (("a|b", "1.00"), ("c", "2.00")), ("A note.",))
    markdown = table.as_markdown()
    assert markdown.splitlines()[2:6] == [
        "| name | figure |",
        "|---|---:|",
        r"| a\|b | 1.00 |",
        "| c | 2.00 |",
    ]
    for text in ("Title", "figure", "1.00", "2.00", "A note."):
        assert text in markdown
        assert text in shown(table)


def test_a_comparison_shows_scores_latency_sizes_and_where_they_come_from(repository):
    experiments = repository / "experiments"
    quality, latency = tables.comparison_tables(experiments / "a", experiments / "b")
    assert quality.rows[0][:5] == ("facts", "exact match", "0.500", "0.500", "+0.000 ± 0.000")
    assert quality.rows[0][-4:] == ("1.000", "0.04", "inconclusive", "4")
    assert quality.rows[1][-4] == "-"
    assert "8.0 MB" in quality.notes[0]
    assert latency.rows[0][0:2] == ("short 16 -> 16", "TTFT")
    assert latency.rows[0][4] == "1.00x"
    assert "Example GPU" in latency.notes[0]
    for table, kind in ((quality, Quality), (latency, Latency)):
        notes = " ".join(table.notes)
        for name in ("a", "b"):
            assert f"{name}/{store.records(experiments / name, kind)[0].name}" in notes
        assert "python scripts/eval_" in notes
        assert "commit 0123456789" in notes
        assert "vLLM 0.32.0" in notes


def test_latency_on_a_cpu_says_that_it_is_no_evidence_about_a_gpu(repository, latency):
    latency["provenance"]["hardware"]["gpus"] = []
    for name in ("a", "b"):
        record_files.write(repository / "experiments" / name, latency | {"variant": name}, TIMES)
    _, table = tables.comparison_tables(repository / "experiments" / "a", repository / "experiments" / "b")
    assert any("no CPU figure is evidence about a GPU" in note for note in table.notes)
    assert "2 CPUs of Example CPU" in table.notes[0]


def test_a_kind_that_was_not_measured_is_left_out_and_named(repository):
    store.records(repository / "experiments" / "b", Latency)[0].unlink()
    (table,) = tables.comparison_tables(repository / "experiments" / "a", repository / "experiments" / "b")
    assert "b was not timed in turns with a; run `slimqwen bench latency b --baseline`" in table.notes[-1]


def test_nothing_measured_is_an_error(repository, tmp_path):
    with pytest.raises(store.MissingRecordError, match=r"`slimqwen gate c` scores it and its baseline"):
        tables.comparison_tables(repository / "experiments" / "a", tmp_path / "c")
    with pytest.raises(store.MissingRecordError, match="slimqwen eval quality --variant c"):
        tables.results_tables(tmp_path / "c")


def test_results_show_each_figure_with_its_standard_error(repository):
    quality, latency = tables.results_tables(repository / "experiments" / "a")
    assert quality.rows[0] == ("facts", "exact match", "0.500 ± 0.200", "4 of 500", "1 of 4", "0 of 4")
    assert latency.rows[0][1] == "100.0 ± 5.0"
    assert latency.rows[0][-2:] == ("2.50", "12 (0 failed)")


def overlapping(latency, name):
    """The record of a class whose requests overlap, with every figure that a workload can ask for."""
    row = latency["classes"]["short"]
    prefix = {
        "block_tokens": 128,
        "prefix_tokens": 1792,
        "queried_tokens": 2000,
        "hit_tokens": 1792,
        "repeats": "short",
        "repeat_speedup": {"value": 8.7, "low": 8.0, "high": 9.0},
    }
    row |= {
        "spread": 0.5,
        "concurrency": None,
        "arrival": {"process": "Poisson", "rate_per_s": 2.5},
        "durations_s": [1.5, 1.5],
        "total_throughput_tokens_per_s": 128.0,
        "goodput": {"ttft_ms": 500, "tpot_ms": 50, "good_count": 6, "requests_per_s": 2.0},
        "prefix_cache": prefix,
    }
    columns = ["ttft_ms.median", "ttft_ms.p99", "tpot_ms.mean", *FIGURES]
    config = {"VLLM_ENABLE_PREFIX_CACHING": "1", "VLLM_SPECULATIVE_CONFIG": ""}
    return latency | {"variant": name, "workload": "load", "columns": columns, "config": config}


def test_a_workload_says_which_figures_its_table_has(repository, latency):
    path = record_files.write(repository / "experiments" / "other", overlapping(latency, "other"), TIMES)
    table = tables.results_table(path)
    # Too many for a terminal's width: a line for each figure.
    assert table.columns == ("class, tokens", "short 16 -> 16")
    assert dict(table.rows) == {
        "TTFT median, ms": "100.0",
        "TTFT p99, ms": "-",
        "TPOT, ms": "10.0 ± 0.5",
        "requests/s": "4.00",
        "output tokens/s": "64",
        "all tokens/s": "128",
        "good requests/s": "2.00",
        "good": "50%",
        "arrivals/s": "2.50",
        "in flight": "no limit",
        "acceptance length": "2.50",
        "found in the cache": "90%",
        "TTFT, first time / repetition [95 %]": "8.7x [8.0, 9.0]",
        "requests": "12 (0 failed)",
    }
    assert table.title == "Latency of other, load"
    notes = " ".join(table.notes)
    for said in (
        "TTFT up to 500 ms and TPOT up to 50 ms",
        "1792 tokens, whole blocks of 128",
        "VLLM_SPECULATIVE_CONFIG=",
    ):
        assert said in notes


def test_every_workload_asks_for_figures_that_have_a_heading():
    for file in (variant.repository_root() / "eval" / "workloads").glob("*.yaml"):
        for column in Workload.load(file.stem, variant.repository_root()).columns:
            assert latency_record.heading(column)


def test_each_workload_has_a_table_of_its_own(repository, latency):
    folders = [repository / "experiments" / name for name in ("a", "b")]
    for folder in folders:
        items = [{**item, "round": n % 2, "output_tokens": 16} for n, item in enumerate(TIMES)]
        record_files.write(folder, overlapping(latency, folder.name) | {"rounds": 2}, items)
    assert [table.title for table in tables.results_tables(folders[0])] == [
        "Quality of a",
        "Latency of a",
        "Latency of a, load",
    ]
    _, classes, load = tables.comparison_tables(*folders)
    assert (classes.title, load.title) == ("Latency: a and b", "Latency, load: a and b")
    assert load.rows[3][:5] == ("short 16 -> 16", "output tokens/s", "64.0", "64.0", "1.00x")
    assert load.rows[3][5] == "1.00 to 1.00"
    assert any("over 2 rounds with an interval by Student's t" in note for note in load.notes)
    assert "short 250" in tables.variants_table(repository, with_weights=True).rows[0][5]


def test_a_workload_that_does_not_fit_is_named_beside_those_that_do(repository, latency):
    for name, tokens in (("a", 16), ("b", 17)):
        changed = latency | {"variant": name, "workload": "context"}
        changed["classes"]["short"]["output_tokens"] = tokens
        record_files.write(repository / "experiments" / name, changed, TIMES)
    _, table = tables.comparison_tables(repository / "experiments" / "a", repository / "experiments" / "b")
    assert table.title == "Latency: a and b"
    assert "Not shown" in table.notes[-1]
    assert "lengths" in table.notes[-1]


def test_the_variants_table_has_hypotheses_and_latest_figures(repository, add_variant):
    add_variant("c", "VLLM_MODEL=weights/c\n", baseline="a")
    table = tables.variants_table(repository, with_weights=True)
    a, b, c = table.rows
    assert a[:4] == ("a", "what a shows", "-", "planned")
    assert "facts 0.500±0.200" in a[4]
    assert "short 250 (Example GPU)" in b[5]
    assert c[4:] == ("-", "-", "no")
    assert len(tables.variants_table(repository).columns) == 6


def test_a_variant_whose_base_was_removed_leaves_the_others_listed(repository, add_variant):
    add_variant("orphan", "BASE=removed\n")
    a, b, orphan = tables.variants_table(repository, with_weights=True).rows
    assert (a[0], b[0], orphan[0], orphan[3]) == ("a", "b", "orphan", "unreadable")
    assert "removed" in orphan[1]


def test_scores_of_weights_that_are_gone_are_no_scores(repository, quality):
    """However many items they were of."""
    folder = repository / "experiments" / "a"
    before = tables.results_tables(folder)[0]
    quality["provenance"]["checkpoint"]["digest"] = "cd" * 32
    for row in quality["tasks"].values():
        row["item_count"] //= 2
        row["value"] = 0.125
    items = store.read_items(store.records(folder, Quality)[0])
    record_files.write(folder, quality | {"variant": "a"}, items)
    after = tables.results_tables(folder)[0]
    assert "0.125 ±" not in before.rows[0][2]
    assert after.rows[0][2].startswith("0.125 ±")


def test_the_list_of_variants_shows_the_records_that_they_cite(repository):
    rows = {row[0]: row[4:] for row in tables.variants_table(repository).rows}
    assert rows["a"] == ("-", "-")
    claims = repository / "experiments" / "a" / "measurements.json"
    (cited,) = store.records(claims.parent, Quality)
    claims.write_text(json.dumps(json.loads(claims.read_text()) | {"records": [cited.name]}))
    rows = {row[0]: row[4:] for row in tables.variants_table(repository).rows}
    assert rows["a"][0].startswith("facts 0.500")
    assert rows["a"][1] == "-"
    rows = {row[0]: row[4:] for row in tables.variants_table(repository, with_weights=True).rows}
    assert rows["a"][1] != "-"


def drafted(repository, one, accepted, digest="ab" * 32, **changes):
    """An acceptance record of three groups, so many of ten drafts accepted at each of two positions."""
    items = [
        {"depth": 2, "class": "short", "temperature": 0.0, "group": group, "drafts": 10,
         "accepted_per_position": [accepted, accepted], "output_tokens": 30, "seconds": 1.0}
        for group in range(3)
    ]  # fmt: skip
    body = (
        example("acceptance")
        | {"variant": one, "depths": [row.as_json() for row in acceptance.summarise_items(items)]}
        | changes
    )
    body["provenance"]["checkpoint"]["digest"] = digest
    return record_files.write(repository / "experiments" / one, body, items)


def test_a_summary_has_a_line_for_each_measure_that_has_a_record(repository, add_start_up):
    table = tables.summary_table(repository, "a", "b")
    assert [row[0] for row in table.rows] == [
        "size on disk, MB",
        "facts, exact match",
        "prose, bits per byte",
    ]
    assert table.rows[1][1:] == (
        "0.500",
        "0.500",
        "+0.000 ± 0.000",
        "inconclusive (margin 0.04)",
        "4 items",
    )

    paths = [drafted(repository, one, accepted) for one, accepted in (("a", 8), ("b", 7))]

    def started(hour, cold_s, checkpoint="ab" * 32):
        def edit(record):
            record["provenance"]["ended"] = f"2026-01-01T0{hour}:00:00Z"
            record["provenance"]["checkpoint"]["digest"] = checkpoint
            for kind, seconds in (("cold", cold_s), ("baked", 30.0)):
                record[kind] = [
                    {**record[kind][0], "ready_seconds": seconds + n, "graphs": []} for n in range(3)
                ]
            record["ready_cold_over_baked"] = {"value": 2.94, "low": 2.8, "high": 3.1}

        add_start_up("b", edit)

    # The newest of the checkpoint that was scored counts: not the one before it, nor one of another checkpoint.
    started(1, 30.0)
    started(2, 90.0)
    started(3, 30.0, "cd" * 32)

    table = tables.summary_table(repository, "a", "b")
    assert table.rows[1] == (
        "acceptance length, K=2",
        "2.600",
        "2.400",
        "92.3% [92.3%, 92.3%]",
        "fail (at least 97%)",
        "3 groups of prompts",
    )
    assert table.rows[0] == (
        "start-up of b, s: cold and baked compile cache",
        "91.0",
        "31.0",
        "2.94x [2.80, 3.10]",
        "",
        "3 starts each, medians",
    )
    notes = " ".join(table.notes)
    for file in (
        *(f"{path.parent.name}/{path.name}" for path in paths),
        "b/start_up_2026-01-01T020000Z.json",
    ):
        assert file in notes


@pytest.mark.parametrize("digest", ["ab" * 32, "ef" * 32])
def test_a_summary_begins_with_the_speed_of_the_checkpoints_that_were_scored(repository, latency, digest):
    for name, time_ms in (("a", 8.0), ("b", 2.0)):
        latency["provenance"]["checkpoint"] = {**latency["provenance"]["checkpoint"], "digest": digest}
        items = [
            {
                "round": number,
                "class": "short",
                "error": None,
                **dict.fromkeys(LATENCY_MEASURES, time_ms + number),
            }
            for number in (1, 2, 3)
            for _ in range(2)
        ]
        timed = latency | {"variant": name, "workload": "classes", "rounds": 3, "run": "one"}
        record_files.write(repository / "experiments" / name, timed, items)
    table = tables.summary_table(repository, "a", "b")
    assert [row[0] for row in table.rows][:3] == (
        ["TTFT of class short, ms", "TPOT of class short, ms", "size on disk, MB"]
        if digest == "ab" * 32
        else ["size on disk, MB", "facts, exact match", "prose, bits per byte"]
    )


@pytest.mark.parametrize(
    ("digest", "values", "kl"),
    [
        ("ab" * 32, (0.001, 0.002), "0.00200 ± 0.00001"),
        ("ef" * 32, (0.001, 0.002), None),
        ("ab" * 32, (None, None), None),
    ],
)
def test_a_summary_has_the_largest_divergence_of_the_scored_checkpoint(repository, digest, values, kl):
    estimates = [value and Estimate(value=value, standard_error=1e-5, count=9) for value in values]
    figures = [figures_of(estimate, joined_kl_nats=0.001).as_json() for estimate in estimates]
    verdicts = judge_figures(figures_of(None, joined_kl_nats=0.001), LIMITS)
    record = {
        "schema": "fidelity/3", "variant": "b", "baseline": "a", "plan": "tinyworld", "limits": LIMITS.as_json(),
        "unchanged": None, "modes": dict(zip(("single", "served"), figures, strict=True)),
        "verdicts": dict.fromkeys(("single", "served"), verdicts), "verdict": "pass", "split": None,
        "provenance": example("acceptance")["provenance"],
    }  # fmt: skip
    record["provenance"]["checkpoint"]["digest"] = digest
    record_files.write(repository / "experiments" / "b", record, [{"text": 1}])
    rows = [row for row in tables.summary_table(repository, "a", "b").rows if row[0].startswith("KL")]
    expected = ("KL from the baseline, nats a token", "", kl, "", "pass (limit 0.003)", "9 positions")
    assert rows == ([expected] if kl else [])


@pytest.mark.parametrize("changes", [{"plan": "another"}, {"digest": "ef" * 32}])
def test_acceptance_of_other_settings_or_another_checkpoint_is_left_out(repository, changes):
    drafted(repository, "a", 8)
    drafted(repository, "b", 8, **changes)
    assert not any("acceptance" in row[0] for row in tables.summary_table(repository, "a", "b").rows)
