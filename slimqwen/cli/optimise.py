"""`slimqwen optimise`: from a model's name to the fastest server that is proven as good, in one resumable line."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slimqwen import variant as variants
from slimqwen.cli.baselines import find_base, name_of, name_served, serve_with
from slimqwen.cli.console import command, console, progress_bar, relative, say, silence_hub_client
from slimqwen.cli.report import update_page
from slimqwen.cli.variants import name_text
from slimqwen.errors import SlimqwenError
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from slimqwen.progress import Progress
    from slimqwen.report.choice import Goal
    from slimqwen.search.candidate import Candidate
    from slimqwen.search.optimise import Ended, Optimisation
    from slimqwen.search.proof import Finalist

_STEPS = ("recipe", "tune", "proof", "gate", "timing", "promote")
_LEAST_TUNING, _MOST_TUNING = 10.0, 30.0
"""Minutes below which drafts are not tuned, and most that are spent on it."""


class OptimiseError(SlimqwenError):
    """An optimisation cannot begin or go on."""


class _HoursOverError(OptimiseError):
    """The hours are over before a step."""


@dataclass(frozen=True)
class _Asked:
    """What the user asks for, and where it stands.

    Attributes:
        text: the recipe's text, as a recipe of the base names it.
        evaluation: name of what judges the variants.
        started, begun: clock at the start of this command, and the seconds of those before it.
    """

    base: Variant
    text: str
    evaluation: str
    goal: "Goal"
    hours: float
    journal: "Optimisation"
    started: float
    begun: float

    @property
    def hours_left(self) -> float:
        """Hours that are left of those given."""
        return max(0.0, self.hours - (self.begun + time.monotonic() - self.started) / 3600)

    def begin(self, name: str, about: str) -> None:
        """Say the step, those left and the hours left, and note them for `--status`."""
        if not self.hours_left:
            raise _HoursOverError(
                f"not decided: {self.hours:g} hours were over before {name}; run it again with more --hours to go on"
            )
        left = _STEPS[_STEPS.index(name) + 1 :]
        self.journal.step, self.journal.left = f"{name}: {about}", list(left)
        self.note()
        rest = f"then {', '.join(left)}" if left else "the last step"
        console.print(f"[bold]{name}[/bold]: {about} ({rest}; {self.hours_left:.1f} hours left)")

    def end(self, name: str, ended: "Ended") -> None:
        """Note a step that ended, and the time so far."""
        self.journal.steps[name] = ended
        self.note()
        say(f"{name}: {ended.said}")

    def once(self, name: str, about: str, make: "Callable[[], Ended]") -> "Ended":
        """Run a step unless the journal has its result."""
        if name not in self.journal.steps:
            self.begin(name, about)
            self.end(name, make())
        return self.journal.steps[name]

    @contextmanager
    def progress(self) -> "Iterator[Progress]":
        """Progress bars; the journal gets the time each minute, so that a kill loses no more of it."""
        noted = time.monotonic()
        with progress_bar() as show:

            def watch(activity: str, done: float, total: float) -> None:
                nonlocal noted
                if time.monotonic() - noted > 60:
                    noted = time.monotonic()
                    self.note()
                show(activity, done, total)

            yield watch

    def note(self) -> None:
        """Write the journal, with the time so far."""
        self.journal.seconds = self.begun + time.monotonic() - self.started
        self.journal.write()


def optimise(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="owner/name of a hub, a folder, a GGUF file, or a variant"),
    ],
    hours: Annotated[float, typer.Option(min=0, help="begin no step after this many hours")] = 24,
    disk: Annotated[
        float | None,
        typer.Option(min=0, metavar="GB", help="most disk that download and recipe may take together"),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="longest request to serve, tokens (default: the baseline's)")
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="requests to serve at a time (default: the baseline's)")
    ] = None,
    goal: Annotated[
        Literal["speed", "memory"],
        typer.Option("--for", help="what to gain: time, or memory, for which there are no drafts"),
    ] = "speed",
    corpus: Annotated[
        str, typer.Option(metavar="self|general|FILE|FOLDER", help="text of the recipe")
    ] = "self",
    evaluation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="folder of eval/own/, or name of eval/suites/ (default: the baseline's; core)",
        ),
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
    from slimqwen.search.optimise import Optimisation, list_deciding

    silence_hub_client()
    root = variants.repository_root()
    name = name_of(model)
    if status:
        _say_status(Optimisation.find(root, name_served(name, context, sequences)), name)
        return
    first, downloaded = find_base(model, name, evaluation, disk, yes)
    base = serve_with(first, context, sequences)
    judged_by = evaluation or base.evaluation
    text = name_text(corpus, base.folder)
    with Optimisation.held(root, base.name):
        with progress_bar() as progress:
            deciding = list_deciding(base, text, judged_by, goal, progress)
        journal = Optimisation.open(root, base.name, deciding)
        asked = _Asked(base, text, judged_by, goal, hours, journal, time.monotonic(), journal.seconds)
        _announce(asked, gpu, disk, downloaded)
        if not yes and not journal.step:
            typer.confirm("Begin?", abort=True)
        try:
            is_served = _run(asked)
        finally:
            asked.note()
    raise typer.Exit(0 if is_served else 1)


def _announce(asked: _Asked, gpu: str | None, disk: float | None, downloaded: float) -> None:
    """Say whether it fits, the recipe, its hours and disk (beside the downloaded GB), and what will judge it."""
    from slimqwen.evals.suites.suite import Suite
    from slimqwen.fit import verdict
    from slimqwen.fit.memory import ServerSettings
    from slimqwen.fit.subject import find_subject
    from slimqwen.plan.host_gpus import choose_gpu
    from slimqwen.recipe import variant_recipe
    from slimqwen.recipe.recipe_file import RecipeError
    from slimqwen.search.candidate import describe_changes

    base, journal = asked.base, asked.journal
    if (found := choose_gpu(gpu, base.root)) is not None:
        subject = find_subject(base.name, base.root)
        settings = ServerSettings.of(subject, None, None, None, gpus_here=found.here if gpu is None else 1)
        fits = verdict.fit_on_gpus(subject, settings, [found.gpu])[found.gpu.name]
        say(verdict.give_verdict(subject, settings, found.gpu, fits))
    Suite.load(asked.evaluation, base.root).require_questions(base.root)
    candidate, variant = _present(asked)
    outline = variant_recipe.base_outline(variant)
    assert outline is not None
    to_fetch: list[str] = []
    faults, costs = variant_recipe.inspect_recipe(variant, outline, to_fetch)
    if faults:
        raise RecipeError(*faults)
    if not to_fetch:
        forecasts = variant_recipe.forecast_recipe(variant)
        costs = tuple(cost for cost, each in zip(costs, forecasts, strict=True) if not each.reused)
    hours = sum(each.seconds for each in costs) / 3600
    needed = sum(each.needs.disk_bytes for each in costs) / 1e9
    tries = [*(each["variant"] for each in journal.tries), variant.name]
    origin = f"try {tries.index(variant.name) + 1}" if journal.tries else "fit chose it"
    say(
        f"recipe: {describe_changes(candidate.changes)} ({origin}): {hours:.1f} hours and {needed:.1f} GB of disk here"
    )
    say(f"judged by: {asked.evaluation}; text: {asked.text}; for {asked.goal}; time: {asked.hours:g} hours")
    if lacking := variant_recipe.lacking_space(costs, base.root / "weights" / "store"):
        raise OptimiseError(*lacking)
    if disk is not None and needed + downloaded > disk:
        gb = f"{needed:.1f} GB beside {downloaded:.2f} GB of download" if downloaded else f"{needed:.1f} GB"
        raise OptimiseError(f"the recipe takes {gb}, more than --disk {disk:g}; raise --disk")
    if hours > asked.hours:
        raise OptimiseError(
            f"the recipe alone takes {hours:.1f} of {asked.hours:g} hours here; raise --hours, or use a GPU"
        )


def _present(asked: _Asked) -> "tuple[Candidate, Variant]":
    """The candidate of the present try, first that of `fit`, and its variant."""
    from slimqwen.search import optimise
    from slimqwen.search.candidate import Candidate

    base, journal = asked.base, asked.journal
    if journal.candidate is None:
        journal.candidate = optimise.choose_first(base, asked.text, asked.goal).changes
    if not journal.candidate:
        raise OptimiseError(
            f"no recipe makes {base.name} smaller or faster by the figures of `slimqwen fit {base.name}`; run "
            f"`slimqwen tune {base.name}` to find its fastest drafts"
        )
    candidate = Candidate(**journal.candidate)
    made = optimise.make_variant(candidate, base, asked.text, asked.evaluation, asked.goal)
    return candidate, made


def _run(asked: _Asked) -> bool:
    """Go on from where the journal stands; returns whether a variant is served in place of the base."""
    try:
        made = _try_recipes(asked)
        if made is None:
            return _give_up(asked, "no recipe passed")
        variant = _tune(asked, made)
        if not _prove(asked, variant):
            return _give_up(asked, f"{variant.name} did not pass the last gate")
        return _time_and_promote(asked, variant)
    except _HoursOverError as error:
        return _give_up(asked, str(error))


def _try_recipes(asked: _Asked) -> Variant | None:
    """Make and judge candidates on the search's side until one passes; else the last that nothing failed, or None."""
    from slimqwen.captured_log import capture_output
    from slimqwen.search import optimise
    from slimqwen.search.candidate import describe_changes

    journal = asked.journal
    _fetch(asked)
    while True:
        candidate, variant = _present(asked)
        judged = next((each for each in journal.tries if each["variant"] == variant.name), None)
        if judged is None:
            number = f"try {len(journal.tries) + 1} of {optimise.MOST_TRIES}"
            asked.begin("recipe", f"{number}, {describe_changes(candidate.changes)}")
            found = _judge(asked, variant, "search")
            update_page(variant.folder, newest=True)
            judged = {
                "variant": variant.name,
                "verdict": str(found.verdict),
                "reason": found.reason or "every check passes on the search's items",
            }
            back = None
            if not found.passed and len(journal.tries) + 1 < optimise.MOST_TRIES:
                log = variant.root / "logs" / f"optimise-{variant.name}.log"
                with asked.progress() as progress, capture_output(log):
                    back = optimise.take_back(candidate, found, variant, progress)
            if back:
                journal.candidate = back[0].changes
                judged["taken back"] = back[1]
            journal.tries.append(judged)
            asked.end("recipe", optimise.Ended(optimise.describe_try(judged), found.passed))
        if judged["verdict"] == "pass":
            return variant
        if "taken back" not in judged:
            # What the search's items leave undecided is for the proof to decide, on others.
            undecided = [each["variant"] for each in journal.tries if each["verdict"] == "inconclusive"]
            return variants.load(undecided[-1], variant.root) if undecided else None


