import json
import math
import re
import shutil
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
import typer

from slimqwen import variant
from slimqwen.cli.app import app
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import collection
from slimqwen.report import charts, glossary, site
from slimqwen.stats import intervals

ROOT = variant.repository_root()

ODD = 'odd & <b>"name" #1?%41'


class Page(HTMLParser):
    """The elements of a page, and the text of its table cells by row."""

    def __init__(self, file):
        super().__init__()
        self.elements = []
        self.text = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

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


def test_the_site_of_the_committed_records_has_a_page_a_variant(tmp_path):
    built = site.build(ROOT, tmp_path / "report")

    pages = {file.stem for file in (tmp_path / "report" / "variants").iterdir()}
    assert pages == set(variant.names(ROOT))
    assert built.records == len(collection.collect(ROOT).records) > 10
    index = Page(built.index)
    assert {row["data-standing"] for row in index.all("tr") if "data-standing" in row} >= {"pass", "planned"}
    assert "no CPU figure is evidence about a GPU" in index.words
    tiny = Page(tmp_path / "report" / "variants" / "tiny.html").words
    assert re.search(r"Best measured on [^:]+: tiny-best ,", tiny)
    assert re.search(
        r"Best by the roofline of the \w+, which is a model and no measurement, [^:]+: tiny-", tiny
    )
    _assert_whole(tmp_path / "report")


def test_families_with_a_record_come_first_and_planned_variants_last_in_each(
    add_variant, add_record, claim, tmp_path
):
    add_variant("a", "VLLM_MODEL=weights/a\n")
    add_variant("b", "VLLM_MODEL=weights/b\n")
    add_variant("b-planned", "BASE=b\n", baseline="b")
    add_variant("b-quick", "BASE=b\n", baseline="b")
    add_variant("copy", "VLLM_MODEL=weights/copy\n", baseline="b-quick")
    for name in ("b", "b-quick"):
        claim(name, status="measured")
        add_record(name, "quality")
    site.build(tmp_path, tmp_path / "report")

    board = Page(tmp_path / "report" / "index.html")
    names = [cell["data-o"] for cell in board.all("th") if "data-o" in cell]
    assert (set(names[:2]), set(names[2:4]), names[4]) == ({"b", "b-quick"}, {"b-planned", "copy"}, "a")
    families = [each.get("class") for each in board.all("tbody")][:2]
    assert families == [None, "planned"]


def test_the_index_begins_with_the_run_of_the_demo(small, tmp_path):
    site.build(tmp_path, tmp_path / "report")
    assert "Your run of the demo" not in Page(tmp_path / "report" / "index.html").words

    for name in ("base", "quick"):
        shutil.copytree(tmp_path / "experiments" / name, tmp_path / "demo" / name)
    built = site.build(tmp_path, tmp_path / "report")

    assert built.problems == ()
    index = Page(built.index)
    main = index.words[index.words.index("Measured on this machine") :]
    assert (
        main.index("quick against its baseline base")
        < main.index("facts, exact match")
        < main.index("Against")
    )
    _assert_whole(tmp_path / "report")

    for record in (tmp_path / "demo" / "quick").glob("quality_*.json"):
        record.write_text("{ half a rec")
    assert [problem.location for problem in site.build(tmp_path, tmp_path / "report").problems] == [
        "demo/quick"
    ]


def test_every_page_ends_with_the_glossary_and_its_headings_explain_abbreviations(small, tmp_path):
    (tmp_path / "docs").mkdir()
    terms = "| TTFT | time & token |\n| K, `depth` | tokens in a draft |\n| item | one question |"
    (tmp_path / "docs" / "glossary.md").write_text(f"| term | meaning |\n|---|---|\n{terms}\n")
    site.build(tmp_path, tmp_path / "report")

    for file in (tmp_path / "report").rglob("*.html"):
        page = Page(file)
        assert page.words.endswith("Glossary TTFT time & token K, depth tokens in a draft item one question")
        assert any(link.get("href") == "#glossary" for link in page.all("a"))
    index = Page(tmp_path / "report" / "index.html")
    assert {mark["title"] for mark in index.all("abbr")} == {"time & token"}
    assert glossary.explained("<K> & KV, item", glossary.abbreviations({"K": '"k"', "item": "i"})) == (
        '&lt;<abbr title="&#34;k&#34;">K</abbr>&gt; &amp; KV, item'
    )


