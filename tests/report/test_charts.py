import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import pytest

from slimqwen import variant
from slimqwen.records import collection
from slimqwen.report import charts, leaderboard
from slimqwen.report.leaderboard import Front, Margins, Point
from slimqwen.report.lineage import StageSize

ROOT = variant.repository_root()


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


def test_names_stay_text_in_the_picture():
    chart = drawn(charts.pareto(front()))

    assert "<script" not in chart.svg
    texts = [element.text for element in ET.fromstring(chart.svg).iter() if element.tag.endswith("text")]
    assert "<script>alert(1)</script>" in texts


def test_points_that_lie_on_each_other_share_their_text():
    apart = front("quick")
    near = Point("twin", "pass", 2.01, 2.0, 2.02, Margins("facts", -0.02, -0.3, 0.2))
    shown = drawn(charts.pareto(dataclasses.replace(apart, points=(*apart.points, near))))

    texts = {element.text for element in ET.fromstring(shown.svg).iter() if element.tag.endswith("text")}
    assert {"base, twin", "quick"} <= texts
    assert not {"base", "twin"} & texts


def test_a_picture_is_one_image_with_a_label_and_colours_of_the_page():
    chart = drawn(charts.pareto(front("quick")))

    root = ET.fromstring(chart.svg)
    assert root.get("role") == "img"
    assert root.get("aria-label").startswith("Quality against size.")
    assert "var(--pass)" in chart.svg
    assert not re.findall(r'(?:fill|stroke)="(?:black|#000|white|#fff)', chart.svg)


def test_the_same_record_gives_the_same_bytes():
    assert drawn(charts.pareto(front())).standalone == drawn(charts.pareto(front())).standalone


def test_a_picture_of_its_own_follows_the_readers_colours():
    text = drawn(charts.pareto(front("quick"))).standalone

    assert ET.fromstring(text) is not None
    used = set(re.findall(r"var\((--[\w]+)\)", text))
    light, dark = text.partition("@media (prefers-color-scheme:dark)")[::2]
    assert used
    assert all(f"{name}:" in light and f"{name}:" in dark.partition("</style>")[0] for name in used)


def test_many_pictures_are_drawn_as_few_are(monkeypatch):
    alone = [drawn(charts.pareto(front(f"v{number}"))).svg for number in range(3)]
    monkeypatch.setattr(charts, "_MANY", 1)
    together = [charts.pareto(front(f"v{number}")) for number in range(3)]
    charts.draw(together)

    assert [chart.svg for chart in together] == alone


def test_latency_tables_say_what_the_items_say(records):
    found = records.of("tiny", "latency")[-1]
    chart = drawn(charts.latency_distributions([found]))

    items = [json.loads(line) for line in found.path.with_name(found.record["items"]["file"]).open()]
    for shape, name, count, middle, _, slowest in chart.rows:
        times = [item["e2el_ms"] for item in items if item["class"] == shape.split()[0]]
        assert (name, count, slowest) == ("tiny", str(len(times)), f"{max(times):,.1f}")
        assert middle == f"{found.record['classes'][shape.split()[0]]['e2el_ms']['median']:,.1f}"


def test_start_up_coverage_and_acceptance_show_the_records_figures(records):
    starts = drawn(charts.start_up(records.of("tiny-best", "start_up")[:1]))
    assert {row[0] for row in starts.rows} == {"cold", "warm", "baked"}
    assert [row[1] for row in starts.rows[:6]] == [
        "import",
        "load weights",
        "compile",
        "warm up",
        "first requests",
        "first token",
    ]

    of = records.of("tiny", "vocab_coverage")[0]
    coverage = drawn(charts.coverage(of))
    smallest = min(of.record["sizes"], key=lambda row: row["size"])
    assert coverage.rows[0] == (
        "prose", f"{smallest['size']:,}", f"{smallest['sources']['prose']['coverage']:.4f}"
    )  # fmt: skip

    counted = records.of("tiny-best", "acceptance")[0]
    lengths = drawn(charts.acceptance([counted]))
    of_depth = {str(row["depth"]): row["length"] for row in counted.record["depths"] if row["length"]}
    assert {row[1]: row[2] for row in lengths.rows} == {
        depth: f"{length['value']:.3f} ± {length['standard_error']:.3f}" for depth, length in of_depth.items()
    }


def test_a_waterfall_adds_up_even_where_a_stage_comes_twice():
    sizes = StageSize("base", 9_000_000), StageSize("prune", 8_000_000), StageSize("prune", 8_500_000)
    chart = drawn(charts.stage_sizes("v", sizes))

    assert [row[2] for row in chart.rows] == ["-", "-1.00", "+0.50"]
    assert len({row[0] for row in chart.rows}) == 3


def test_fidelity_by_stage_shows_what_each_stage_added(records):
    found = records.of("tiny-best", "fidelity")[0]
    figures = next(iter(found.record["modes"].values()))
    more = {**figures, "kl_nats": {**figures["kl_nats"], "value": 1.0}}
    stages = [{**figures, "stage": "calibrate"}, {**more, "stage": "prune_vocab"}]

    chart = drawn(charts.stage_fidelity(_with(found, stages=stages)))

    assert [row[0] for row in chart.rows] == ["1. calibrate", "2. prune_vocab"]
    assert chart.rows[1][1].startswith("1.00000")
    assert charts.stage_fidelity(_with(found, stages=[])) is None


def test_time_per_token_shows_the_contexts(records):
    found = records.of("tiny", "latency")[-1]

    chart = drawn(charts.time_per_token([_with(found, workload="context")]))

    assert [row[1] for row in chart.rows] == [
        f"{of['prompt_tokens']:,}" for of in found.record["classes"].values()
    ]


def test_quality_by_task_shows_changes_in_margins(records):
    # One for each machine; the scores are the same.
    row, *_ = leaderboard.rows_of(records, "tiny-best")[0]

    chart = drawn(charts.changes(row.scores.values()))

    assert [cells[0] for cells in chart.rows] == [task for _, task in row.scores]
    assert min(float(cells[2].split()[0]) for cells in chart.rows) == round(row.worst.low, 2)


def _with(found, **fields):
    return collection.Found(found.path, found.place, found.kind, found.variant, {**found.record, **fields})
