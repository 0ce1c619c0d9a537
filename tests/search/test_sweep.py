"""Sweeps: what they submit, what they write, and what becomes of a failure or an interruption."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.checkpoint.files import bytes_on_disk
from slimqwen.evals.quality import Quality
from slimqwen.host_load import HostBusyError
from slimqwen.records import store
from slimqwen.search import SearchError, measurements
from slimqwen.search.executors import Failure, LocalExecutor, Outcome, Result, Task
from slimqwen.search.measurements import Measurement, next_stage
from slimqwen.search.sweep import SETUP, sweep
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant
from tests import record_files
from tests.search.in_process import InProcess
from tests.search.stand_in import ITEMS, OPTIONS, contents, score

ROOT = Path(__file__).parents[2]

AddRecipe = Callable[..., Variant]


class Nodes(InProcess):
    """An executor whose parts of a suite have canned answers, and whose stages leave nothing."""

    def outcome(self, task: Task) -> Outcome:
        if not isinstance(task.argument, Measurement):
            return Result(task.key, None)
        return Result(task.key, score(self.root, task.argument))


class LastFirst(Nodes):
    def take(self) -> Task:
        return self.waiting.pop()


@pytest.fixture
def add_recipe(repository: Path, add_variant: Callable[..., Path]) -> AddRecipe:
    """Add a variant of base with a recipe of these stages."""

    def add(name: str, *stages: str) -> Variant:
        config = add_variant(name, f"BASE=base\nVLLM_MODEL=weights/{name}\n", baseline="base")
        steps = "".join(f"  - {stage}\n" for stage in stages)
        (config.parent / "recipe.yaml").write_text(f"description: d\nbase: base\nstages:\n{steps}")
        return variant.load(name, repository)

    return add


def run(stage: Task | None, root: Path) -> None:
    assert stage is not None
    with LocalExecutor(root) as executor:
        executor.submit(stage)
        assert isinstance(executor.wait(), Result)


def test_parts_make_the_record_whatever_order_they_come_in(repository: Path) -> None:
    executor = Nodes(repository)
    results = sweep(["a", "b"], OPTIONS, executor, repository)
    assert [(each.variant, each.failure, len(each.records["quality"])) for each in results] == [
        ("a", None, 2),
        ("b", None, 2),
    ]
    asked = sorted(task.title for task in executor.ran)
    # The baseline of two variants is asked once.
    assert asked == sorted(f"quality {n}/3 of {name}" for n in (1, 2, 3) for name in ("a", "b", "base"))
    assert not any(task.resources.whole_node for task in executor.ran)  # nothing is timed
    path = results[0].records["quality"][1]
    assert store.read_record(path, Quality).tasks["facts"].item_count == ITEMS
    assert [row["index"] for row in store.read_items(path)] == [*range(ITEMS), *range(ITEMS)]
    first = contents(repository)
    for each in repository.glob("experiments/*/quality_*"):
        each.unlink()
    sweep(["b", "a"], OPTIONS, LastFirst(repository), repository)
    assert contents(repository) == first
    assert not list((repository / ".cache" / "sweep").glob("*"))


def test_an_interrupted_sweep_goes_on_and_measures_nothing_twice(repository: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        sweep(["a", "b"], OPTIONS, Nodes(repository, interrupt_after=7), repository)
    assert {name: len(found) for name, found in contents(repository).items()} == {"a": 1, "base": 1}
    executor = Nodes(repository)
    results = sweep(["a", "b"], OPTIONS, executor, repository)
    assert [task.title for task in executor.ran] == ["quality 2/3 of b", "quality 3/3 of b"]
    assert {name: len(found) for name, found in contents(repository).items()} == {"a": 1, "b": 1, "base": 1}
    assert results[0].records["quality"][0] == results[1].records["quality"][0]
    assert list(results[0].reused) == results[0].records["quality"]
    assert list(results[1].reused) == results[1].records["quality"][:1]


def test_a_record_that_still_holds_is_not_measured_again(repository: Path) -> None:
    (first,) = sweep(["a"], OPTIONS, Nodes(repository), repository)
    again = Nodes(repository)
    (second,) = sweep(["a"], replace(OPTIONS, parts=1), again, repository)
    assert again.ran == []
    assert (second.records, list(second.reused)) == (first.records, first.records["quality"])
    other = Nodes(repository)
    sweep(["a"], replace(OPTIONS, limit=ITEMS - 1, records="elsewhere"), other, repository)
    assert len(other.ran) == 2 * OPTIONS.parts


def test_a_variant_that_fails_says_why_and_the_others_go_on(repository: Path) -> None:
    executor = Nodes(repository)
    executor.broken = "quality 2/3 of a"
    failed, fine = sweep(["a", "b"], OPTIONS, executor, repository)
    assert (failed.failure, failed.failures.keys(), failed.records) == (
        "its process died (SIGSEGV)",
        {"quality"},
        {},
    )
    assert (fine.failure, len(fine.records["quality"])) == (None, 2)
    again = Nodes(repository)
    results = sweep(["a", "b"], OPTIONS, again, repository)
    assert [task.title for task in again.ran] == ["quality 2/3 of a"]
    assert [each.failure for each in results] == [None, None]


def test_beside_a_measurement_that_failed_another_is_recorded(repository: Path) -> None:
    workloads = repository / "eval" / "workloads"
    workloads.mkdir()
    (workloads / "classes.yaml").write_text((ROOT / "eval" / "workloads" / "classes.yaml").read_text())
    executor = Nodes(repository)
    executor.broken = "latency of a"
    (result,) = sweep(["a"], replace(OPTIONS, measures=("quality", "latency")), executor, repository)
    assert (result.failures.keys(), result.failure) == ({"latency"}, "its process died (SIGSEGV)")
    assert result.records.keys() == {"quality"}
    # It is timed alone, at the end, beside its baseline.
    timing = executor.ran[-1]
    assert (timing.argument.sides, timing.resources.whole_node) == (("base", "a"), True)


def test_a_failure_keeps_the_error_that_was_raised(repository: Path) -> None:
    class Busy(Nodes):
        def outcome(self, task: Task) -> Outcome:
            error = HostBusyError("round 1: host too busy")
            return Failure(task.key, str(error), error)

    (result,) = sweep(["a"], OPTIONS, Busy(repository), repository)
    assert isinstance(result.failures["quality"].error, HostBusyError)


def test_parts_of_another_kind_of_hardware_are_refused(repository: Path) -> None:
    class Mixed(Nodes):
        def outcome(self, task: Task) -> Outcome:
            outcome = super().outcome(task)
            assert isinstance(outcome, Result)
            if task.title == "quality 2/3 of a":
                outcome.value["block"]["hardware"]["cpu_model"] = "another"
            return outcome

    (result,) = sweep(["a"], OPTIONS, Mixed(repository), repository)
    assert result.failure is not None
    assert "a: parts of one measurement differ in hardware" in result.failure
    assert contents(repository).keys() == {"base"}


def test_a_baseline_alone_is_refused(repository: Path) -> None:
    with pytest.raises(SearchError, match="base has no baseline"):
        sweep(["base"], OPTIONS, Nodes(repository), repository)


def test_a_missing_stage_is_a_task_by_its_content_key(repository: Path, add_recipe: AddRecipe) -> None:
    c, d = (add_recipe(name, "quantise_lm_head: {group_size: 32}") for name in ("c", "d"))
    stage, same = next_stage(c), next_stage(d)
    assert stage is not None
    assert same is not None
    assert stage.key == same.key
    assert (stage.urgent, stage.resources.whole_node) == (True, False)
    assert stage.resources.memory_bytes > 1 << 28
    run(stage, repository)
    assert next_stage(c) is None
    # The other one shares the stage and lacks a link alone.
    run(next_stage(d), repository)
    assert next_stage(d) is None
    links = [(repository / "weights" / name).resolve() for name in ("c", "d")]
    assert links[0] == links[1]


def test_a_variant_is_measured_when_its_last_stage_is_made(repository: Path, add_recipe: AddRecipe) -> None:
    """A compile cache fits only as many threads as its stage had, so that one runs alone."""
    subject = add_recipe("c", "quantise_lm_head: {group_size: 32}", "bake_cache: {}")
    run(next_stage(subject), repository)
    stage = next_stage(subject)
    assert stage is not None
    assert (stage.title, stage.resources.whole_node) == ("bake_cache of c", True)

    class NoCompiler(Nodes):
        def outcome(self, task: Task) -> Outcome:
            if task.title.startswith("bake_cache"):
                return Failure(task.key, "no compiler")
            return super().outcome(task)

    executor = NoCompiler(repository)
    (result,) = sweep(["c"], OPTIONS, executor, repository)
    assert (result.failure, result.failures.keys()) == ("no compiler", {SETUP})
    # The stage was submitted first; the baseline is asked beside it.
    assert [task.title for task in executor.ran] == [
        "bake_cache of c", *(f"quality {n}/3 of base" for n in (1, 2, 3)),
    ]  # fmt: skip


def test_a_stage_that_leaves_nothing_ends_the_variant(repository: Path, add_recipe: AddRecipe) -> None:
    add_recipe("c", "quantise_lm_head: {}")
    (result,) = sweep(["c"], OPTIONS, Nodes(repository), repository)
    assert result.failure is not None
    assert "quantise_lm_head of c ended and left nothing" in result.failure


def test_a_variant_on_several_gpus_asks_for_as_many(
    repository: Path, add_variant: Callable[..., Path]
) -> None:
    add_variant("wide", "BASE=base\nPLATFORM=cuda\nVLLM_TENSOR_PARALLEL_SIZE=2\n", baseline="base")
    server = ServerCommand.resolve(variant.load("wide", repository), platform="cuda")
    base = variant.load("base", repository)
    needs = measurements.estimate_resources([server], base, alone=False)
    assert (needs.gpus, needs.whole_node) == (2, False)
    alone = measurements.estimate_resources([server], None, alone=True)
    assert alone.whole_node
    size = bytes_on_disk(base.weights)
    assert needs.memory_bytes - alone.memory_bytes == 2 * size
    assert alone.memory_bytes >= (3 << 30) + size


@pytest.mark.parametrize("name", ["fidelity", "acceptance", "engine", "latency"])
def test_a_measurement_comes_back_as_it_was_and_the_task_records_nothing(
    repository: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked: dict[str, Any] = {}

    def write(folder: Path, subject: Variant) -> Path:
        return record_files.write(
            folder, record_files.example("acceptance", variant=subject.name), [{"depth": 4}]
        )

    def measure(subject: Any, *words: Any, records_folder: Path, **options: Any) -> Path:
        asked.update(options, words=words)
        return write(records_folder, subject)

    def time(subjects: Any, *_: Any, records_folders: list[Path], **options: Any) -> list[Path]:
        asked.update(options)
        return [write(folder, one) for folder, one in zip(records_folders, subjects, strict=True)]

    monkeypatch.setattr(measurements.fidelity, "measure_fidelity", measure)
    monkeypatch.setattr(measurements.acceptance, "measure_acceptance", measure)
    monkeypatch.setattr(measurements.engine, "measure_engine", measure)
    monkeypatch.setattr(measurements.latency, "measure_latency", time)
    (repository / "eval" / "gates").symlink_to(ROOT / "eval" / "gates")
    (repository / "eval" / "workloads").symlink_to(ROOT / "eval" / "workloads")
    sides, settings = (("base", "a"), "classes") if name == "latency" else (("a",), "tinyworld")
    depth = 4 if name == "acceptance" else None
    what = Measurement(name, sides, settings, None, replace(OPTIONS, rounds=2), depth=depth)
    returned = measurements.measure_record(repository, what, lambda *_: None)
    assert [each["variant"] for each in returned] == list(sides)
    assert json.loads(json.dumps(returned)) == returned
    assert returned[0]["items"] == [{"depth": 4}]
    assert not list(repository.glob("experiments/*/acceptance_*"))
    assert asked["command"] == OPTIONS.command
    if name == "latency":
        assert asked["rounds"] == 2
    elif name == "acceptance":
        assert (asked["words"], asked["greedy_only"]) == (("tinyworld", [4]), True)
        assert asked["gate_depth"] == 4
    else:
        assert asked["words"] == ("tinyworld",)
