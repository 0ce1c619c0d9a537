"""The driver of a sweep: what it submits, what it writes, and what becomes of a failure or an interruption."""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.checkpoint.files import bytes_on_disk
from slimqwen.evals import EvalError, quality
from slimqwen.evals.quality import Quality, ScoredPart
from slimqwen.evals.suites.suite import Suite
from slimqwen.recipe import variant_recipe
from slimqwen.records import store
from slimqwen.search import SearchError
from slimqwen.search.executors import Failure, LocalExecutor, Outcome, Result, Task
from slimqwen.search.executors.process import affinity
from slimqwen.search.sweep import required_tasks, tasks
from slimqwen.search.sweep.driver import sweep
from slimqwen.serving import platform
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant
from tests import record_files
from tests.search.in_process import InProcess
from tests.search.sweep import stand_in
from tests.search.sweep.stand_in import ITEMS, OPTIONS, answers, contents

ROOT = Path(__file__).parents[3]

AddRecipe = Callable[..., Variant]


class Nodes(InProcess):
    """An executor whose parts of a suite have canned answers, and whose stages leave nothing."""

    def outcome(self, task: Task) -> Outcome:
        if task.title.startswith("bake_cache"):
            return Failure(task.key, "no compiler")
        return Result(task.key, answers(self.root, task.argument))


class LastFirst(Nodes):
    def take(self) -> Task:
        return self.waiting.pop()


@pytest.fixture
def add_recipe(repository: Path, add_variant: Callable[..., Path]) -> AddRecipe:
    """Add a variant of base with a recipe of these stages, and further lines of config.env."""

    def add(name: str, *stages: str, lines: str = "") -> Variant:
        config = add_variant(name, f"BASE=base\nVLLM_MODEL=weights/{name}\n{lines}", baseline="base")
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
    assert [(each.variant, each.failure, len(each.records)) for each in results] == [
        ("a", None, 2),
        ("b", None, 2),
    ]
    asked = sorted(task.argument["variants"] for task in executor.ran)
    assert asked == [["a"]] * 3 + [["b"]] * 3 + [["base"]] * 3  # the baseline of two variants is asked once
    assert not any(task.resources.whole_node for task in executor.ran)  # nothing is timed
    record = store.read_record(results[0].records[1], Quality)
    assert record.tasks["facts"].item_count == ITEMS
    assert [row["index"] for row in store.read_items(results[0].records[1])] == [*range(ITEMS), *range(ITEMS)]
    first = contents(repository)
    for path in repository.glob("experiments/*/quality_*"):
        path.unlink()
    sweep(["b", "a"], OPTIONS, LastFirst(repository), repository)
    assert contents(repository) == first
    assert not list((repository / ".cache" / "sweep").glob("*"))


