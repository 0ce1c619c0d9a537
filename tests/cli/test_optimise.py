"""`optimise` goes on where it was killed, takes back what a check points at, and says what to serve."""

import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from slimqwen import variant
from slimqwen.cli import optimise
from slimqwen.cli.baselines import name_of
from slimqwen.search import optimise as search
from slimqwen.search.optimise import MOST_TRIES, Optimisation
from slimqwen.search.proof import Finalist
from slimqwen.variant import Variant
from tests.cli.conftest import run_on_one_line as run
from tests.cli.conftest import said_by
from tests.cli.optimise_steps import Steps, make_root

STEPS = ("recipe", "tune", "proof", "gate", "timing", "promote")


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The steps of an optimisation of tiny, in a repository of its own."""
    made = Steps(make_root(tmp_path, monkeypatch))
    made.install(monkeypatch)
    return made


def journal_of(steps: Steps, name: str = "tiny") -> Optimisation:
    found = Optimisation.find(steps.root, name)
    assert found is not None
    return found


def die_in(steps: Steps, step: str, number: int) -> None:
    """Run the command in a process of its own, which ends by a signal in this step."""

    def command() -> None:
        torch.set_num_threads(1)  # OpenMP's threads do not outlive a fork
        steps.stop, steps.signal = step, number
        code = 0
        try:
            optimise.optimise("tiny", yes=True, **OPTIONS)
        except KeyboardInterrupt:
            code = 130
        except BaseException:  # typer's Exit: the step was not entered
            code = 99
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=command)
    process.start()
    process.join()
    assert process.exitcode == (130 if number == signal.SIGINT else -number)


OPTIONS = {
    "hours": 24.0, "disk": None, "context": None, "sequences": None, "goal": "speed", "corpus": "self",
    "evaluation": None, "gpu": None, "status": False,
}  # fmt: skip


def test_a_run_that_is_killed_in_each_step_goes_on_and_ends_as_one_that_was_not(steps: Steps) -> None:
    # Each process is a fork of this one, which has imported by then what an optimisation needs.
    assert run("optimise tiny --yes --corpus tinyworld")[0] == 0
    (steps.root / "done.txt").unlink()
    steps.chosen = {"VLLM_SPECULATIVE_CONFIG": '\'{"method": "mtp", "num_speculative_tokens": 2}\''}
    for step in STEPS:
        for number in (signal.SIGKILL, signal.SIGINT):
            before = len(steps.done)
            die_in(steps, step, number)
            assert [line.partition(":")[0] for line in steps.done[before:]][-1:] == [step]
        assert journal_of(steps).step.startswith(step)
    code, said = run("optimise tiny --yes")
    assert code == 0, said
    (made,) = (name for name in variant.names(steps.root) if name.endswith("-tuned"))
    assert f"serve: `slimqwen serve {made}`: faster; no check saw a loss beyond its limit" in said
    assert said.count("page: ") == 1
    # Nothing is done again but what the process died in, twice.
    assert [steps.done.count(line) for line in dict.fromkeys(steps.done)].count(3) == len(STEPS)
    assert set(map(steps.done.count, steps.done)) == {1, 3}
    known = list(steps.done)
    code, said = run("optimise tiny")
    assert code == 0, said
    assert f"serve: `slimqwen serve {made}`: faster" in said
    assert steps.done == [*known, f"promote: {made}"]


def test_what_tuning_finds_is_judged_and_served(steps: Steps) -> None:
    steps.chosen = {"VLLM_SPECULATIVE_CONFIG": '\'{"method": "mtp", "num_speculative_tokens": 2}\''}
    code, said = run("optimise tiny --yes")
    assert code == 0, said
    made = variant.load(next(name for name in variant.names(steps.root) if name.endswith("-tuned")))
    assert made.settings["VLLM_SPECULATIVE_CONFIG"].value == '{"method": "mtp", "num_speculative_tokens": 2}'
    assert made.baseline == "tiny"
    assert f"timing: tiny and {made.name}" in steps.done
    assert f"given up: nothing page: experiments/{made.name}/README.md" in said


def test_tuning_is_skipped_where_too_little_time_is_left_and_on_a_busy_host(steps: Steps) -> None:
    _, said = run("optimise tiny --yes --hours 0.3")
    assert "tune: skipped: 9 minutes are left for it, 10 are needed" in said
    steps.is_busy = True
    code, said = run("optimise tiny --yes --for speed --corpus tinyworld")
    assert (
        "tune: skipped: host busy (other processes used 70 % of the CPU); `slimqwen tune tiny-optimised-"
        in said
    )
    assert "speed: not decided: other processes used 70 % of the CPU; the same command goes on" in said
    assert code == 1, said
    assert "serve: `slimqwen serve tiny`: not decided: tiny-optimised-" in said
    steps.is_busy = False
    code, said = run("optimise tiny --corpus tinyworld")
    assert (code, "timing: Speed over all classes: faster." in said) == (0, True)


def test_a_variant_that_is_not_faster_leaves_the_base_to_be_served(steps: Steps) -> None:
    steps.factor = 1.2
    code, said = run("optimise tiny --yes")
    assert code == 1, said
    assert "serve: `slimqwen serve tiny`: tiny-optimised-" in said
    assert "is as good, but not surely faster here" in said


def test_for_memory_a_smaller_checkpoint_counts_and_drafts_do_not(steps: Steps) -> None:
    steps.factor = 1.2
    code, said = run("optimise tiny --yes --for memory")
    # The stand-in for the recipe copies the checkpoint, which is therefore no smaller.
    assert (code, "is as good, but not smaller" in said) == (1, True)
    assert "tune: skipped: drafts take memory" in said
    name = journal_of(steps).tries[0]["variant"]
    assert not variant.load(name).drafts
    assert variant.load(name).hypothesis.endswith("is smaller and keeps every limit.")


def test_a_failing_check_ends_a_try_before_the_checks_behind_it(steps: Steps) -> None:
    steps.failing = lambda check, one: check == "acceptance" and "mtp" in one.hypothesis
    code, said = run("optimise tiny --yes")
    assert code == 0, said
    first, second = (each["variant"] for each in journal_of(steps).tries)
    assert [line for line in steps.done if first in line] == [
        f"recipe: recipe of {first}",
        f"recipe: fidelity of {first}",
        f"recipe: acceptance of {first}",
    ]
    assert f"{first}: fail: acceptance: " in said
    assert "taken back: acceptance: the MTP head stays in 16 bits" in said
    assert said.index("given up: acceptance: the MTP head stays in 16 bits") < said.index(f"serve {second}")


def test_a_model_with_outliers_passes_at_the_second_try_by_the_step_that_the_check_named(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which kind it is: tests/search/test_optimise.py, on planted outliers and a checkpoint that is made.
    monkeypatch.setattr(search, "_find_costliest", lambda *_: ("mlp", ", which costs most"))
    steps.failing = lambda check, one: check == "fidelity" and "mlp W4A16" in one.hypothesis
    code, said = run("optimise tiny --yes")
    assert code == 0, said
    first, second = journal_of(steps).tries
    assert (first["verdict"], second["verdict"]) == ("fail", "pass")
    assert first["taken back"] == "fidelity: 8 bits for mlp, which costs most"
    assert "mlp W8A16" in variant.load(second["variant"]).hypothesis
    assert [line for line in steps.done if first["variant"] in line][1:] == [
        f"recipe: fidelity of {first['variant']}"
    ]


def test_a_model_that_cannot_pass_ends_with_the_base_and_why(steps: Steps) -> None:
    steps.failing = lambda check, one: check == "acceptance"
    code, said = run("optimise tiny --yes")
    assert code == 1, said
    assert said.endswith("serve the base: `slimqwen serve tiny`: no recipe passed")
    journal = journal_of(steps)
    # tiny's fit lists no smaller draft vocabulary, so the 16-bit MTP head is all that acceptance can get back.
    assert [each["verdict"] for each in journal.tries] == ["fail", "fail"]
    assert "try tiny-optimised-" in said_by("optimise tiny --status")
    assert len(journal.tries) < MOST_TRIES
    known = list(steps.done)
    assert run("optimise tiny")[0] == 1
    assert steps.done == known


def test_what_the_search_s_items_leave_undecided_is_decided_by_those_of_the_proof(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = optimise._judge

    def judge_few(asked: Any, one: Variant, side: Any) -> Finalist:
        found = judge(asked, one, side)
        return found.model_copy(update={"verdict": "inconclusive"}) if side == "search" else found

    monkeypatch.setattr(optimise, "_judge", judge_few)
    code, said = run("optimise tiny --yes")
    assert code == 0, said
    (only,) = journal_of(steps).tries
    assert only["verdict"] == "inconclusive"
    assert f"serve {only['variant']}" in said


def test_what_fails_on_items_that_no_try_saw_is_not_served(steps: Steps) -> None:
    def fails(check: str, one: Variant) -> bool:
        return check == "fidelity" and any(line.startswith("tune") for line in steps.done)

    steps.failing = fails
    code, said = run("optimise tiny --yes")
    assert code == 1, said
    assert "proof: fail: fidelity: " in said
    assert "serve the base: `slimqwen serve tiny`: tiny-optimised-" in said
    assert said.endswith(" did not pass the last gate")
    assert not any(line.startswith(("gate", "timing")) for line in steps.done)
    assert not journal_of(steps).steps["proof"].passed


def test_another_text_begins_anew(steps: Steps) -> None:
    run("optimise tiny --yes")
    first = journal_of(steps).tries[0]["variant"]
    run("optimise tiny --yes --corpus tinyworld")
    (second,) = (each["variant"] for each in journal_of(steps).tries)
    assert second != first
    assert f"proof: quality of {second}" in steps.done


def test_no_step_begins_after_the_hours(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    run("optimise tiny --yes --hours 0.3")
    journal = journal_of(steps)
    del journal.steps["timing"], journal.steps["promote"]
    journal.seconds = 3600
    journal.write()
    code, said = run("optimise tiny --hours 0.3")
    assert code == 1, said
    assert said.endswith(
        "serve the base: `slimqwen serve tiny`: not decided: 0.3 hours were over before timing; run it again with "
        "more --hours to go on"
    )


def test_two_processes_do_not_share_a_journal(steps: Steps) -> None:
    with Optimisation.held(steps.root, "tiny"):
        code, said = run("optimise tiny --yes")
    assert code == 3, said
    assert (
        "another process optimises tiny; wait until it ends; `slimqwen optimise tiny --status` says where"
        in said
    )


def test_context_and_sequences_are_those_of_both_sides(steps: Steps) -> None:
    run("optimise tiny --yes --context 1024 --sequences 1")
    made = variant.load(journal_of(steps, "tiny-c1024").tries[0]["variant"])
    base = variant.load("tiny-c1024")
    assert (made.baseline, base.baseline) == ("tiny-c1024", None)
    assert {one.settings["VLLM_MAX_MODEL_LEN"].value for one in (made, base)} == {"1024"}
    assert said_by("optimise tiny --context 1024 --status").startswith("tiny: at promote")


def test_an_evaluation_judges_in_place_of_the_baseline_s(steps: Steps) -> None:
    evals = steps.root / "eval"
    gates = {file.name: file.read_text() for file in (evals / "gates").iterdir()}
    (evals / "gates").unlink()
    (evals / "gates").mkdir()
    (evals / "gates" / "mine.yaml").write_text(
        gates["tinyworld.yaml"].replace("quality: tinyworld", "quality: mine")
    )
    (evals / "suites" / "mine.yaml").write_text((evals / "suites" / "tinyworld.yaml").read_text())
    code, said = run("optimise tiny --yes --evaluation mine")
    assert (code, "judged by: mine; text: self; for speed" in said) == (0, True)
    assert variant.load(journal_of(steps).tries[0]["variant"]).evaluation == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hours 0.02", r"the recipe alone takes .* of 0\.02 hours here; raise --hours"),
        ("--disk 0.001", r"the recipe takes 0\.\d GB, more than --disk 0\.001; raise --disk"),
    ],
)
def test_what_takes_too_much_is_said_before_anything_runs(steps: Steps, options: str, message: str) -> None:
    code, said = run(f"optimise tiny --yes {options}")
    assert code == 3, said
    assert re.search(message, said)
    assert steps.done == []


def test_what_has_not_begun_has_no_status(steps: Steps) -> None:
    message = "error: no optimisation of tiny has begun; `slimqwen optimise tiny` begins one"
    assert run("optimise tiny --status") == (3, message)


def test_another_checkpoint_of_the_same_name_is_not_taken_for_it(steps: Steps) -> None:
    (steps.root / "mine" / "tiny").mkdir(parents=True)
    for model in ("mine/tiny", "owner/tiny"):
        code, said = run(f"optimise {model} --yes")
        assert code == 3
        assert (
            f"tiny is a variant of another checkpoint, weights/tiny; make a baseline of {model}: `slim"
            in said
        )


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3.5-4B", "qwen3.5-4b"),
        (f"owner/My_Model@{'0' * 40}", "my_model"),
        ("weights/mymodel", "mymodel"),
        ("models/Small Model.Q4_K_M.gguf", "small-model.q4_k_m"),
        (f"owner/{'long-' * 12}", "long-long-long-long-long-long-long-long"),
    ],
)
def test_a_baseline_is_named_by_its_model(model: str, name: str) -> None:
    assert name_of(model) == name
