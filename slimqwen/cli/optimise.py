"""`slimqwen optimise`: from a model's name to the fastest server that is proven as good, in one resumable line."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slimqwen import host
from slimqwen import variant as variants
from slimqwen.cli.console import command, console, progress_bar, relative, say
from slimqwen.cli.report import update_page
from slimqwen.cli.variants import create_baseline, name_text
from slimqwen.errors import SlimqwenError
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from slimqwen.search.candidate import Candidate
    from slimqwen.search.optimise import Optimisation
    from slimqwen.search.proof import Finalist

_STEPS = ("recipe", "proof", "gate", "tune", "timing", "promote")
_LEAST_TUNING = 10.0
"""Minutes below which drafts are not tuned."""


class OptimiseError(SlimqwenError):
    """An optimisation cannot begin or go on."""


@dataclass(frozen=True)
class _Asked:
    """What the user asks for, and where it stands."""

    base: Variant
    corpus: str
    hours: float
    journal: "Optimisation"
    started: float
    begun: float

    @property
    def seconds(self) -> float:
        """Time that all runs have taken so far."""
        return self.begun + time.monotonic() - self.started

    @property
    def hours_left(self) -> float:
        """Hours that are left of those given."""
        return max(0.0, self.hours - self.seconds / 3600)

    def say_step(self, name: str, about: str) -> None:
        """Say the step, those left and the hours left, and note them for `--status`."""
        left = _STEPS[_STEPS.index(name) + 1 :]
        self.journal.step, self.journal.left = f"{name}: {about}", list(left)
        self._note()
        rest = f"then {', '.join(left)}" if left else "the last step"
        console.print(f"[bold]{name}[/bold]: {about} ({rest}; {self.hours_left:.1f} hours left)")

    def end(self, name: str, said: str) -> None:
        """Note a step that ended, and the time so far."""
        self.journal.steps[name] = said
        self._note()
        say(said)

    def _note(self) -> None:
        self.journal.seconds = self.seconds
        self.journal.write()


def optimise(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="owner/name of a hub, a folder, a GGUF file, or a variant"),
    ],
    hours: Annotated[float, typer.Option(min=0, help="begin no step after this many hours")] = 24,
    corpus: Annotated[
        str, typer.Option(metavar="self|general|FILE|FOLDER", help="text of the recipe")
    ] = "self",
    evaluation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="folder of eval/own/, or name of eval/suites/ (default: core)"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="GPU that the model has to fit on (default: this one)"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    status: Annotated[
        bool, typer.Option("--status", help="say where an optimisation of MODEL stands")
    ] = False,
) -> None:
    """Make, judge, tune and time a variant of MODEL; take back what a failed check points at; say what to serve.

    After Ctrl-C or the loss of the machine the same command continues. Exit code 0: a variant is proven as good and
    faster, 1: serve the base, 3: error.
    """
    from slimqwen.search.optimise import Optimisation

    root = variants.repository_root()
    name = _name_of(model)
    if status:
        _say_status(Optimisation.open(root, name, model), name)
        return
    base = _find_base(model, name, evaluation)
    journal = Optimisation.open(root, base.name, model)
    text = name_text(corpus, base.folder)
    asked = _Asked(base, text, hours, journal, time.monotonic(), journal.seconds)
    _announce(asked, gpu)
    if not yes and not asked.journal.steps:
        typer.confirm("Begin?", abort=True)
    raise typer.Exit(0 if _run(asked) else 1)


def _name_of(model: str) -> str:
    """Name of the baseline of a model: a variant's own, or that of the folder, file or repository."""
    path = Path(model.partition("@")[0])
    named = re.sub(r"[^a-z0-9._-]+", "-", (path.stem if path.suffix == ".gguf" else path.name).lower())
    known = variants.names()
    name = model if model in known else named
    return variants.load(name).baseline or name if name in known else name


def _find_base(model: str, name: str, evaluation: str | None) -> Variant:
    """The baseline, made if it is not there; its checkpoint, downloaded if a hub has it."""
    root = variants.repository_root()
    if name not in variants.names(root):
        folder = create_baseline(name, model, None, evaluation or "core")
        update_page(folder)
    base = variants.load(name, root)
    if not (base.weights / "config.json").is_file() and "SOURCE" in base.settings:
        from slimqwen import hub

        with progress_bar() as progress:
            hub.download_checkpoint(base, progress)
    return base


