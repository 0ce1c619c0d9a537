"""Cold and baked starts in turns; the starts themselves are those of `launch.serving`, tested with the stage."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from slimqwen.evaluation import start_up
from slimqwen.serving.baked_cache import BakedCacheError, Graph


@pytest.fixture
def starts(monkeypatch):
    """Starts that take the seconds asked for and say how they came by their graph."""
    made = []

    def make(cold_loads=False, baked_loads=True):
        def start(command, log: Path, kept: Path):
            made.append(command)
            loads = cold_loads if command == "cold" else baked_loads
            return (90.0 if command == "cold" else 30.0) + len(made), [Graph("backbone", loads, 1.0, "")]

        monkeypatch.setattr(start_up, "_start", start)
        return SimpleNamespace(with_cache_root=lambda root: "cold"), made

    return make


def test_starts_take_turns_in_another_order_every_round(starts, tmp_path):
    command, made = starts()
    found = start_up.cold_against_baked(command, 3, tmp_path / "logs" / "log")
    assert ["cold" if each == "cold" else "baked" for each in made] == [
        *("cold", "baked"),
        *("baked", "cold"),
        *("cold", "baked"),
    ]
    assert [start["ready_seconds"] for start in found["cold"]] == [91.0, 94.0, 95.0]
    assert [start["ready_seconds"] for start in found["baked"]] == [32.0, 33.0, 36.0]
    assert found["ready_cold_over_baked"]["value"] == pytest.approx(94 / 33)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ({"baked_loads": False}, "a baked start is none: backbone compiled"),
        ({"cold_loads": True}, "a cold start is none: backbone loaded"),
    ],
)
def test_a_start_that_is_not_what_it_is_called_is_no_measurement(starts, tmp_path, kinds, said):
    command, _ = starts(**kinds)
    with pytest.raises(BakedCacheError, match=said):
        start_up.cold_against_baked(command, 2, tmp_path / "log")
