import io
import json

import pytest
import rich.console

from slimqwen import variant
from slimqwen.evaluation.comparison import LATENCY_MEASURES
from slimqwen.records import store, tables

ITEMS = [{"task": "example_facts", "item": f"f{n}", "value": n % 2, "weight": 1} for n in range(4)] + [
    {"task": "example_prose", "item": f"p{n}", "value": 1.5, "weight": 10} for n in range(4)
]
TIMES = [{"class": "short", "error": None, **dict.fromkeys(LATENCY_MEASURES, 100.0 + n)} for n in range(12)]


@pytest.fixture
def repository(tmp_path, add_variant, quality, latency):
    """Two variants, both measured: b twice as large in every time, and without a GPU."""
    for name in ("a", "b"):
        add_variant(name, f"VLLM_MODEL=weights/{name}\n", baseline="a" if name == "b" else None)
        folder = tmp_path / "experiments" / name
        store.write(folder, quality | {"variant": name}, ITEMS)
        store.write(folder, latency | {"variant": name}, TIMES)
    return tmp_path


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
    assert quality.rows[0][-4:] == ("1.000", "0.04", "inconclusive", "4 (108)")
    assert quality.rows[1][-4] == "-"
    assert "8.0 MB" in quality.notes[0]
    assert latency.rows[0][0:2] == ("short 16 -> 16", "TTFT")
    assert latency.rows[0][4] == "1.00x"
    assert "Example GPU" in latency.notes[0]
    for table, kind in ((quality, "quality"), (latency, "latency")):
        notes = " ".join(table.notes)
        for name in ("a", "b"):
            assert f"{name}/{next(store.records(experiments / name, kind)).name}" in notes
        assert "python scripts/eval_" in notes
        assert "commit 0123456789" in notes
        assert "vLLM 0.32.0" in notes


def test_latency_on_a_cpu_says_that_it_is_no_evidence_about_a_gpu(repository, latency, monkeypatch):
    monkeypatch.setattr(store, "_stamp", lambda: "2027-01-01T000000Z")
    latency["provenance"]["hardware"]["gpus"] = []
    for name in ("a", "b"):
        store.write(repository / "experiments" / name, latency | {"variant": name}, TIMES)
    _, table = tables.comparison_tables(repository / "experiments" / "a", repository / "experiments" / "b")
    assert any("no CPU figure is evidence about a GPU" in note for note in table.notes)
    assert "2 CPUs of Example CPU" in table.notes[0]


def test_a_kind_that_was_not_measured_is_left_out_and_named(repository):
    next(store.records(repository / "experiments" / "b", "latency")).unlink()
    (table,) = tables.comparison_tables(repository / "experiments" / "a", repository / "experiments" / "b")
    assert "make eval-latency VARIANT=b" in table.notes[-1]


def test_nothing_measured_is_an_error(repository, tmp_path):
    with pytest.raises(store.MissingRecordError, match="make eval-quality VARIANT=c"):
        tables.comparison_tables(repository / "experiments" / "a", tmp_path / "c")
    with pytest.raises(store.MissingRecordError, match="make eval-quality VARIANT=c"):
        tables.results_tables(tmp_path / "c")


def test_results_show_each_figure_with_its_standard_error(repository):
    quality, latency = tables.results_tables(repository / "experiments" / "a")
    assert quality.rows[0] == ("facts", "exact match", "0.500 ± 0.200", "4 of 500", "1", "0")
    assert latency.rows[0][1] == "100.0 ± 5.0"
    assert latency.rows[0][-2:] == ("2.50", "12 (0 failed)")


def test_the_variants_table_has_hypotheses_and_latest_figures(repository, add_variant):
    add_variant("c", "VLLM_MODEL=weights/c\n", baseline="a")
    table = tables.variants_table(repository, with_weights=True)
    a, b, c = table.rows
    assert a[:4] == ("a", "what a shows", "-", "planned")
    assert "facts 0.500±0.200" in a[4]
    assert "short 250 (Example GPU)" in b[5]
    assert c[4:] == ("-", "-", "no")
    assert len(tables.variants_table(repository).columns) == 6


@pytest.fixture
def readme(repository):
    file = repository / "experiments" / "b" / "README.md"
    file.write_text(
        "# b\n\n<!-- table:comparison a b -->\n<!-- end -->\n\nText.\n\n<!-- table:results b -->\n<!-- end -->\n"
    )
    (fresh,) = tables.outdated(repository).values()
    file.write_text(fresh)
    return file


def test_a_filled_readme_agrees_with_its_records(repository, readme):
    text = readme.read_text()
    assert text.startswith("# b\n\n<!-- table:comparison a b -->\n**Quality: a and b")
    assert "\nText.\n" in text
    assert tables.outdated(repository) == {}


@pytest.mark.parametrize("figure", ["0.500", "100.0", "1.00x", "8.0 MB"])
def test_a_changed_figure_is_noticed(repository, readme, figure):
    text = readme.read_text()
    readme.write_text(text.replace(figure, "9.999", 1))
    assert tables.outdated(repository) == {readme: text}