def _announce(asked: _Asked, gpu: str | None) -> None:
    """Say what will be done: whether it fits, the first recipe, its time and disk, what will judge it."""
    from slimqwen.evals.suites import datasets
    from slimqwen.evals.suites.suite import Suite
    from slimqwen.fit import verdict
    from slimqwen.fit.memory import ServerSettings
    from slimqwen.fit.subject import find_subject
    from slimqwen.plan.host_gpus import choose_gpu
    from slimqwen.recipe import inspection, variant_recipe
    from slimqwen.recipe.recipe_file import RecipeError
    from slimqwen.search import optimise
    from slimqwen.search.candidate import describe_changes

    base, journal = asked.base, asked.journal
    if (found := choose_gpu(gpu, base.root)) is not None:
        subject = find_subject(base.name, base.root)
        settings = ServerSettings.of(subject, None, None, None, gpus_here=found.here if gpu is None else 1)
        fits = verdict.fit_on_gpus(subject, settings, [found.gpu])[found.gpu.name]
        say(verdict.give_verdict(subject, settings, found.gpu, fits))
    suite = Suite.load(base.evaluation, base.root)
    suite.require_questions(base.root)
    datasets.require_datasets(suite.datasets, suite.nltk, base.root)
    candidate = _present(asked)
    if not candidate.changes:
        raise OptimiseError(
            f"fit names no optimisation of {base.name} that a stage makes; `slimqwen tune {base.name}` finds its drafts"
        )
    variant = optimise.make_variant(candidate, base, asked.corpus, _stages())
    outline = variant_recipe.base_outline(variant)
    assert outline is not None
    to_fetch: list[str] = []
    faults, costs = variant_recipe.inspect_recipe(variant, outline, to_fetch)
    if faults or to_fetch:
        raise RecipeError(*faults, *to_fetch)
    if lacking := inspection.lacking_space(costs, base.root / "weights" / "store"):
        raise OptimiseError(*lacking)
    hours = sum(cost.seconds for cost in costs) / 3600
    disk = sum(cost.needs.disk_bytes for cost in costs) / 1e9
    chosen = "fit chose it" if not journal.tries else f"try {len(journal.tries) + 1}"
    say(
        f"recipe: {describe_changes(candidate.changes)} ({chosen}): {hours:.1f} hours and {disk:.1f} GB of disk here"
    )
    say(f"judged by: {base.evaluation}; text: {asked.corpus}; time: {asked.hours:g} hours")
    if hours > asked.hours:
        raise OptimiseError(
            f"the recipe alone takes {hours:.1f} of {asked.hours:g} hours here; give more with --hours, or take a GPU"
        )


def _stages() -> Mapping[str, Any]:
    """Parameters of stages: more text where a GPU reads it."""
    sequences = (
        {"sequences": 256, "length": 2048} if host.detect() == "cuda" else {"sequences": 64, "length": 256}
    )
    return {"calibrate": {"corpus": sequences}, "sample_outputs": {"texts": 1024, "tokens": 96}}


def _present(asked: _Asked) -> "Candidate":
    from slimqwen.search import optimise
    from slimqwen.search.candidate import Candidate

    known = asked.journal.candidate
    if known is None:
        asked.journal.candidate = optimise.choose_first(asked.base, asked.corpus).changes
        asked.journal.write()
    return Candidate(**(asked.journal.candidate or {}))


def _run(asked: _Asked) -> bool:
    """Go on from where the journal stands; returns whether a variant is proven as good and faster."""
    variant = _try_recipes(asked)
    if variant is None:
        return _give_up(asked, "no recipe passed")
    if not _prove(asked, variant):
        return _give_up(asked, "it did not pass on items that no try saw")
    _tune(asked, variant)
    return _time_and_promote(asked, variant)


def _try_recipes(asked: _Asked) -> Variant | None:
    """Make and judge candidates on the search's side until one passes; None if none does."""
    from slimqwen.search import optimise
    from slimqwen.search.candidate import Candidate, describe_changes

    journal = asked.journal
    while True:
        candidate = Candidate(**(journal.candidate or {}))
        variant = optimise.make_variant(candidate, asked.base, asked.corpus, _stages())
        known = next((each for each in journal.tries if each["variant"] == variant.name), None)
        if known and known["verdict"] == "pass":
            return variant
        asked.say_step(
            "recipe",
            f"try {len(journal.tries) + 1} of {optimise.MOST_TRIES}, {describe_changes(candidate.changes)}",
        )
        judged = _judge(asked, variant, "search")
        reason = judged.reason or "every check passes on the search's items"
        journal.tries.append({"variant": variant.name, "verdict": str(judged.verdict), "reason": reason})
        asked.end("recipe", f"{variant.name}: {judged.verdict}: {reason}")
        if judged.passed:
            return variant
        with progress_bar() as progress:
            back = optimise.take_back(candidate, judged, variant, progress)
        if back is None or len(journal.tries) >= optimise.MOST_TRIES or asked.hours_left <= 0:
            return None
        candidate, why = back
        journal.candidate = candidate.changes
        journal.write()
        say(f"taken back: {why}")


def _judge(asked: _Asked, variant: Variant, side: Literal["search", "proof"]) -> "Finalist":
    """Make a variant and judge it on one side of the split."""
    from slimqwen.processes.local import LocalExecutor
    from slimqwen.search.proof import prove_finalists

    root = asked.base.root
    with progress_bar() as progress:
        # One task at a time, on all CPUs: a record of fewer threads does not hold for the gate, which has them all.
        executor = LocalExecutor(root, progress, warm=True, width=1)
        return prove_finalists([variant.name], executor, root, command=command(), side=side).finalists[0]