def test_the_glossary_describes_every_task_of_the_embedded_world():
    named = glossary.read(ROOT)
    for task in Suite.load("tinyworld", ROOT).tasks:
        name = task.name.removeprefix("tinyworld_")
        assert named.get(name, named.get(f"{name} (task)", "")).startswith("task of the suite tinyworld")


def test_nothing_that_a_file_says_becomes_markup(small, tmp_path):
    site.build(tmp_path, tmp_path / "report")

    for file in (tmp_path / "report").rglob("*.html"):
        page = Page(file)
        assert [script for script in page.all("script") if "src" not in script] == []
        assert page.all("b") == [] or "<b>&#34;name" not in file.read_text()
    index = Page(tmp_path / "report" / "index.html")
    assert "</td><script>alert(1)</script>" in index.words
    assert ODD in index.words
    assert (tmp_path / "report" / "variants" / f"{ODD}.html").is_file()
    _assert_whole(tmp_path / "report")


def test_files_left_out_are_named_and_the_rest_is_there(small, add_record, claim, tmp_path):
    claim(ODD, baseline="nobody")
    broken = tmp_path / "experiments" / "quick" / "quality_2027-01-01T000000Z.json"
    broken.write_text("{ half a rec")

    def of_the_future(record):
        record["schema"] = "latency/99"

    future = add_record("quick", "latency", "2027-01-01T000000Z", edit=of_the_future)
    (tmp_path / "experiments" / "half").mkdir()
    (tmp_path / "experiments" / "half" / "config.env").write_text("not a line\n")

    built = site.build(tmp_path, tmp_path / "report")

    named = {problem.location for problem in built.problems}
    assert {str(path.relative_to(tmp_path)) for path in (broken, future)} <= named
    assert {"experiments/half/config.env", f"experiments/{ODD}/measurements.json"} <= named
    index = Page(built.index)
    assert all(word in index.words for word in named)
    assert "quick" in index.words
    assert broken.name in Page(tmp_path / "report" / "variants" / "quick.html").words
    _assert_whole(tmp_path / "report")


def test_a_repository_without_any_record_has_a_report_too(add_variant, tmp_path):
    add_variant("alone", "VLLM_MODEL=weights/alone\n")

    built = site.build(tmp_path, tmp_path / "report")

    assert (built.variants, built.records) == (1, 0)
    assert "No variant has been measured" in Page(built.index).words


def test_a_second_build_replaces_the_first(small, add_variant, tmp_path):
    site.build(tmp_path, tmp_path / "report")
    (tmp_path / "experiments" / ODD / "config.env").unlink()
    (tmp_path / "experiments" / ODD / "measurements.json").unlink()
    add_variant("new", "BASE=base\n", baseline="base")
    site.build(tmp_path, tmp_path / "report")

    assert {file.stem for file in (tmp_path / "report" / "variants").iterdir()} == {"base", "quick", "new"}
    assert [left.name for left in tmp_path.glob(".report*")] == []


def test_an_interrupted_build_leaves_the_old_report_whole(small, tmp_path, monkeypatch):
    site.build(tmp_path, tmp_path / "report")
    before = {file: file.read_bytes() for file in (tmp_path / "report").rglob("*") if file.is_file()}

    def interrupt(activity, done, total):
        if activity == "write the pages" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        site.build(tmp_path, tmp_path / "report", interrupt)

    assert {file: file.read_bytes() for file in (tmp_path / "report").rglob("*") if file.is_file()} == before
    assert [left.name for left in tmp_path.glob(".report*")] == []


def test_a_folder_that_is_no_report_is_not_replaced(small, tmp_path):
    with pytest.raises(site.ReportError, match="other than a report"):
        site.build(tmp_path, tmp_path / "experiments")

    assert (tmp_path / "experiments" / "base" / "config.env").is_file()


@pytest.fixture
def two_hundred(add_variant, add_record, add_start_up, claim):
    """200 variants with 1,992 records."""
    add_variant("base", "VLLM_MODEL=weights/base\n")
    for kind in ("quality", "latency"):
        add_record("base", kind)
    for number in range(199):
        name = f"v{number:03}"
        parent = "base" if number % 5 == 0 else f"v{number - 1:03}"
        add_variant(name, f"BASE={parent}\nVLLM_MODEL=weights/{name}\n", baseline="base")
        claim(name, status="measured", verdict=("pass", "fail", "inconclusive")[number % 3])

        def grow(record, number=number):
            record["provenance"]["checkpoint"]["size_bytes"] += number * 1000

        for kind in ("quality", "latency", "acceptance"):
            for day in range(1, 4):
                add_record(name, kind, f"2026-01-0{day}T000000Z", edit=grow)
        add_start_up(name)