def _fetch(asked: _Asked) -> None:
    """Fetch what the evaluation and the recipe's text lack."""
    from slimqwen.evals.suites import corpora, datasets
    from slimqwen.evals.suites.suite import Suite
    from slimqwen.recipe import variant_recipe

    base = asked.base
    suite = Suite.load(asked.evaluation, base.root)
    with asked.progress() as progress:
        if suite.datasets or suite.nltk:
            datasets.fetch_datasets(suite.datasets, suite.nltk, base.root, progress)
        for name in variant_recipe.list_corpora(_present(asked)[1]):
            corpora.fetch_corpus(name, base, progress)


def _judge(asked: _Asked, variant: Variant, side: Literal["search", "proof"]) -> "Finalist":
    """Make a variant and judge it on one side of the split, on the search's only until a check fails."""
    from slimqwen.processes.local import LocalExecutor
    from slimqwen.search.proof import prove_finalists

    root, is_try = asked.base.root, side == "search"
    with asked.progress() as progress:
        # One task at a time, on all CPUs: a record of fewer threads does not hold for the gate, which has them all.
        executor = LocalExecutor(root, progress, warm=True, width=1)
        proof = prove_finalists(
            [variant.name], executor, root, command=command(), side=side, first_failure_ends=is_try
        )
    return proof.finalists[0]


