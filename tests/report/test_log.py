"""The log says what each record found, against the baseline where one fits, newest first."""

import json

import pytest

from slimqwen.bench.latency.speedups import LATENCY_MEASURES
from slimqwen.evals import acceptance
from slimqwen.report import log
from slimqwen.variant import ConfigError
from tests import record_files
from tests.record_files import example

pytestmark = pytest.mark.usefixtures("stamps")


@pytest.fixture
def keep(tmp_path, add_variant):
    """Write a record of a, the baseline, or of b, which ended in the given minute."""
    add_variant("a", "VLLM_MODEL=weights/a\n")
    add_variant("b", "VLLM_MODEL=weights/b\n", baseline="a")

    def write(name, body, items, minute):
        body = json.loads(json.dumps(body)) | {"variant": name}
        body["provenance"]["ended"] = f"2026-01-01T10:{minute:02}:00Z"
        return record_files.write(tmp_path / "experiments" / name, body, items)

    return write


def answers(right, of=400):
    return [
        {"task": "example_facts", "item": f"f{n}", "value": float(n < right), "weight": 1} for n in range(of)
    ]


def findings(root, variant=None):
    return [entry.finding for entry in log.entries(root, variant=variant)[0]]


def scored(quality, **changes):
    return quality | {"tasks": {"example_facts": quality["tasks"]["example_facts"]}} | changes


def times(ms):
    return [
        {"class": "short", "error": None, "round": 0, **dict.fromkeys(LATENCY_MEASURES, ms + n)}
        for n in range(12)
    ]


def test_lines_are_newest_first_with_date_variant_kind_and_commit(keep, tmp_path, quality, latency):
    keep("a", scored(quality), answers(200), 1)
    path = keep("b", scored(quality), answers(200), 3)
    keep("a", latency, times(100.0), 2)
    entries, problems = log.entries(tmp_path)
    assert [(one.ended[14:16], one.variant, one.kind) for one in entries] == [
        ("03", "b", "quality"),
        ("02", "a", "latency"),
        ("01", "a", "quality"),
    ]
    assert entries[0].location == f"experiments/b/{path.name}"
    assert entries[0].commit == quality["provenance"]["git"]["commit"][:10]
    assert problems == ()


def test_a_variant_that_lost_is_in_the_log_as_such(keep, tmp_path, quality):
    keep("a", scored(quality), answers(300), 1)
    keep("b", scored(quality), answers(100), 2)
    keep("b", scored(quality), answers(299), 3)
    keep("b", scored(quality), answers(290), 4)
    found = findings(tmp_path, "b")
    assert [finding.partition(":")[0] for finding in found] == ["inconclusive", "pass", "fail"]
    assert "facts gains -0.500 [" in found[-1]
    assert "where -0.04 is allowed" in found[-1]
    assert found[-1].endswith("of a")


def test_without_a_baseline_that_fits_the_figures_stand_alone(keep, tmp_path, quality, latency):
    keep("a", scored(quality), answers(300), 1)
    keep("b", scored(quality, limit=7), answers(300), 2)
    keep("b", latency, times(100.0), 3)
    latest, own = findings(tmp_path, "b")
    assert own == "facts 0.500 ± 0.200"
    assert latest == "E2EL, ms: short 250 ± 12"


def test_latency_is_told_as_a_ratio_to_the_run_that_took_turns_with_it(keep, tmp_path, latency):
    keep("a", latency | {"run": "2026-01-01T00:00:01Z"}, times(100.0), 1)
    keep("a", latency | {"run": "2026-01-01T00:00:02Z"}, times(400.0), 2)
    keep("b", latency | {"run": "2026-01-01T00:00:01Z"}, times(200.0), 3)
    (finding,) = findings(tmp_path, "b")
    assert "short 0.51x [0.5" in finding


def test_acceptance_is_told_as_a_share(keep, tmp_path):
    def drafted(accepted):
        items = [
            {"depth": 2, "class": name, "temperature": 0.0, "group": group, "drafts": 10,
             "accepted_per_position": [count, count], "output_tokens": 30, "seconds": 1.0}
            for name, count in (("long", accepted - 2), ("short", accepted + 2)) for group in range(3)
        ]  # fmt: skip
        return example("acceptance") | {
            "depths": [row.as_json() for row in acceptance.summarise(items)]
        }, items

    keep("a", *drafted(8), 1)
    keep("b", *drafted(7), 2)
    mine, baseline = findings(tmp_path)
    assert mine == "fail: acceptance length 2.400 at K = 2, 92.3% [91.4%, 93.0%], of a"
    assert baseline.startswith("acceptance length: K = 2 2.600")


def test_a_gate_names_the_check_that_fails(keep, tmp_path, quality):
    evidence = keep("b", scored(quality), answers(300), 1)
    verdicts = dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass")
    gate = {
        "schema": "gate/1", "baseline": "a", "plan": "example", "records": [f"b/{evidence.name}"],
        "provenance": quality["provenance"],
    }  # fmt: skip
    item = {"gate": "quality", "figure": "facts", "value": -0.1, "low": -0.2, "high": -0.05, "limit": -0.04}
    keep(
        "b",
        gate | {"verdict": "fail", "verdicts": verdicts | {"quality": "fail"}},
        [item | {"verdict": "fail"}],
        2,
    )
    keep("b", gate | {"verdict": "pass", "verdicts": verdicts}, [item | {"verdict": "pass"}], 3)
    passed, failed = findings(tmp_path)[:2]
    assert passed == "pass: fidelity, acceptance, quality, engine, of a"
    assert failed == "fail: quality fail (facts -0.1 [-0.200, -0.050], limit -0.04), of a"


def test_only_so_many_lines_as_are_asked_for(keep, tmp_path, quality):
    for minute in range(5):
        keep("a", scored(quality), answers(300), minute)
    assert [entry.ended[14:16] for entry in log.entries(tmp_path, last=2)[0]] == ["04", "03"]
    assert len(log.entries(tmp_path)[0]) == 5


def test_damage_takes_one_line_and_not_the_log(keep, tmp_path, quality):
    keep("a", scored(quality), answers(300), 1)
    damaged = keep("b", scored(quality), answers(300), 2)
    unreadable = keep("b", scored(quality), answers(300), 3)
    damaged.with_suffix(".items.jsonl").write_text("")
    unreadable.write_text("{")
    entries, problems = log.entries(tmp_path)
    assert [entry.kind for entry in entries] == ["quality", "quality"]
    assert "not the items that" in entries[0].finding
    assert [problem.location for problem in problems] == [f"experiments/b/{unreadable.name}"]


def test_an_unknown_variant_is_an_error_and_a_new_repository_has_an_empty_log(keep, tmp_path):
    assert log.entries(tmp_path) == ([], ())
    with pytest.raises(ConfigError):
        log.entries(tmp_path, variant="c")
