"""Measurements as tasks: what they need, what they write, and that a record that holds is not measured again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimqwen import host, variant
from slimqwen.bench import latency
from slimqwen.bench.workload import Workload
from slimqwen.checkpoint.files import Manifest, bytes_on_disk
from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.processes import Failure, Result, run_tasks
from slimqwen.progress import silent
from slimqwen.records import store
from slimqwen.search import measurements
from slimqwen.search.measurements import Measured, RecordSettings, check_task, latency_task, recipe_task
from slimqwen.variant import Variant
from tests import record_files
from tests.evals.gate_checks import Checks
from tests.search.in_process import InProcess

DEMO = RecordSettings(("slimqwen", "demo"), "demo")


def test_a_check_leaves_its_record_in_the_folder_that_is_named_and_is_made_once(
    root: Path, checks: Checks
) -> None:
    tiny, small = variant.load("tiny", root), variant.load("small", root)
    checks_of_small = DEMO.load_checks(small)
    tasks = [
        check_task(checks_of_small["acceptance"], tiny, DEMO),
        check_task(checks_of_small["fidelity"], small, DEMO),
    ]
    assert not any(task.resources.whole_node for task in tasks)  # nothing is timed
    first = [task.function(root, task.argument, silent) for task in tasks]
    assert [each.reused for each in first] == [False, False]
    assert [path.parent.relative_to(root) for each in first for path in each.paths] == [
        Path("demo/tiny"), Path("demo/small"),
    ]  # fmt: skip
    checks.asked.clear()
    again = [task.function(root, task.argument, silent) for task in tasks]
    assert checks.asked == []
    assert again == [Measured(each.paths, reused=True) for each in first]


def test_sides_that_variants_share_have_one_task_for_each_depth(
    root: Path, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, small, third = (variant.load(name, root) for name in ("tiny", "small", "third"))

    def keys(check: str) -> set[str]:
        return {check_task(DEMO.load_checks(one)[check], tiny, DEMO).key for one in (small, third)}

    assert len(keys("acceptance")) == len(keys("quality")) == 1
    monkeypatch.setattr(AcceptanceSettings, "depth_of", lambda _, one: 2 if one.name == "third" else 4)
    assert (len(keys("acceptance")), len(keys("quality"))) == (2, 1)
    task = check_task(DEMO.load_checks(third)["acceptance"], tiny, DEMO)
    (path,) = task.function(root, task.argument, silent).paths
    assert store.read_record(path, Acceptance).gate_depth == 2


def test_a_measurement_takes_the_memory_and_the_gpus_of_its_largest_side(
    root: Path, add_variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, small = variant.load("tiny", root), variant.load("small", root)
    size = bytes_on_disk(tiny.weights)
    plain = measurements.estimate_resources([tiny])
    assert (plain.gpus, plain.whole_node) == (0, False)
    assert plain.memory_bytes >= (3 << 30) + size
    beside = measurements.estimate_resources([tiny, small], loaded=tiny, alone=True)
    assert beside.memory_bytes - plain.memory_bytes == 2 * size
    assert beside.whole_node
    # Fidelity loads the baseline beside the variant.
    needs = [
        check_task(DEMO.load_checks(small)[check], small, DEMO).resources for check in ("quality", "fidelity")
    ]
    assert needs[1].memory_bytes - needs[0].memory_bytes == 2 * size
    monkeypatch.setattr(host, "detect", lambda: "cuda")
    wide = small.with_lines({"PLATFORM": "cuda", "VLLM_TENSOR_PARALLEL_SIZE": "2"})
    assert measurements.estimate_resources([tiny, wide]).gpus == 2
    assert recipe_task(small).resources.gpus == 1


def test_a_variant_is_made_before_its_compile_cache_is(root: Path, add_variant: Callable[..., Path]) -> None:
    config = add_variant("made", "BASE=tiny\nVLLM_MODEL=weights/made\n", baseline="tiny")
    stages = "  - quantise_lm_head: {group_size: 32}\n  - bake_cache: {}\n"
    (config.parent / "recipe.yaml").write_text(f"description: d\nbase: tiny\nstages:\n{stages}")
    made = variant.load("made", root)
    first, whole = recipe_task(made, 1), recipe_task(made, alone=True)
    assert first.key != whole.key
    assert first.title == whole.title == "recipe of made"
    assert [task.resources.whole_node for task in (first, whole)] == [False, True]
    assert first.urgent
    first.function(root, first.argument, silent)
    assert Manifest.read(made.weights).stage == "quantise_lm_head"


def timed(root: Path, asked: list[Any]) -> Callable[..., list[Path]]:
    """A stand-in of `measure_latency`, whose records are of one run."""

    def measure(
        sides: list[Variant], workload: Any, *, rounds: int, records_folders: list[Path], **_: Any
    ) -> list[Path]:
        asked.append([side.name for side in sides])
        records = [
            record_files.example("latency", variant=side.name, provenance=Checks().described(side, workload))
            | {"workload": workload.name, "rounds": rounds, "run": f"run {len(asked)}"}
            for side in sides
        ]
        return [
            record_files.write(folder, record, [{"n": 1}])
            for folder, record in zip(records_folders, records, strict=True)
        ]

    return measure


@pytest.mark.usefixtures("stamps")
def test_times_are_taken_alone_and_again_unless_both_sides_have_those_of_one_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(latency, "measure_latency", timed(root, asked))
    sides = [variant.load(name, root) for name in ("tiny", "small")]
    task = latency_task(sides, 3, DEMO)
    assert task.resources.whole_node
    first = task.function(root, task.argument, silent)
    assert [path.parent.name for path in first.paths] == ["tiny", "small"]
    assert task.function(root, task.argument, silent) == Measured(first.paths, reused=True)
    assert asked == [["tiny", "small"]]
    # The newest of small is of a run of its own.
    latency.measure_latency(
        [sides[1]],
        Workload.load("classes", root),
        rounds=3,
        records_folders=[root / "demo" / "small"],
        command=[],
    )
    assert not task.function(root, task.argument, silent).reused
    other = latency_task(sides, 2, DEMO)
    assert not other.function(root, other.argument, silent).reused


def test_tasks_are_run_to_their_end_each_once(root: Path, checks: Checks) -> None:
    tiny, small = variant.load("tiny", root), variant.load("small", root)
    executor = InProcess(root)
    executor.broken = "fidelity of small"
    tasks = [
        check_task(DEMO.load_checks(small)[check], side, DEMO)
        for check, side in (("acceptance", tiny), ("acceptance", tiny), ("fidelity", small))
    ]
    outcomes = run_tasks(tasks, executor)
    assert len(executor.ran) == 2
    assert isinstance(outcomes[tasks[0].key], Result)
    failure = outcomes[tasks[2].key]
    assert isinstance(failure, Failure)
    assert failure.reason == "its process died (SIGSEGV)"
