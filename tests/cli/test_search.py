"""`slimqwen tune --apply`: the chosen settings become a variant, whose name is looked at before anything is timed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.records import store
from slimqwen.search import tune
from slimqwen.search.tune.arms import UNDRAFTED
from slimqwen.search.tune.contest import Contest
from slimqwen.variant.scaffold import ScaffoldError
from tests.cli.conftest import said_by
from tests.search.tune.turns import K2, record_of, turn

LINES = {
    "VLLM_SPECULATIVE_CONFIG": '\'{"method": "mtp", "num_speculative_tokens": 2}\'',
    "VLLM_MAX_NUM_SEQS": "4",
}


@pytest.fixture
def asked(
    add_variant: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What a tuning of the variant v was asked for; it ends with the arm `chosen` and its `lines`."""
    add_variant("v", "VLLM_MODEL=weights/v\n")
    monkeypatch.setattr(variant, "repository_root", lambda: tmp_path)
    monkeypatch.setattr(variant.variant, "repository_root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    seen: dict[str, Any] = {"chosen": "MTP K=2", "lines": LINES}

    def measure(one: variant.Variant, loads: Any, **options: Any) -> Path:
        seen.update(options, loads=loads)
        made = Contest((UNDRAFTED, K2), {})
        for number in range(3):
            made.add_turn(turn(UNDRAFTED, number, {1: 100}))
            made.add_turn(turn(K2, number, {1: 150}))
        return store.write_record(
            one.folder, record_of(made, seen["chosen"], seen["lines"]), [{"arm": "none"}]
        )

    monkeypatch.setattr(tune, "tune_variant", measure)
    return seen


def test_the_chosen_settings_become_a_variant(asked: dict[str, Any], tmp_path: Path) -> None:
    said = said_by("tune --variant v --load 1,4 --minutes 5 --temperature 0.7 --apply fast")
    assert (asked["loads"], asked["minutes"], asked["temperature"]) == ([1, 4], 5, 0.7)
    assert "Drafts pay: MTP K=2 is 1.50" in " ".join(said.split())
    assert "written: experiments/fast; next: `slimqwen gate --variant fast`" in said
    made = variant.load("fast", tmp_path)
    assert (made.lineage, made.baseline) == (("fast", "v"), "v")
    assert made.hypothesis == "v is faster with MTP K=2 and gives the same responses."
    assert made.settings["VLLM_SPECULATIVE_CONFIG"].value == '{"method": "mtp", "num_speculative_tokens": 2}'
    assert made.settings["VLLM_MAX_NUM_SEQS"].value == "4"


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ("MTP K=2", "the variant has these settings already"),
        (None, "the verdict is inconclusive"),
    ],
)
def test_without_lines_nothing_is_written(
    asked: dict[str, Any], tmp_path: Path, chosen: str | None, why: str
) -> None:
    asked.update(chosen=chosen, lines={})
    assert f"fast was not written: {why}" in said_by("tune --variant v --apply fast")
    assert asked["loads"] is None
    assert not (tmp_path / "experiments" / "fast").exists()


def test_a_taken_name_is_refused_before_anything_is_measured(asked: dict[str, Any]) -> None:
    with pytest.raises(ScaffoldError, match="experiments/v exists"):
        said_by("tune --variant v --apply v")
    assert "loads" not in asked
