import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import pytest

from slimqwen import variant
from slimqwen.records import collection, registry
from slimqwen.report import charts, comparison_charts, leaderboard
from slimqwen.report.fronts import Front, Point
from slimqwen.report.leaderboard import Margins

ROOT = variant.repository_root()
KINDS = registry.kinds()


@pytest.fixture(scope="module")
def records():
    return collection.collect(ROOT)


def front(name="<script>alert(1)</script>"):
    points = (
        Point("base", "measured", 2.0, 1.9, 2.1, Margins("", 0, 0, 0), True),
        Point(name, "pass", 1.0, 0.9, 1.1, Margins("facts", -0.2, -0.5, 0.1), True),
    )
    return Front("base", "a machine", True, "size", "checkpoint, MB", points)


def drawn(chart):
    charts.draw([chart])
    return chart


def texts_of(chart):
    return [element.text for element in ET.fromstring(chart.svg).iter() if element.tag.endswith("text")]


def test_names_stay_text_in_the_picture():
    chart = drawn(comparison_charts.pareto(front()))

    assert "<script" not in chart.svg
    texts = texts_of(chart)
    assert "<script>alert(1)</script>" in texts


def test_points_that_lie_on_each_other_share_their_text():
    apart = front("quick")
    near = Point("twin", "pass", 2.01, 2.0, 2.02, Margins("facts", -0.02, -0.3, 0.2))
    shown = drawn(comparison_charts.pareto(dataclasses.replace(apart, points=(*apart.points, near))))

    texts = set(texts_of(shown))
    assert {"base, twin", "quick"} <= texts
    assert not {"base", "twin"} & texts


def test_a_picture_is_one_image_with_a_label_and_colours_of_the_page():
    chart = drawn(comparison_charts.pareto(front("quick")))

    root = ET.fromstring(chart.svg)
    assert root.get("role") == "img"
    assert root.get("aria-label").startswith("Quality against size.")
    assert "var(--pass)" in chart.svg
    assert not re.findall(r'(?:fill|stroke)="(?:black|#000|white|#fff)', chart.svg)


def test_a_picture_of_its_own_follows_the_readers_colours():
    text = drawn(comparison_charts.pareto(front("quick"))).standalone

    assert ET.fromstring(text) is not None
    used = set(re.findall(r"var\((--[\w]+)\)", text))
    light, dark = text.partition("@media (prefers-color-scheme:dark)")[::2]
    assert used
    assert all(f"{name}:" in light and f"{name}:" in dark.partition("</style>")[0] for name in used)


def test_many_pictures_are_drawn_as_few_are(monkeypatch):
    alone = [drawn(comparison_charts.pareto(front(f"v{number}"))).svg for number in range(3)]
    monkeypatch.setattr(charts, "_PARALLEL_FROM", 1)
    together = [comparison_charts.pareto(front(f"v{number}")) for number in range(3)]
    charts.draw(together)

    assert [chart.svg for chart in together] == alone


def test_latency_tables_say_what_the_items_say(records):
    entry = records.select(KINDS["latency"], "tiny")[-1]
    chart = drawn(comparison_charts.latency_distributions([entry]))

    items = [json.loads(line) for line in entry.path.with_name(entry.record.items.file).open()]
    for shape, name, count, middle, _, slowest in chart.rows:
        times = [item["e2el_ms"] for item in items if item["class"] == shape.split()[0]]
        assert (name, count, slowest) == ("tiny", str(len(times)), f"{max(times):,.1f}")
        assert middle == f"{entry.record.classes[shape.split()[0]].e2el_ms.median:,.1f}"


def test_quality_by_task_shows_changes_in_margins(records):
    # One for each machine; the scores are the same.
    row, *_ = leaderboard.rows_of(records, "tiny-best")[0]

    chart = drawn(comparison_charts.changes(row.scores.values()))

    assert [cells[0] for cells in chart.rows] == [task for _, task in row.scores]
    assert min(float(cells[2].split()[0]) for cells in chart.rows) == round(row.worst.low, 2)


def test_a_record_is_drawn_from_the_panels_of_its_kind(records):
    [entry, *_] = records.select(KINDS["start_up"], "tiny-best")
    panels = entry.record.panels()
    chart = drawn(charts.of_record(entry.record))

    for panel in panels:
        for label in (panel.y, *(line.label for line in panel.lines)):
            assert label in chart.svg
    [line, *_] = panels[0].lines
    assert chart.rows[0][0] == line.label
    assert chart.rows[0][3].split()[0] == f"{line.y[0]:,.4g}"


def test_a_chart_is_drawn_beside_a_record_and_again_with_the_same_bytes(tmp_path):
    record = next((ROOT / "results").glob("start_up_*.json"))
    copy = tmp_path / record.name
    copy.write_bytes(record.read_bytes())

    file = charts.draw_beside(copy)
    first = file.read_bytes()

    assert file == copy.with_suffix(".svg")
    assert ET.fromstring(first) is not None
    assert charts.draw_beside(copy).read_bytes() == first


def test_whole_numbers_have_a_tick_each(records):
    sensitivity = next(
        entry.record for entry in records.select(KINDS["gate_power"]) if entry.record.seeds == (0, 1)
    )
    chart = drawn(charts.of_record(sensitivity))
    texts = texts_of(chart)
    assert texts.count("0") == texts.count("1") == len(sensitivity.panels())


def test_series_of_a_bar_panel_are_stacked_by_name(records):
    starts = next(
        entry.record for entry in records.select(KINDS["start_up"], "tiny-best") if entry.record.phases
    )
    chart = drawn(charts.of_record(starts))
    texts = texts_of(chart)
    assert {"cold", "warm", "baked", "seconds by phase (medians)"} <= set(texts)
    # Bars have no dashes: the colour alone tells a phase from the other series of the chart.
    scale = chart.spec["vconcat"][-1]["encoding"]["color"]["scale"]
    assert len(set(scale["range"])) == len(scale["domain"]) == len(starts.starts) + len(starts.phases)
    colours = {colour.removeprefix("var(").removesuffix(")") for colour in scale["range"]}
    assert colours <= set(
        re.findall(r"--c\d+(?=:)", (ROOT / "slimqwen/report/assets/report.css").read_text())
    )
    phase = next(iter(starts.phases))
    assert {row[2] for row in chart.rows if row[0] == phase.replace("_", " ")} == {"cold", "warm", "baked"}


def test_pictures_are_drawn_once_and_those_of_no_chart_are_dropped(tmp_path, monkeypatch):
    def picture(spec):
        drawn.append(spec["mark"])
        return f"<svg >{spec['mark']}</svg>"

    drawn = []
    monkeypatch.setattr(charts, "_svg", picture)

    def draw(*marks):
        made = [charts.chart(mark, "", {"mark": mark}, ("x",), ()) for mark in marks]
        charts.draw(made, cache=tmp_path / "charts")
        return [each.svg.partition(">")[2] for each in made]

    assert draw("bar", "line", "bar") == ["bar</svg>", "line</svg>", "bar</svg>"]
    assert draw("line", "area") == ["line</svg>", "area</svg>"]
    assert drawn == ["bar", "line", "area"]
    assert len(list((tmp_path / "charts").iterdir())) == 2