def _tune(asked: _Asked, variant: Variant) -> Variant:
    """The variant with the drafts that pay here, where ten minutes are left to find them; else as it is."""
    from slimqwen.search.optimise import Ended

    name = f"{variant.name}-tuned"
    minutes = min(_MOST_TUNING, 60 * asked.hours_left / 2)

    def tune() -> Ended:
        if asked.goal == "memory":
            return Ended("skipped: drafts take memory")
        if minutes < _LEAST_TUNING:
            return Ended(f"skipped: {minutes:.0f} minutes are left for it, {_LEAST_TUNING:.0f} are needed")
        from slimqwen.host_load import HostBusyError
        from slimqwen.records import store
        from slimqwen.search.tune import Tune, apply_chosen, tune_variant

        try:
            with asked.progress() as progress:
                path = tune_variant(variant, None, minutes=minutes, command=command(), progress=progress)
        except HostBusyError as error:
            return Ended(
                f"skipped: host busy ({error.cause}); `slimqwen tune {variant.name}` measures drafts"
            )
        record = store.read_record(path, Tune)
        applied = apply_chosen(record, variant, name)
        state = f"applied in {name}" if applied else "nothing to apply"
        return Ended(f"{record.advice[0]} {state} ({relative(path)})")

    if name not in variants.names(variant.root):
        asked.once("tune", f"which drafts pay here, {minutes:.0f} minutes at most", tune)
    return variants.load(name, variant.root) if name in variants.names(variant.root) else variant


