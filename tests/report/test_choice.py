"""What to serve: one rule, by which every verb that says it names the same variant."""

import re
from types import SimpleNamespace

import pytest

from slimqwen import variant
from slimqwen.cli import compare, demo
from slimqwen.cli import variants as promoting
from slimqwen.records import provenance, store
from slimqwen.report import site
from slimqwen.report.choice import Case, decide, decide_here, put_own_first
from slimqwen.stats.verdict import Verdict
from tests import record_files
from tests.evals.gate_checks import link_settings

PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE


def test_choices_among_ones_own_variants_come_before_those_of_shipped_ones():
    choices = [SimpleNamespace(baseline=name) for name in ("shipped", "mine", "changed")]
    rows = [
        SimpleNamespace(variant="flags", baseline="changed"),
        SimpleNamespace(variant="x", baseline="shipped"),
    ]
    first = put_own_first(choices, rows, frozenset({"mine", "flags"}))
    assert [each.baseline for each in first] == ["mine", "changed", "shipped"]


@pytest.mark.parametrize(
    ("known", "serve", "reason", "is_final"),
    [
        ({}, "mine", "faster", True),
        ({"is_faster": False}, "base", "as good, but not surely faster", True),
        ({"is_faster": None}, "base", "not decided: mine is as good, but was not timed", False),
        ({"verdict": FAIL}, "base", "lost more", True),
        ({"verdict": FAIL, "is_faster": None, "unchecked": ["engine"]}, "base", "lost more", True),
        ({"verdict": INCONCLUSIVE}, "base", "not decided: `slimqwen gate --variant mine`", False),
        ({"verdict": None}, "base", "not decided: no verdict on its quality", False),
        ({"unchecked": ["fidelity", "engine"]}, "base", "not decided: no verdict on fidelity, engine", False),
        (
            {"doubts": ["its records are of another checkpoint"]},
            "base",
            "mine: its records are of another",
            True,
        ),
    ],
)
def test_a_variant_is_served_if_nothing_speaks_against_it(known, serve, reason, is_final):
    decision = decide(
        Case(**{"variant": "mine", "baseline": "base", "verdict": PASS, "is_faster": True} | known)
    )
    assert (decision.serve, decision.is_final) == (serve, is_final)
    assert reason in decision.reason


def change_fidelity(verdict):
    """An edit that gives a record of fidelity a verdict, as a whole and for each figure."""

    def change(record):
        record["verdict"] = verdict
        for figures in record["verdicts"].values():
            figures.update(dict.fromkeys(figures, verdict))

    return change


class Records:
    """The records of a variant, quick, and its baseline: quick passed its gate and is twice as fast."""

    def __init__(self, root, pair, add_record, claim):
        self.root, self.pair, self.add_record, self.claim = root, pair, add_record, claim
        self.factor, self.of_latency = 0.5, lambda record: None
        self.verdicts, self.claims = {}, {"status": "measured", "verdict": None}
        self.fidelity = change_fidelity("pass")

    def write(self):
        self.pair(factor=self.factor, edit=self.of_latency)
        self.claim("quick", **self.claims)
        for name in ("base", "quick"):
            self.add_record(name, "acceptance")
        self.add_record("quick", "fidelity", edit=self.fidelity)
        quality = self.find("quick", "quality")
        block = store.read_record(quality).provenance.as_json()
        verdicts = dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass") | self.verdicts
        joint = next((each for each in ("fail", "inconclusive") if each in verdicts.values()), "pass")
        gate = {
            "schema": "gate/1", "variant": "quick", "baseline": "base", "plan": "tinyworld", "verdict": joint,
            "verdicts": verdicts, "records": [f"quick/{quality.name}"], "provenance": block,
        }  # fmt: skip
        record_files.write(quality.parent, gate, [{"gate": "engine"}])

    def find(self, name, kind):
        (path,) = (self.root / "experiments" / name).glob(f"{kind}_*Z.json")
        return path

    @property
    def of_demo(self):
        both = {
            part: [self.find(name, kind) for name in ("base", "quick")]
            for part, kind in (("quality", "quality"), ("acceptance", "acceptance"), ("speed", "latency"))
        }
        return demo.DemoRecords(both | {"fidelity": [self.find("quick", "fidelity")]}, {})


DEMO = demo.DemoModel("base", "quick", recipe="", minutes="")


@pytest.fixture
def records(tmp_path, pair, add_record, claim, monkeypatch, templates):
    monkeypatch.setattr(variant, "repository_root", lambda: tmp_path)
    monkeypatch.setattr(variant.variant, "repository_root", lambda: tmp_path)
    link_settings(tmp_path)
    machine = templates["latency"][1].provenance.hardware
    monkeypatch.setattr(provenance, "hardware", lambda: machine)
    return Records(tmp_path, pair, add_record, claim)


STATES = {
    "all checks passed and faster": ({}, "quick"),
    "promoted": ({"claims": {"status": "promoted", "verdict": "pass"}}, "quick"),
    "slower": ({"factor": 1.5}, "base"),
    "perhaps faster": ({"factor": 0.999}, "base"),
    "the gate fails": ({"verdicts": {"quality": "fail"}}, "base"),
    "the engine answers wrongly": ({"verdicts": {"engine": "fail"}}, "base"),
    "the gate is inconclusive": ({"verdicts": {"fidelity": "inconclusive"}}, "base"),
    "a person rejected it": ({"claims": {"status": "rejected", "verdict": None}}, "base"),
    "fidelity fails after the gate": ({"fidelity": change_fidelity("fail")}, "base"),
    "promoted, but its gate fails": (
        {"claims": {"status": "promoted", "verdict": "pass"}, "verdicts": {"engine": "fail"}},
        "base",
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_page_demo_compare_promote_and_optimise_name_the_same_variant_to_serve(state, records, monkeypatch):
    changes, serve = STATES[state]
    for name, value in changes.items():
        setattr(records, name, value)
    records.write()
    said = []
    for verb in (compare, promoting):
        monkeypatch.setattr(verb, "say", said.append)
    compare._say_what_to_serve()
    promoting._say_what_to_serve(variant.load("quick"))
    page = site.build_page(records.root, records.root / "report").index.read_text()
    named = [re.search(r"^Serve (\w+) on", line)[1] for line in said if line.startswith("Serve ")]
    named += re.findall(r"<p>Serve (\w+) on", page)
    named += re.findall(r"slimqwen serve --variant (\w+):", [*demo._conclude(DEMO, records.of_demo)][-1])
    named += [decide_here(variant.load("quick")).serve]
    assert named == [serve] * 5


def test_the_demo_names_the_check_that_it_left_out(records):
    records.write()
    *_, engine, last = demo._conclude(DEMO, records.of_demo)
    assert re.match(r"  engine      pass, by .*gate_", engine)
    assert "not checked" not in last
    records.find("quick", "gate").unlink()
    assert [*demo._conclude(DEMO, records.of_demo)][-1].endswith(
        "(engine not checked: `slimqwen gate --variant quick`)"
    )
