"""What the demo says and ends with where a part of it gives no result."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimqwen import processes, variant, workspace
from slimqwen.cli import demo
from slimqwen.cli.demo import DemoRecords
from slimqwen.host_load import HostBusyError
from slimqwen.packaged_model import PACKAGES
from slimqwen.processes import Failure, Outcome, Result, Task
from slimqwen.recipe import variant_recipe
from slimqwen.records.table import Table
from slimqwen.report import site, tables
from slimqwen.search import SearchError
from slimqwen.search.measurements import Measured
from slimqwen.stats.verdict import Verdict

BUSY = "not decided: other processes used 80 % of the CPU"
LOST = "failed: the server failed while measuring tiny-best: long: RuntimeError: num_accepted_tokens must be in [1, 5]"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the demo says; it builds no report."""
    lines: list[str] = []
    monkeypatch.setattr(demo, "say", lines.append)
    monkeypatch.setattr(site, "build_page", lambda *_: SimpleNamespace(index=Path("index.html")))
    table = Table("tiny-best and its baseline tiny", ("measure",), (("size on disk, MB",),))
    monkeypatch.setattr(tables, "summary_table", lambda *_: table)
    return lines


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the demo finds: reasons of parts without a result, and verdicts of the others."""

    def find(missing: dict[str, str], **verdicts: Verdict) -> None:
        parts = ("quality", "acceptance", "fidelity", "speed")
        evidence = DemoRecords(dict.fromkeys([part for part in parts if part not in missing], ()), missing)
        monkeypatch.setattr(demo, "_judge", lambda _, part, __: verdicts.get(part, Verdict.PASS))
        monkeypatch.setattr(demo, "_measure", lambda *_: evidence)

    return find


def test_the_baseline_is_checked_while_the_variant_is_made_and_times_are_taken_last(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Each phase ends before the next one begins; a part that fails leaves the others."""
    phases: list[list[str]] = []
    busy = HostBusyError("round 1: host too busy")
    busy.cause = BUSY.removeprefix("not decided: ")

    def run(tasks: Sequence[Task], _: object) -> dict[str, Outcome]:
        phases.append([task.title for task in tasks])
        assert [task.resources.whole_node for task in tasks].count(True) == (len(phases) in (2, 4))
        failures = {
            "quality of tiny-best": Failure("", LOST.removeprefix("failed: ")),
            "latency of tiny-best": Failure("", str(busy), busy),
        }

        def measured(title: str) -> Measured:
            return Measured([Path(__file__)], reused=title == "acceptance of tiny")

        return {task.key: failures.get(task.title, Result(task.key, measured(task.title))) for task in tasks}

    monkeypatch.setattr(processes, "run_tasks", run)
    monkeypatch.setattr(variant_recipe, "run_recipe", lambda _: [])
    result = demo._measure(variant.repository_root(), demo.MODELS["tiny"], 2)
    assert phases == [
        ["recipe of tiny-best", "quality of tiny", "acceptance of tiny"],
        ["recipe of tiny-best"],
        ["quality of tiny-best", "acceptance of tiny-best", "fidelity of tiny-best"],
        ["latency of tiny-best"],
    ]
    assert result.missing == {"quality": LOST, "speed": BUSY}
    assert {part: len(paths) for part, paths in result.records.items()} == {"acceptance": 2, "fidelity": 1}
    assert len([line for line in said if line.startswith("    reused: tests/cli/test_demo.py, made ")]) == 1


def test_an_empty_folder_becomes_a_workspace_and_another_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: list[str]
) -> None:
    monkeypatch.setattr(demo, "is_checkout", lambda: False)
    monkeypatch.delenv(workspace.HOME, raising=False)
    monkeypatch.chdir(tmp_path)
    assert [demo._find_root() for _ in range(2)] == [tmp_path] * 2
    assert said == [f"{tmp_path} is a workspace now"]
    other = tmp_path.with_name("other")
    other.mkdir()
    (other / "file").touch()
    monkeypatch.chdir(other)
    demo._find_root()
    assert not (other / workspace.MARKER).exists()
    assert len(said) == 1


@pytest.mark.parametrize("subject", demo.MODELS.values(), ids=list(demo.MODELS))
def test_a_demo_s_variant_has_its_baseline_and_a_recipe(subject: demo.DemoModel) -> None:
    made = variant.load(subject.variant)
    assert made.baseline == subject.baseline
    assert variant_recipe.read_recipe(made).base == subject.baseline
    source = variant.load(subject.baseline).settings.get("SOURCE")
    assert subject.is_packaged == (source is not None and source.value in PACKAGES)


def test_a_stage_that_fails_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(tasks: Sequence[Task], _: object) -> dict[str, Outcome]:
        ran.append(tasks)
        return {task.key: Failure(task.key, "calibrate died (SIGKILL)") for task in tasks}

    monkeypatch.setattr(processes, "run_tasks", run)
    with pytest.raises(SearchError, match=r"^calibrate died \(SIGKILL\)$"):
        demo._measure(variant.repository_root(), demo.MODELS["tiny"], 2)
    assert len(ran) == 1


def test_on_a_busy_host_all_but_the_speed_is_decided(found: Callable[..., None], said: list[str]) -> None:
    found({"speed": BUSY})
    demo.demo()
    assert f"  speed       {BUSY}" in said
    assert [line for line in said if line.endswith(" pass")] == [
        "  quality     pass", "  acceptance  pass", "  fidelity    pass",
    ]  # fmt: skip
    assert [line for line in said if "--variant tiny: not decided: tiny-best is as good" in line]


def test_a_failed_part_is_named_beside_the_others_with_its_cause(
    found: Callable[..., None], said: list[str]
) -> None:
    found({"speed": LOST})
    with pytest.raises(SearchError, match=r"^failed: speed; read why above"):
        demo.demo()
    assert f"  speed       {LOST}" in said
    assert "  quality     pass" in said


@pytest.mark.parametrize(
    ("missing", "verdicts", "answer"),
    [
        ({}, {}, "slimqwen serve --variant tiny-best: faster"),
        ({}, {"speed": Verdict.INCONCLUSIVE}, "slimqwen serve --variant tiny: tiny-best is as good"),
        ({}, {"quality": Verdict.FAIL}, "slimqwen serve --variant tiny: tiny-best lost more"),
        ({"speed": BUSY}, {"quality": Verdict.FAIL}, "slimqwen serve --variant tiny: tiny-best lost more"),
        (
            {},
            {"fidelity": Verdict.INCONCLUSIVE},
            "slimqwen serve --variant tiny: not decided: `slimqwen gate --variant tiny-best`",
        ),
        ({"acceptance": BUSY}, {}, "slimqwen serve --variant tiny: not decided: no verdict on acceptance"),
    ],
)
def test_what_to_serve_follows_from_the_verdicts(
    found: Callable[..., None],
    said: list[str],
    missing: dict[str, str],
    verdicts: dict[str, Verdict],
    answer: str,
) -> None:
    found(missing, **verdicts)
    demo.demo()
    (line,) = [line for line in said if line.startswith("  serve ")]
    assert line.startswith(f"  serve       {answer}")