def _prove(asked: _Asked, variant: Variant) -> bool:
    """Judge what will be served on items that no try saw, then on all for its page; returns whether both pass."""
    from slimqwen.search.optimise import Ended

    def prove() -> Ended:
        judged = _judge(asked, variant, "proof")
        reason = judged.reason or "every check passes on items that no try saw"
        needed = max(
            (each.items_needed or 0 for each in judged.findings if each.verdict == "inconclusive"), default=0
        )
        more = f"; {needed:,} items were planned to decide" if needed else ""
        return Ended(f"{judged.verdict}: {reason}{more}", judged.passed)

    def gate() -> Ended:
        from slimqwen import api

        with asked.progress() as progress:
            judged = api.judge(variant, progress=progress, warn=say).record
        update_page(variant.folder, newest=True)
        return Ended(str(judged.verdict), judged.verdict == "pass")

    is_proven = asked.once("proof", "the last gate, on items that no try saw", prove).passed
    return is_proven and asked.once("gate", "all items, for the variant's page", gate).passed


def _time_and_promote(asked: _Asked, variant: Variant) -> bool:
    """Time the variant in turns with its baseline; promote it if it gained what it was made for; say what to serve."""
    from slimqwen.checkpoint.files import bytes_on_disk
    from slimqwen.evals import promotion
    from slimqwen.host_load import HostBusyError
    from slimqwen.report import choice
    from slimqwen.report.unproven import find_unproven
    from slimqwen.search.optimise import Ended

    def timing() -> Ended:
        from slimqwen.bench import latency
        from slimqwen.bench.workload import Workload, name_workload

        workload = Workload.load(name_workload(variant), variant.root)
        with asked.progress() as progress:
            paths = latency.measure_latency(
                [asked.base, variant], workload, command=command(), progress=progress
            )
        return Ended((latency.give_verdict(*paths) or "not decided").partition(" Next: ")[0])

    try:
        timed = asked.once("timing", f"{asked.base.name} and {variant.name} in turns", timing).said
    except HostBusyError as error:
        timed = f"not decided: {error.cause or error}; the same command goes on"
    decision = choice.decide_here(variant, asked.goal)
    if is_served := decision.serve == variant.name:
        asked.begin("promote", variant.name)
        with asked.progress() as progress:
            promotion.promote_variant(variant, find_unproven(variant.root, variant.name), progress)
        asked.end("promote", Ended(f"{variant.name} is promoted"))
    update_page(variant.folder, newest=True)
    say(f"speed: {timed}")
    before, after = (bytes_on_disk(one.weights) / 1e6 for one in (asked.base, variant))
    say(f"size: {after:,.1f} MB, that of {asked.base.name} is {before:,.1f} MB")
    taken = [each["taken back"] for each in asked.journal.tries if "taken back" in each]
    say(f"given up: {'; '.join(taken) or 'nothing'}")
    say(f"page: {relative(variant.folder / 'README.md')}")
    say(f"serve: `slimqwen serve {decision.serve}`: {decision.reason}")
    return is_served


def _give_up(asked: _Asked, why: str) -> bool:
    """Say what was tried, and that the base is to be served; returns False."""
    _say_steps(asked.journal)
    say(f"serve the base: `slimqwen serve {asked.base.name}`: {why}")
    return False


def _say_status(journal: "Optimisation | None", name: str) -> None:
    if journal is None:
        raise OptimiseError(f"no optimisation of {name} has begun; `slimqwen optimise {name}` begins one")
    say(f"{name}: at {journal.step or 'its beginning'}; left: {', '.join(journal.left) or 'nothing'}")
    _say_steps(journal)
    say(f"time so far: {journal.seconds / 3600:.1f} hours")


def _say_steps(journal: "Optimisation") -> None:
    from slimqwen.search.optimise import describe_try

    for each in journal.tries:
        say(f"try {describe_try(each)}")
    for name, ended in journal.steps.items():
        if name != "recipe":
            say(f"{name}: {ended.said}")