def test_a_newer_record_makes_the_readme_outdated(repository, readme, quality, monkeypatch):
    monkeypatch.setattr(store, "_stamp", lambda: "2027-01-01T000000Z")
    store.write(repository / "experiments" / "b", quality | {"variant": "b"}, ITEMS)
    assert list(tables.outdated(repository)) == [readme]


def test_text_outside_the_blocks_is_left_alone(repository, readme):
    readme.write_text(readme.read_text().replace("Text.", "0.500 typed by hand."))
    assert tables.outdated(repository) == {}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("<!-- table:variants -->\n", "lacks its <!-- end -->"),
        ("<!-- table:variants -->\n<!-- table:results a -->\n<!-- end -->\n", "lacks its <!-- end -->"),
        ("<!-- table:comparison a -->\n<!-- end -->\n", "no table 'comparison a'"),
        ("<!-- table:nonsense -->\n<!-- end -->\n", "no table 'nonsense'"),
    ],
)
def test_a_bad_block_is_named_with_its_file(repository, text, cause):
    (repository / "README.md").write_text(text)
    with pytest.raises(tables.TableError, match=cause) as error:
        tables.outdated(repository)
    assert str(error.value).startswith("README.md: ")


def test_a_record_changed_by_hand_does_not_reach_a_table(repository, readme):
    path = next(store.records(repository / "experiments" / "b", "quality"))
    record = json.loads(path.read_text())
    record["tasks"]["example_facts"]["value"] = "great"
    path.write_text(json.dumps(record))
    with pytest.raises(store.RecordError, match=path.name):
        tables.outdated(repository)


def test_every_table_in_the_repository_is_what_its_records_generate():
    assert tables.outdated(variant.repository_root()) == {}


def exploration(name, one, hardware, checkpoint="ab" * 32, **found):
    provenance = {
        "command": f"python {name}",
        "git": {"commit": "c" * 40, "dirty": False},
        "hardware": hardware,
        "checkpoint": checkpoint,
    }
    return {"schema": f"{name}/1", "variant": one, **found, "provenance": provenance}


def test_a_summary_has_a_line_for_each_measure_that_has_a_record(repository, quality):
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
        "4 items (108)",
    )

    hardware = quality["provenance"]["hardware"]
    (repository / "results").mkdir()
    for one, lengths in (("a", {2: 2.0, 4: 4.0}), ("b", {4: 3.9, 7: 5.0})):
        depths = [
            {"depth": k, "drafts": 100, "acceptance_length": length, "rates": []}
            for k, length in lengths.items()
        ]
        record = exploration("draft_depth", one, hardware, depths=depths)
        (repository / "results" / f"draft_depth_{one}.json").write_text(json.dumps(record))
    starts = {
        kind: [{"ready_seconds": seconds + n, "graphs": []} for n in range(3)]
        for kind, seconds in (("cold", 90.0), ("baked", 30.0))
    }
    ratio = {"ready_cold_over_baked": {"value": 2.94, "low": 2.8, "high": 3.1}}
    record = exploration("start_up", "b", hardware, **starts, **ratio)
    (repository / "results" / "start_up_b.json").write_text(json.dumps(record))

    table = tables.summary_table(repository, "a", "b")
    assert table.rows[-2] == ("acceptance length, K=4", "4.000", "3.900", "97.5%", "", "100 and 100 drafts")
    assert table.rows[-1] == (
        "start-up of b, s: cold and baked compile cache",
        "91.0",
        "31.0",
        "2.94x [2.80, 3.10]",
        "",
        "3 starts each, medians",
    )
    notes = " ".join(table.notes)
    for file in ("results/draft_depth_a.json", "results/draft_depth_b.json", "results/start_up_b.json"):
        assert file in notes


def test_acceptance_at_different_depths_is_not_compared(repository, quality):
    (repository / "results").mkdir()
    for one, depth in (("a", 2), ("b", 4)):
        depths = [{"depth": depth, "drafts": 9, "acceptance_length": 2.0, "rates": []}]
        record = exploration("draft_depth", one, quality["provenance"]["hardware"], depths=depths)
        (repository / "results" / f"draft_depth_{one}.json").write_text(json.dumps(record))
    assert not any("acceptance" in row[0] for row in tables.summary_table(repository, "a", "b").rows)


def test_figures_of_another_checkpoint_than_the_scored_one_are_left_out(repository, quality):
    (repository / "results").mkdir()
    for one, checkpoint in (("a", "ab" * 32), ("b", "ef" * 32)):
        depths = [{"depth": 4, "drafts": 9, "acceptance_length": 2.0, "rates": []}]
        record = exploration(
            "draft_depth", one, quality["provenance"]["hardware"], checkpoint=checkpoint, depths=depths
        )
        (repository / "results" / f"draft_depth_{one}.json").write_text(json.dumps(record))
    assert not any("acceptance" in row[0] for row in tables.summary_table(repository, "a", "b").rows)
