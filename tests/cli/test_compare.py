"""`slimqwen compare` without two names: the baseline is known, or the question is what to serve here."""

import re

import pytest

from slimqwen.records import provenance
from slimqwen.report import choice
from slimqwen.report.choice import Choice


@pytest.fixture
def compare(run_here):
    def run(*names):
        code, out, err = run_here("compare", *names)
        assert code == 0, err
        return re.sub(r"\s+", " ", out + err)

    return run


def test_one_name_is_compared_with_its_baseline(compare):
    assert compare("tiny-best") == compare("tiny", "tiny-best")


def test_no_name_says_what_to_serve_on_this_machine_and_where_else_was_measured(compare, monkeypatch):
    here = provenance.hardware_name(provenance.hardware())
    choices = [Choice("tiny", machine, True, None, None) for machine in (here, "1 NVIDIA A10G")]
    monkeypatch.setattr(choice, "collect_choices", lambda root: choices)
    said = compare()
    assert f"Serve tiny on {here}" in said
    assert "Serve tiny on 1 NVIDIA A10G" not in said
    assert "Measured on other machines: 1 NVIDIA A10G;" in said
    # Of those whose checkpoint a clone has.
    assert "Not judged yet: tiny-mtp4; `slimqwen gate tiny-mtp4`" in said


def test_a_result_of_another_tool_stands_beside_the_records_without_a_ratio(compare):
    said = compare("tiny-best", "--with", "tests/bench/external_results/guidellm.json")
    assert "tiny and tiny-best beside guidellm.json" in said
    assert "GuideLLM 0.8" in said
    assert "tiny-best, class" in said
    assert "Not comparable, GuideLLM" in said
    assert "its own seed 20260101" in said
    assert "No ratio and no interval" in said


def test_a_result_of_another_tool_stands_alone(run_here):
    code, _, err = run_here("compare", "tiny-best", "--with", "README.md")
    assert (code, err.count("\n")) == (2, 1)
    assert "is no JSON file" in err
    code, _, err = run_here("compare", "tiny-best", "--items", "--with", "README.md")
    assert "give --items or --with, not both" in err
    code, _, err = run_here("compare", "--with", "README.md")
    assert "--with is for a comparison; name one variant, or two" in err


def test_a_machine_without_measurements_is_told_how_to_make_them(compare, monkeypatch):
    monkeypatch.setattr(choice, "collect_choices", lambda root: [])
    said = compare()
    assert "Nothing was measured on" in said
    assert "other machines" not in said