def _once(asked: _Asked, name: str, about: str, make: Callable[[], str]) -> str:
    """Run a step unless the journal has its result."""
    if name not in asked.journal.steps:
        asked.say_step(name, about)
        asked.end(name, make())
    return asked.journal.steps[name]


def _prove(asked: _Asked, variant: Variant) -> bool:
    def prove() -> str:
        judged = _judge(asked, variant, "proof")
        return f"{judged.verdict}: {judged.reason or 'every check passes on items that no try saw'}"

    said = _once(asked, "proof", "the last gate, on items that no try saw", prove)
    if not said.startswith("pass"):
        return False

    def gate() -> str:
        from slimqwen import api

        with progress_bar() as progress:
            return str(api.judge(variant, progress=progress, warn=say).record.verdict)

    return _once(asked, "gate", "all items, for the variant's page", gate) == "pass"


def _tune(asked: _Asked, variant: Variant) -> None:
    """Measure which drafts pay, where ten minutes are left for it; what it finds is said, and not served untried."""
    from slimqwen.host_load import HostBusyError
    from slimqwen.search.tune import tune_variant

    minutes = min(30.0, 60 * asked.hours_left / 2)
    if minutes < _LEAST_TUNING:
        skipped = f"skipped: {minutes:.0f} minutes are left for it, {_LEAST_TUNING:.0f} are needed"
        asked.journal.steps.setdefault("tune", skipped)
        say(f"tune: {asked.journal.steps['tune']}")
        return

    def tune() -> str:
        from slimqwen.records import store
        from slimqwen.search.tune.record import Tune

        with progress_bar() as progress:
            path = tune_variant(variant, None, minutes=minutes, command=command(), progress=progress)
        record = store.read_record(path, Tune)
        return f"{record.verdict}: {record.chosen or 'nothing is decided'} ({relative(path)})"

    try:
        _once(asked, "tune", f"which drafts pay here, {minutes:.0f} minutes", tune)
    except HostBusyError as error:
        say(f"tune: not decided: {error}")


def _time_and_promote(asked: _Asked, variant: Variant) -> bool:
    """Time the variant in turns with its baseline; promote it if it is faster; say what to serve."""
    from slimqwen.evals import promotion
    from slimqwen.host_load import HostBusyError
    from slimqwen.report import choice
    from slimqwen.report.unproven import find_unproven

    def timing() -> str:
        from slimqwen.bench import latency
        from slimqwen.bench.workload import Workload, name_workload

        workload = Workload.load(name_workload(variant), variant.root)
        with progress_bar() as progress:
            paths = latency.measure_latency(
                [asked.base, variant], workload, command=command(), progress=progress
            )
        return (latency.give_verdict(*paths) or "not decided").partition(" Next: ")[0]

    try:
        _once(asked, "timing", f"{asked.base.name} and {variant.name} in turns", timing)
    except HostBusyError as error:
        say(f"not decided: {error}; the same command goes on")
    decision = choice.decide_here(variant)
    if decision.serve == variant.name:
        unproven = find_unproven(variant.root, variant.name)
        with progress_bar() as progress:
            promotion.promote_variant(variant, unproven, progress)
        update_page(variant.folder)
        asked.end(
            "promote", f"{variant.name} is promoted; its page: {relative(variant.folder / 'README.md')}"
        )
    _say_sizes(asked.base, variant)
    failed = [each["reason"] for each in asked.journal.tries if each["verdict"] != "pass"]
    say(f"given up: {'; '.join(failed) or 'nothing'}")
    say(f"serve: `slimqwen serve {decision.serve}`: {decision.reason}")
    return decision.serve == variant.name


def _say_sizes(base: Variant, variant: Variant) -> None:
    from slimqwen.checkpoint.files import bytes_on_disk

    before, after = bytes_on_disk(base.weights), bytes_on_disk(variant.weights)
    say(f"size: {after / 1e6:,.1f} MB, that of {base.name} is {before / 1e6:,.1f} MB")


def _give_up(asked: _Asked, why: str) -> bool:
    for each in asked.journal.tries:
        say(f"{each['variant']}: {each['verdict']}: {each['reason']}")
    say(f"serve the base: `slimqwen serve {asked.base.name}`: {why}")
    return False


def _say_status(journal: "Optimisation", name: str) -> None:
    if not journal.file.is_file():
        raise OptimiseError(f"no optimisation of {name} has begun; `slimqwen optimise {name}` begins one")
    say(f"{name}: at {journal.step or 'its beginning'}; left: {', '.join(journal.left) or 'nothing'}")
    for each in journal.tries:
        say(f"try {each['variant']}: {each['verdict']}: {each['reason']}")
    for step, said in journal.steps.items():
        say(f"{step}: {said}")
    say(f"time so far: {journal.seconds / 3600:.1f} hours")
