"""The driver of a search: which candidates it makes, what ends them, and the record that it writes."""

from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.checkpoint.files import carry_all
from slimqwen.progress import Progress
from slimqwen.records import store
from slimqwen.search import driver, measurements
from slimqwen.search.record import Search
from slimqwen.search.sensitivities import Change, Sensitivities
from tests.checkpoints import TINY
from tests.evals.gate_checks import Checks
from tests.search.in_process import InProcess

RATES = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
COSTS = Sensitivities(
    {
        Change("mlp", "W4A16", 32): 0.0012,
        Change("mlp", "W8A16"): 0.0002,
        Change("attention", "W4A16", 32): 0.0009,
        Change("linear_attention", "W4A16", 32): 0.0011,
    },
    {Change("mtp", "W4A16", 32): RATES},
    RATES,
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, checks: Checks) -> list[str]:
    """The variants whose recipes ran, as copies of tiny; sensitivities are `COSTS`."""
    names: list[str] = []

    def run(root: Path, argument: tuple[str, int | None], _: Progress) -> None:
        if not (root / "weights" / argument[0]).exists():
            names.append(argument[0])
            carry_all(TINY, root / "weights" / argument[0])

    monkeypatch.setattr(measurements, "run_stages", run)
    monkeypatch.setattr(driver, "measure_sensitivities", lambda *_: COSTS)
    # A copy has not the changes of its recipe.
    for name in ("unexplained_changes", "unexplained_settings", "unexplained_files"):
        monkeypatch.setattr(f"slimqwen.recipe.variant_recipe.{name}", lambda _: [])
    return names


def search(root: Path, executor: InProcess | None = None, **options: Any) -> Search:
    path = driver.search_variants(
        variant.load("tiny", root),
        "a10g",
        "tinyworld",
        executor or InProcess(root),
        command=["slimqwen", "search", "--base", "tiny", "--gpu", "a10g"],
        corpus="tinyworld",
        **{"candidates": 3, **options},
    )
    assert path.parent == root / "experiments" / "tiny"
    record = store.read_record(path, Search)
    path.unlink()  # a second run may end within the same second
    return record


def test_the_fastest_that_passes_all_checks_is_proven_alone(root: Path, made: list[str]) -> None:
    record = search(root)
    assert made == [trial.name for trial in record.trials]
    fastest = max(record.trials, key=lambda trial: trial.tokens_per_second or 0)
    assert record.winner == fastest.name
    assert record.proof is not None
    assert [each.variant for each in record.proof.finalists] == [fastest.name]
    assert record.advice.startswith(f"Serve {fastest.name}: it passed every check")
    assert record.incumbent.variant == "tiny"
    assert {each.change for each in record.sensitivities} == {
        each.label for each in (*COSTS.kl_nats, *COSTS.rates)
    }


def test_only_the_fastest_climbs_the_checks_that_take_long(
    root: Path, made: list[str], checks: Checks
) -> None:
    record = search(root)
    asked = {
        check: [name for kind, name in checks.asked if kind == check] for check in ("fidelity", "quality")
    }
    assert sorted(set(asked["fidelity"])) == sorted(trial.name for trial in record.trials)
    assert set(asked["quality"]) == {"tiny", record.winner}


def test_what_fails_on_the_search_s_items_makes_room_for_the_next(
    root: Path, made: list[str], checks: Checks
) -> None:
    first = search(root)
    checks.wrong = {(str(first.winner), "search"): 200}
    for path in (root / "experiments" / str(first.winner)).glob("*_20*"):
        path.unlink()
    second = search(root)
    assert second.winner not in (None, first.winner)
    [ended] = [trial for trial in second.trials if trial.name == first.winner]
    assert ended.reason.startswith("quality: ")


def test_divergence_beside_its_forecast_moves_the_limit_for_later_candidates(
    root: Path, made: list[str], checks: Checks
) -> None:
    checks.kl_nats = 0.0001
    *early, late = search(root).trials
    assert max(trial.forecast_kl_nats or 0 for trial in early) <= 0.003
    assert (late.forecast_kl_nats or 0) > 0.003


def test_a_crash_ends_a_candidate_and_not_the_search(root: Path, made: list[str]) -> None:
    names = [trial.name for trial in search(root).trials]
    for path in (root / "experiments" / names[0]).glob("*_20*"):
        path.unlink()
    executor = InProcess(root)
    executor.broken = f"fidelity of {names[0]}"
    record = search(root, executor)
    assert record.trials[0].reason == "its process died (SIGSEGV)"
    assert record.trials[0].tokens_per_second is None
    assert record.winner in names[1:]


def test_a_second_run_makes_and_measures_nothing(root: Path, made: list[str], checks: Checks) -> None:
    first = search(root)
    made.clear()
    checks.asked.clear()
    second = search(root)
    assert (made, checks.asked) == ([], [])
    assert second.trials == first.trials


def test_an_interrupted_search_goes_on(root: Path, made: list[str], checks: Checks) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(root, InProcess(root, interrupt_after=4))
    known = list(checks.asked)
    record = search(root)
    assert record.winner is not None
    assert [each for each in known if checks.asked.count(each) > 1 and each[0] == "fidelity"] == []


def test_without_a_candidate_that_may_be_faster_nothing_is_made(
    root: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "measure_sensitivities", lambda *_: Sensitivities({}, {}, []))
    record = search(root)
    assert (made, record.trials, record.proof) == ([], (), None)
    assert record.advice.startswith("Serve tiny: no candidate of the front")


def test_texts_are_those_of_the_promoted_recipe() -> None:
    texts = driver._Texts.of(variant.load("tiny-best"), None)
    assert texts.stages["calibrate"]["corpus"]["path"] == "../../eval/texts/tinyworld.jsonl"
    assert texts.stages["sample_outputs"]["texts"] == 512
    assert driver._Texts.of(variant.load("tiny"), None).corpus == "self"
    assert driver._Texts.of(variant.load("tiny-best"), "general").corpus == "general"
    assert [each.name for each in driver._list_promoted(variant.load("tiny"))] == ["tiny-best"]
