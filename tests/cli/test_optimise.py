"""`optimise` goes on where it was cut off, takes back what a check points at, and says what to serve."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimqwen import variant
from slimqwen.cli import console, optimise
from slimqwen.cli.app import app
from slimqwen.records.record import Finding
from slimqwen.search.optimise import MOST_TRIES, Optimisation
from slimqwen.search.proof import Finalist
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from tests.checkpoints import TINY
from tests.cli.conftest import said_by

ROOT = variant.repository_root()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the baseline tiny and this one's settings."""
    (tmp_path / "weights" / "store").mkdir(parents=True)
    (tmp_path / "weights" / "tiny").symlink_to(TINY)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "tiny").symlink_to(ROOT / "experiments" / "tiny")
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    (tmp_path / "docs").mkdir()
    for module in (variant, variant.variant, variant.scaffold):
        if hasattr(module, "repository_root"):
            monkeypatch.setattr(module, "repository_root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def judged_as(subject: Variant, *failed: str) -> Finalist:
    findings = tuple(
        Finding(gate=gate, figure="kl_nats", value=1.0, limit=0.5, verdict=Verdict.FAIL) for gate in failed
    )
    verdict = Verdict.FAIL if failed else Verdict.PASS
    reason = f"{' and '.join(failed)} failed" if failed else None
    return Finalist(
        variant=subject.name,
        verdict=verdict,
        reason=reason,
        p_value=1.0,
        adjusted_p_value=1.0,
        findings=findings,
        record=None,
    )


def run(command: str) -> tuple[int, str]:
    """Exit code of a command, and what it says, on one line."""
    with console.console.capture() as shown:
        result = CliRunner().invoke(app, command.split())
    return result.exit_code, " ".join(shown.get().split())


class Judge:
    """Stands in for the gate, which takes minutes: fails a try by the named check, or is killed."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes: Iterator[str] = iter(outcomes)
        self.seen: list[str] = []

    def __call__(self, asked: object, subject: Variant, side: str) -> Finalist:
        self.seen.append(subject.name)
        outcome = next(self.outcomes)
        if outcome == "killed":
            raise KeyboardInterrupt
        return judged_as(subject, *([outcome] if outcome != "pass" else []))


def test_a_model_that_cannot_pass_ends_with_the_base_after_three_tries(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge(*["acceptance"] * MOST_TRIES)
    monkeypatch.setattr(optimise, "_judge", judge)
    code, said = run("optimise tiny --yes")
    assert code == 1
    assert "serve the base: `slimqwen serve tiny`: no recipe passed" in said
    journal = Optimisation.open(root, "tiny", "tiny")
    # tiny's fit lists no smaller draft vocabulary, so the 16-bit MTP head is all that acceptance can get back.
    assert [each["verdict"] for each in journal.tries] == ["fail", "fail"]
    assert len(set(judge.seen)) == 2
    assert "acceptance failed" in said_by("optimise tiny --status")


def test_a_killed_optimisation_goes_on_with_the_same_try(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Judge("acceptance", "killed")
    monkeypatch.setattr(optimise, "_judge", killed)
    run("optimise tiny --yes")
    journal = Optimisation.open(root, "tiny", "tiny")
    assert len(journal.tries) == 1
    assert journal.candidate is not None
    assert "mtp" not in journal.candidate
    again = Judge("pass", "fidelity")
    monkeypatch.setattr(optimise, "_judge", again)
    code, said = run("optimise tiny")
    assert again.seen == [killed.seen[1]] * 2
    assert code == 1
    assert "serve the base" in said
    assert Optimisation.open(root, "tiny", "tiny").steps["proof"].startswith("fail: fidelity failed")


def begin(**given: object) -> None:
    """Call the verb's function, whose errors the command line would print."""
    options: dict[str, object] = {"hours": 24.0, "corpus": "self", "evaluation": None, "gpu": None}
    optimise.optimise("tiny", **{**options, "yes": True, "status": False, **given})  # type: ignore[arg-type]


def test_too_few_hours_are_said_before_anything_runs(root: Path) -> None:
    message = r"the recipe alone takes .* of 0\.02 hours here; give more with --hours"
    with pytest.raises(optimise.OptimiseError, match=message):
        begin(hours=0.02)


def test_what_has_not_begun_has_no_status(root: Path) -> None:
    message = r"no optimisation of tiny has begun; `slimqwen optimise tiny`"
    with pytest.raises(optimise.OptimiseError, match=message):
        begin(status=True)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3.5-4B", "qwen3.5-4b"),
        (f"owner/My_Model@{'0' * 40}", "my_model"),
        ("weights/mymodel", "mymodel"),
        ("models/Small Model.Q4_K_M.gguf", "small-model.q4_k_m"),
    ],
)
def test_a_baseline_is_named_by_its_model(model: str, name: str) -> None:
    assert optimise._name_of(model) == name