def test_two_hundred_variants_with_two_thousand_records(two_hundred, tmp_path, monkeypatch):
    pictures = {}

    def alike(spec):
        """One picture for all charts of about one size: how each is drawn is for other tests."""
        size = len(json.dumps(spec)) // 1000
        return pictures.get(size) or pictures.setdefault(size, picture(spec))

    picture = charts._svg
    monkeypatch.setattr(charts, "_svg", alike)
    monkeypatch.setattr(charts, "_PARALLEL_FROM", math.inf)  # another process would not know `alike`
    monkeypatch.setattr(intervals, "BOOTSTRAP_RESAMPLES", 99)

    _assert_holds_two_hundred(site.build(tmp_path, tmp_path / "report"), tmp_path)


@pytest.mark.soak
def test_two_hundred_variants_with_every_picture(two_hundred, tmp_path):
    """What `--durations` says of its call is how long such a report takes to build."""
    _assert_holds_two_hundred(site.build(tmp_path, tmp_path / "report"), tmp_path)


def _assert_holds_two_hundred(built, root):
    assert (built.variants, built.records, built.problems) == (200, 1992, ())
    index = Page(built.index)
    assert len([row for row in index.all("tr") if "data-standing" in row]) == 200
    assert built.index.stat().st_size < 3_000_000
    assert len(list((root / "report" / "variants").iterdir())) == 200
    assert index.words.count("Quality against size") > 0
    _assert_whole(root / "report", pages=20)


def test_figures_for_a_readme(small, tmp_path):
    written = site.figures(tmp_path, tmp_path / "figures")

    assert {file.name for file in written} == {"pareto-latency.svg", "pareto-size.svg"}
    assert all(file.read_text().startswith("<svg") for file in written)
    again = [file.read_bytes() for file in site.figures(tmp_path, tmp_path / "figures")]
    assert again == [file.read_bytes() for file in written]


def test_the_figures_of_the_readme_show_what_its_records_give(tmp_path):
    """`slimqwen report --figures docs/figures` draws them again. Words alone: fonts decide where they stand."""

    def named(file):
        return set(re.findall(r">(tiny[\w-]*|cold|warm|baked)<", file.read_text()))

    committed = {file.name: named(file) for file in (ROOT / "docs" / "figures").iterdir()}
    drawn = {file.name: named(file) for file in site.figures(ROOT, tmp_path)}
    assert drawn == {name: committed[name] for name in drawn}
    assert all(drawn.values())
    shown = set(re.findall(r"\(docs/figures/([\w-]+\.svg)\)", (ROOT / "README.md").read_text()))
    assert shown <= set(committed)


def test_pages_name_commands_of_the_command_line(small, tmp_path):
    site.build(tmp_path, tmp_path / "report")
    pages = [file.read_text() for file in (tmp_path / "report").rglob("*.html")]
    named = {
        tuple(re.findall(r"[\w-]+", words))
        for page in pages
        for words in re.findall(r"slimqwen ((?:[a-z_]+ ?)+)--", page)
    }
    assert ("gate", "check") in named
    for words in named:
        command = typer.main.get_command(app)
        for word in words:
            assert word in command.commands, words
            command = command.commands[word]


def _assert_whole(report, pages=None):
    """Every link of the index, and of so many other pages, leads to what is there; nothing is asked of a network."""
    files = [report / "index.html", *sorted(report.rglob("variants/*.html"))[:pages]]
    read = {file.resolve(): Page(file) for file in files}
    anchors = {file: {one["id"] for _, one in page.elements if "id" in one} for file, page in read.items()}
    for file, page in read.items():
        ids = [one["id"] for _, one in page.elements if "id" in one and not one["id"].startswith("clip")]
        assert len(ids) == len(set(ids)), file.name
        links = [one["href"] for tag in ("a", "link") for one in page.all(tag)]
        links += [one["src"] for one in page.all("script")]
        for link in links:
            if link == "data:,":
                continue
            assert "//" not in link
            target, _, anchor = link.partition("#")
            to = (file.parent / unquote(target)).resolve() if target else file
            assert to.is_file(), f"{file.name}: {link}"
            assert not anchor or anchor in anchors.get(to, [anchor]), f"{file.name}: {link}"
    for asset in (report / "assets").iterdir():
        assert "http" not in asset.read_text()
        assert "url(" not in asset.read_text()
