"""The report's page: what it shows, what it leaves out, and that an interrupted build leaves the old one."""

import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.records import collection
from slimqwen.report import leaderboard, site

ROOT = variant.repository_root()
ODD = 'odd & <b>"name" #1?%41'


class Page(HTMLParser):
    """The elements of a page, and its words."""

    def __init__(self, file):
        super().__init__()
        self.elements = []
        self.text = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


@pytest.fixture
def small(add_variant, add_record, claim):
    """A baseline, a variant of it, and one with an odd name and a hostile hypothesis."""
    add_variant("base", "VLLM_MODEL=weights/base\n")
    add_variant("quick", "BASE=base\nVLLM_MODEL=weights/quick\n", baseline="base")
    add_variant(ODD, "BASE=base\nVLLM_MODEL='weights/<script>alert(2)</script>'\n", baseline="base")
    claim("quick", status="measured", verdict="pass")
    claim(ODD, hypothesis="</td><script>alert(1)</script>")
    for name in ("base", "quick"):
        add_record(name, "quality")
        add_record(name, "latency")


def test_the_page_of_the_committed_records_has_every_variant_and_what_to_serve(tmp_path):
    built = site.build_page(ROOT, tmp_path / "report")
    page = Page(built.index)
    assert {attributes.get("id") for tag, attributes in page.elements if tag == "details"} == set(
        variant.names(ROOT)
    )
    assert built.records == len(collection.collect(ROOT).records) > 10
    assert "Serve tiny-best on " in page.words
    assert "no CPU figure is evidence about a GPU" in page.words
    assert list((tmp_path / "report").iterdir()) == [built.index]


def test_the_page_loads_nothing_from_elsewhere(small, tmp_path):
    page = Page(site.build_page(tmp_path, tmp_path / "report").index)
    addresses = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href")
    ]
    assert set(addresses) == {"data:,"}


def test_ones_own_variants_come_first(small, tmp_path, monkeypatch):
    monkeypatch.setattr(site.provenance, "shipped_variants", lambda root: ["base", ODD])
    page = Page(site.build_page(tmp_path, tmp_path / "report").index)
    shown = [attributes.get("id") for tag, attributes in page.elements if tag == "details"]
    assert shown[0] == "quick"
    assert set(shown[1:]) == {"base", ODD}


def test_the_page_asks_for_no_gate_of_a_baseline(small, tmp_path):
    page = Page(site.build_page(tmp_path, tmp_path / "report").index)
    assert "slimqwen gate --variant quick" in page.words
    assert "slimqwen gate --variant base" not in page.words


def test_the_page_begins_with_the_run_of_the_demo(small, tmp_path):
    assert "Your run of the demo" not in Page(site.build_page(tmp_path, tmp_path / "report").index).words
    for name in ("base", "quick"):
        shutil.copytree(tmp_path / "experiments" / name, tmp_path / "demo" / name)
    built = site.build_page(tmp_path, tmp_path / "report")
    assert built.problems == ()
    words = Page(built.index).words
    assert (
        words.index("quick and its baseline base")
        < words.index("facts, exact match")
        < words.index("Compared")
    )
    for record in (tmp_path / "demo" / "quick").glob("quality_*.json"):
        record.write_text("{ half a rec")
    assert [problem.location for problem in site.build_page(tmp_path, tmp_path / "report").problems] == [
        "demo/quick"
    ]


def test_nothing_that_a_file_says_becomes_markup(small, tmp_path):
    page = Page(site.build_page(tmp_path, tmp_path / "report").index)
    assert "script" not in {tag for tag, _ in page.elements}
    assert "</td><script>alert(1)</script>" in page.words


def test_files_that_are_left_out_are_named(small, tmp_path):
    (tmp_path / "experiments" / "quick" / "notes.txt").touch()
    built = site.build_page(tmp_path, tmp_path / "report")
    assert [problem.location for problem in built.problems] == ["experiments/quick/notes.txt"]
    assert "experiments/quick/notes.txt" in Page(built.index).words


def test_an_interrupted_build_leaves_the_old_page(small, tmp_path, monkeypatch):
    built = site.build_page(tmp_path, tmp_path / "report")
    before = built.index.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        site.build_page(tmp_path, tmp_path / "report")
    monkeypatch.undo()
    assert built.index.read_bytes() == before
    assert list((tmp_path / "report").iterdir()) == [built.index]


def test_a_variant_names_the_command_of_each_missing_record(small, tmp_path):
    words = Page(site.build_page(tmp_path, tmp_path / "report").index).words
    assert "No fidelity record: slimqwen eval fidelity --variant quick" in words


def test_a_variant_lists_the_items_on_which_it_differs_from_its_baseline(small, add_record, tmp_path):
    def miss(item):
        return item | {"value": 0.0, "output": "not that"} if item["task"] == "tinyworld_facts" else item

    assert "not that" not in Page(site.build_page(tmp_path, tmp_path / "report").index).words
    add_record("quick", "quality", "2026-01-02T000000Z", edit_items=miss)
    assert "not that" in Page(site.build_page(tmp_path, tmp_path / "report").index).words


def test_the_chart_describes_its_figures(small, tmp_path):
    rows = [
        row
        for name in ("base", "quick")
        for row in leaderboard.rows_of(collection.collect(tmp_path), name)[0]
    ]
    svg = site.draw_front(rows)
    assert svg is not None
    assert f"quick: {rows[1].size_bytes / 1e6:,.2f} MB" in svg
    assert site.draw_front(rows[:1]) is None
