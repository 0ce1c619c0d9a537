"""Sensitivities: which changes a base allows, what each costs alone, and that nothing is measured twice."""

import json
from pathlib import Path

import pytest

from slimqwen import host, variant
from slimqwen.checkpoint.files import carry_all
from slimqwen.progress import silent
from slimqwen.recipe.sampled_outputs import OUTPUTS
from slimqwen.search import SearchError, sensitivities
from slimqwen.search.sensitivities import (
    Change,
    Sensitivities,
    change_drafts,
    list_changes,
    measure_sensitivities,
    round_kinds,
)
from tests.checkpoints import TINY
from tests.search.in_process import InProcess

FOUR = Change("mlp", "W4A16", 32)


def labels(changes: list[Change]) -> set[str]:
    return {each.label for each in changes}


def test_a_host_s_kernels_decide_which_widths_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "detect", lambda: "cpu")
    weights, drafts = list_changes(variant.load("tiny"))
    assert {"mlp W8A16", "mlp W4A16 in groups of 32", "head_bits 4 in groups of 32"} <= labels(weights)
    assert not any("W3A16" in label for label in labels(weights))
    assert {"mtp W8A16", "draft_vocabulary 0.25", "draft_bits 8"} <= labels(drafts)
    monkeypatch.setattr(host, "detect", lambda: "cuda")
    assert "mlp W3A16 in groups of 32" in labels(list_changes(variant.load("tiny"))[0])


def test_each_change_of_the_drafts_takes_its_own_share() -> None:
    narrow, few = Change("mtp", "W8A16"), Change("draft_vocabulary", 0.5)
    costs = Sensitivities({}, {narrow: [0.8, 0.4], few: [0.4, 0.5]}, [0.8, 0.5])
    assert costs.rates_with([]) == [0.8, 0.5]
    assert costs.rates_with([narrow, few]) == pytest.approx([0.4, 0.4])


@pytest.fixture
def with_outputs(tmp_path: Path) -> Path:
    """A repository with tiny beside outputs that are its own as little as any text."""
    folder = tmp_path / "weights" / "store" / "outputs"
    folder.mkdir(parents=True)
    (tmp_path / ".cache" / "search").mkdir(parents=True)
    carry_all(TINY, folder)
    ids = [(7 * number) % 1500 + 300 for number in range(4000)]
    rows = [
        {"prompt": ids[30 * n : 30 * n + 6], "continuation": ids[30 * n + 6 : 30 * n + 30], "held_out": n < 3}
        for n in range(9)
    ]
    (folder / OUTPUTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_fewer_bits_cost_more_and_no_change_costs_nothing(with_outputs: Path) -> None:
    eight, head = Change("mlp", "W8A16"), Change("head_bits", 4, 32)
    costs = round_kinds(with_outputs, ("weights/store/outputs", [eight, FOUR, head]), silent)
    assert 0 < costs[0] < costs[1]
    assert costs[2] > costs[0]


def test_drafts_are_changed_one_at_a_time(with_outputs: Path) -> None:
    changes = [Change("draft_vocabulary", 0.125), Change("mtp", "W8A16"), Change("draft_bits", 8)]
    argument = ("weights/store/outputs", changes)
    rates = change_drafts(with_outputs, argument, silent)
    assert len(rates) == 4
    assert all(0 <= rate <= 1 and row == sorted(row, reverse=True) for row in rates for rate in row)
    # The same model again after every change: nothing of one is left for the next.
    assert change_drafts(with_outputs, (argument[0], changes[::-1]), silent)[1:] == rates[:0:-1]


def test_what_was_measured_is_kept(with_outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivities, "list_changes", lambda _: ([FOUR], []))
    monkeypatch.setattr(sensitivities, "sample_outputs", lambda *_: "weights/store/outputs")
    base, folder = variant.load("tiny"), with_outputs / ".cache" / "search" / "tiny"
    titles = []
    for _ in range(2):
        executor = InProcess(with_outputs)
        found = measure_sensitivities(base, {}, None, executor, folder)
        assert found.kl_nats[FOUR] > 0
        titles.append([task.title for task in executor.ran])
    assert titles == [["outputs of the base", "what rounding costs"], ["outputs of the base"]]


def test_a_measurement_that_dies_says_which(with_outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = InProcess(with_outputs)
    executor.broken = "outputs of the base"
    with pytest.raises(SearchError, match=r"outputs of the base: its process died \(SIGSEGV\)"):
        measure_sensitivities(variant.load("tiny"), {}, None, executor, with_outputs / ".cache")