def test_an_interrupted_sweep_goes_on_and_writes_nothing_twice(repository: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        sweep(["a", "b"], OPTIONS, Nodes(repository, interrupt_after=7), repository)
    assert {name: len(found) for name, found in contents(repository).items()} == {"a": 1, "base": 1}
    executor = Nodes(repository)
    results = sweep(["a", "b"], OPTIONS, executor, repository)
    assert [task.title for task in executor.ran] == ["quality 2/3 of b", "quality 3/3 of b"]
    assert {name: len(found) for name, found in contents(repository).items()} == {"a": 1, "b": 1, "base": 1}
    assert results[0].records[0] == results[1].records[0]
    assert [len(each.records) for each in results] == [2, 2]
    assert [title for title in results[1].earlier if title.endswith("of b")] == ["quality 1/3 of b"]


def test_a_variant_that_fails_says_why_and_the_others_go_on(repository: Path) -> None:
    executor = Nodes(repository)
    executor.broken = "quality 2/3 of a"
    failed, fine = sweep(["a", "b"], OPTIONS, executor, repository)
    assert (failed.failure, failed.records) == ("its process died (SIGSEGV)", [])
    assert (fine.failure, len(fine.records)) == (None, 2)
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
    assert [store.read_record(path).kind for path in result.records] == ["quality", "quality"]


def test_parts_of_another_kind_of_hardware_are_refused(repository: Path) -> None:
    suite = Suite.load("small", repository)
    side = variant.load("a", repository)
    values = []
    for number in range(2):
        needed = required_tasks.checks(side, (variant.load("base", repository), side), OPTIONS)
        task = needed.tasks["quality"][number]
        values.append(ScoredPart.from_json(answers(repository, task.argument)["a"]))
    other = values[1].block.hardware.model_copy(update={"cpu_model": "another"})
    mixed = [values[0], ScoredPart(values[1].runs, values[1].block.model_copy(update={"hardware": other}))]
    with pytest.raises(EvalError, match="a: parts of one measurement differ in hardware"):
        quality.write_quality_record(side, suite, mixed, limit=ITEMS)
    assert not list(side.folder.glob("quality_*"))


def test_a_baseline_alone_is_refused(repository: Path) -> None:
    with pytest.raises(SearchError, match="base has no baseline"):
        sweep(["base"], OPTIONS, Nodes(repository), repository)


def test_a_missing_stage_is_a_task_by_its_content_key(repository: Path, add_recipe: AddRecipe) -> None:
    c, d = (add_recipe(name, "quantise_lm_head: {group_size: 32}") for name in ("c", "d"))
    stage = required_tasks.next_stage(c)
    assert stage.key == required_tasks.next_stage(d).key
    assert stage.resources.memory_bytes > 1 << 28
    run(stage, repository)
    assert required_tasks.next_stage(c) is None
    # The other one shares the stage and lacks a link alone.
    run(required_tasks.next_stage(d), repository)
    assert required_tasks.next_stage(d) is None
    links = [(repository / "weights" / name).resolve() for name in ("c", "d")]
    assert links[0] == links[1]


def test_a_recipe_with_two_stages_of_one_name_is_made_to_its_end(
    repository: Path, add_recipe: AddRecipe
) -> None:
    corpus = "corpus: {path: tinyworld, documents: 100}"
    stages = [f"prune_vocab: {{size: {size}, {corpus}}}" for size in (7936, 7872)]
    subject = add_recipe("twice", *stages)
    for _ in stages:
        run(required_tasks.next_stage(subject), repository)
    assert required_tasks.next_stage(subject) is None


def test_a_stage_that_leaves_nothing_ends_the_variant(
    repository: Path, add_recipe: AddRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_recipe("c", "quantise_lm_head: {}")
    monkeypatch.setattr("tests.search.sweep.test_driver.answers", lambda *_: None)
    [result] = sweep(["c"], OPTIONS, Nodes(repository), repository)
    assert result.failure is not None
    assert "quantise_lm_head of c ended and left nothing" in result.failure


class BeforeTheCache(Nodes):
    """Nodes whose first part is asked before the checkpoint has its last file."""

    def outcome(self, task: Task) -> Outcome:
        outcome = super().outcome(task)
        if isinstance(outcome, Result) and len(self.ran) == 1:
            for side in outcome.value.values():
                side["provenance"]["checkpoint"]["size_bytes"] = 1
        return outcome


def test_a_record_has_the_checkpoint_with_a_cache_that_came_later(repository: Path) -> None:
    [result] = sweep(["a"], OPTIONS, BeforeTheCache(repository), repository)
    assert result.failure is None
    sizes = [store.read_record(path, Quality).provenance.checkpoint.size_bytes for path in result.records]
    assert sizes == [bytes_on_disk(repository / "weights" / "tiny")] * 2


class Shares(Nodes):
    """Nodes whose tasks have one CPU each; stages run, and the baseline is asked last."""

    def as_task(self) -> AbstractContextManager[None]:
        return affinity(sorted(os.sched_getaffinity(0))[:1])

    def take(self) -> Task:
        task = next((task for task in self.waiting if task.urgent), self.waiting[-1])
        self.waiting.remove(task)
        return task

    def outcome(self, task: Task) -> Outcome:
        is_stage = task.urgent and not task.title.startswith("bake_cache")
        return InProcess.outcome(self, task) if is_stage else super().outcome(task)


@pytest.mark.usefixtures("all_cpus")
@pytest.mark.parametrize("kind", [Shares, Nodes])
def test_a_variant_is_checked_while_a_cache_is_made_that_its_checks_cannot_use(
    repository: Path, add_recipe: AddRecipe, kind: type[Nodes]
) -> None:
    subject = add_recipe("c", "quantise_lm_head: {}", "bake_cache: {}", lines="VLLM_ENFORCE_EAGER=0\n")
    assert not required_tasks.answers_are_decided(subject)
    variant_recipe.run_recipe(subject, 1)
    assert required_tasks.answers_are_decided(subject)
    stage = required_tasks.next_stage(subject)
    assert stage is not None
    assert (stage.title, stage.resources.every_cpu, stage.urgent) == ("bake_cache of c", True, True)
    stand_in.describe_variants(["c"], repository)
    executor = kind(repository)
    sweep(["c"], OPTIONS, executor, repository)
    asked = {name for task in executor.ran if not task.urgent for name in task.argument["variants"]}
    # Where a task has every CPU, it would find the cache or not, depending on when it begins.
    assert asked == ({"base", "c"} if kind is Shares and platform.physical_cores() > 1 else {"base"})


def test_a_variant_on_several_gpus_asks_for_as_many(
    repository: Path, add_variant: Callable[..., Path]
) -> None:
    add_variant("wide", "BASE=base\nPLATFORM=cuda\nVLLM_TENSOR_PARALLEL_SIZE=2\n", baseline="base")
    server = ServerCommand.resolve(variant.load("wide", repository), platform="cuda")
    needs = required_tasks.resources([server], variant.load("base", repository), alone=False)
    assert (needs.gpus, needs.whole_node) == (2, False)
    assert needs.memory_bytes > 3 << 30
    assert required_tasks.resources([server], None, alone=True).whole_node


def test_a_measurement_comes_back_as_it_was_and_the_driver_records_it(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(subject: Any, *_: Any, records_folder: Path, **__: Any) -> Path:
        example = record_files.example("acceptance") | {"variant": subject.name}
        return record_files.write(records_folder, example, [{"depth": 4}])

    monkeypatch.setattr(tasks.acceptance, "measure_acceptance", measure)
    monkeypatch.setattr(
        tasks,
        "AcceptanceSettings",
        type("", (), {"load": staticmethod(lambda *_: type("", (), {"gate_depth": 4}))}),
    )
    argument = {"variants": ["base", "a"], "settings_name": "small", "split": None, "command": ["x"]}
    returned = tasks.check_acceptance(repository, argument, lambda *_: None)
    assert [each["variant"] for each in returned] == ["base", "a"]
    assert json.loads(json.dumps(returned)) == returned
    assert returned[0]["items"] == [{"depth": 4}]
    assert not list(repository.glob("experiments/*/acceptance_*"))
