"""The tuner: measures arms in turns on fresh servers, all with the same requests, until the winner is clear.

Before an arm is timed for the first time, the responses of that very server are compared with a plain engine's.
Finished turns are kept in a journal, from which the same command continues.
"""

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen import host_load
from slimqwen.bench import BenchError
from slimqwen.bench.latency.measured_variant import (
    MeasuredVariant,
    SharedState,
    own_prompts,
    read_cache_labels,
)
from slimqwen.bench.workload import PromptClass, Workload, name_workload
from slimqwen.errors import SlimqwenError
from slimqwen.evals import EvalError
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.evals.engine_runs import EngineProcesses
from slimqwen.host_load import Watch
from slimqwen.plan import start
from slimqwen.processes import spawner
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.journal import Journal, journal_file, locked
from slimqwen.report import choice
from slimqwen.search import SearchError
from slimqwen.search.tune.arms import (
    UNDRAFTED,
    Arm,
    find_refused_fields,
    list_arms,
    probe_configurations,
    vary_sampling,
)
from slimqwen.search.tune.contest import Contest, LoadTurn, Turn
from slimqwen.search.tune.record import Tune
from slimqwen.search.tune.responses import SETTINGS, PlainResponses, WrongResponsesError
from slimqwen.serving import checks, speed_only
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.shared_server import ServerLostError, share_server
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant, scaffold
from slimqwen.yaml_file import YamlPart

_LOADS = (1, 4, 16)


@spawner.share_spawner()
def tune_variant(
    variant: Variant,
    loads: Sequence[int] | None,
    *,
    minutes: float,
    command: Sequence[str],
    temperature: float | None = None,
    port: int | None = None,
    even_if_busy: bool = False,
    progress: Progress = silent,
) -> Path:
    """Measure the ways to speculate for a variant at each load, and write the record.

    Args:
        loads: numbers of concurrent requests; None for those of 1, 4 and 16 that the variant runs at a time.
        minutes: time after which no turn begins, including that of an interrupted run.
        temperature: temperature of the timed requests; None for the workload's.

    Returns:
        The record in the variant's folder.

    Raises:
        HostBusyError: the host was too busy in all attempts at a turn; finished turns are kept.
        ServingError, ServerLostError: the undrafted server cannot be started, or died.
        WrongResponsesError: the undrafted server responds differently from a plain engine.
        BenchError, CorpusError: the workload does not fit the loads or the server, or has too little text.
    """
    started = provenance.utc_now()
    workload = Workload.load(name_workload(variant), variant.root)
    if temperature is not None:
        workload = workload.model_copy(update={"sampling": {**workload.sampling, "temperature": temperature}})
    subject = _Subject.of_variant(variant, workload, loads, port)
    undrafted = subject.resolve(UNDRAFTED)
    checks.check_command(undrafted)
    with locked(_journal(subject, even_if_busy)) as journal:
        tuner = _Tuner(subject, journal, even_if_busy, progress)
        tuner.take_turns(60 * minutes)
        record = tuner.make_record(started, command)
        path = store.write_record(variant.folder, record, tuner.list_items())
        if record.verdict != Verdict.INCONCLUSIVE:  # an inconclusive run can be continued with more minutes
            journal.discard()
    return path


def _journal(subject: "_Subject", even_if_busy: bool) -> Path:
    texts = provenance.data_digests(subject.inputs, subject.variant.root)
    inputs = (subject.workload.model_dump(mode="json"), texts, subject.sequences, even_if_busy)
    return journal_file("tune", subject.resolve(UNDRAFTED), *inputs)


@dataclass(frozen=True)
class _Subject:
    """The variant that is tuned, and how it is measured.

    Attributes:
        served: the variant's own command.
        workload: workload with each class of prompts once for every load.
        sequences: max_num_seqs of every arm; None if the variant's own is large enough for every load.
    """

    variant: Variant
    served: ServerCommand
    workload: Workload
    loads: Sequence[int]
    sequences: int | None
    port: int | None

    @classmethod
    def of_variant(
        cls, variant: Variant, workload: Workload, loads: Sequence[int] | None, port: int | None
    ) -> "_Subject":
        served = ServerCommand.resolve(variant, port=port)
        limit = served.flags.get("max-num-seqs")
        most = limit or max(_LOADS)
        if workload.prompts:
            prompts, output_tokens = zip(*own_prompts(workload, variant), strict=True)
            workload = workload.of_own_prompts(prompts, output_tokens)
            most = min(most, len(prompts))
        chosen = sorted(set(loads or [load for load in (*_LOADS, most) if load <= most]))
        workload = _spread_over_loads(workload, chosen)
        sequences = max(chosen) if limit and limit < max(chosen) else None
        return cls(variant, served, workload, chosen, sequences, port)

    @property
    def inputs(self) -> Sequence[Path | YamlPart]:
        """Files that decide the requests, the timed ones and those whose responses are compared."""
        root = self.variant.root
        return [*self.workload.inputs(root), *EngineSettings.load(SETTINGS, root).inputs(root)]

    def with_arm(self, arm: Arm) -> Variant:
        """The variant with the config.env lines of an arm."""
        return self.variant.with_lines(arm.list_lines(self.served, self.sequences))

    def resolve(self, arm: Arm) -> ServerCommand:
        """The command that serves an arm."""
        return ServerCommand.resolve(self.with_arm(arm), port=self.port)


def _spread_over_loads(workload: Workload, loads: Sequence[int]) -> Workload:
    """The workload with each of its classes at every load, one load after the other.

    Raises:
        BenchError: there are fewer own prompts than a load has requests in flight.
    """
    if workload.prompts and workload.classes[0].requests < max(loads):
        raise BenchError(
            f"{workload.prompts}: {workload.classes[0].requests} prompts are too few for a load of {max(loads)}; write "
            "as many, or lower --load"
        )
    classes = [
        PromptClass(
            name=f"{c.name} at {load}",
            prompt_tokens=c.prompt_tokens,
            output_tokens=c.output_tokens,
            requests=c.requests if workload.prompts else max(c.requests, 2 * load),
            spread=c.spread,
            concurrency=load,
        )
        for load in loads
        for c in (workload.classes[:1] if workload.shape == "prefixes" else workload.classes)
    ]
    return workload.model_copy(update={"classes": tuple(classes), "shape": "new_text"})


class _Tuner:
    """A tuning in progress."""

    def __init__(self, subject: _Subject, journal: Journal, even_if_busy: bool, progress: Progress) -> None:
        self._subject, self._journal = subject, journal
        self._even_if_busy, self._progress = even_if_busy, progress
        self._log = subject.variant.root / "logs" / f"tune-{subject.variant.name}.log"
        # Draft sampling and rejection sampling are varied only for sampled requests: greedy ones do not use them.
        self._temperature = subject.workload.sampling.get("temperature", 0.0)
        arms = list_arms(subject.served)
        sampled = [one for arm in arms if arm.is_sampled and self._temperature for one in vary_sampling(arm)]
        prepared = journal.answer("prepared", lambda: self._prepare([*arms, *sampled]))
        self._refused: dict[str, str] = prepared["refused"]
        plain = prepared["plain"]
        self._plain = PlainResponses.model_validate(plain) if plain else None
        self._contest = Contest(arms, self._refused)

    def _prepare(self, arms: Sequence[Arm]) -> dict[str, Any]:
        """Find the refused arms, with reasons by name, and the plain engine's responses; returns both as JSON."""
        subject, undrafted = self._subject, self._subject.resolve(UNDRAFTED)
        refused: dict[str, str] = {}
        argvs: dict[str, Sequence[str]] = {}
        needed = find_refused_fields(subject.workload, subject.variant.root, undrafted.platform)
        for arm in arms:
            if arm.speculation and needed:
                refused[arm.name] = needed
                continue
            try:
                command = subject.resolve(arm)
                checks.check_weights(command)
                checks.refuse_trouble(command, start.match_flag_trouble(command).dies)
                argvs[arm.name] = command.argv[3:]
            except SlimqwenError as error:
                refused[arm.name] = self._shorten(error)
        settings = EngineSettings.load(SETTINGS, subject.variant.root)
        with EngineProcesses.started(undrafted, settings.timeout_s, self._log) as processes:
            reasons = processes.run(
                probe_configurations, list(argvs.values()), "configurations", self._progress
            )
            if isinstance(reasons, str):
                raise EvalError(f"vLLM's configuration failed ({reasons}); read why in its log: {self._log}")
            refused |= {name: reason for name, reason in zip(argvs, reasons, strict=True) if reason}
            if reason := refused.get(UNDRAFTED.name):
                raise SearchError(
                    f"{subject.variant.name} cannot be served without drafts ({reason}); correct its config.env"
                )
            plain = None
            if not speed_only.is_speed_only(undrafted.variant):
                plain = PlainResponses.generate(processes, settings, self._progress).model_dump(mode="json")
        return {"refused": refused, "plain": plain}

    def _shorten(self, error: SlimqwenError) -> str:
        """The error's message without paths of this machine."""
        return str(provenance.portable(str(error), self._subject.variant.root))

    def take_turns(self, seconds: float) -> None:
        """Measure turns until the winner is clear or `seconds` have been spent on turns."""
        spent = 0.0
        for number, arm in self._next_turns():
            if (known := self._journal.get([number, arm.name])) is None:
                if spent >= seconds:
                    return
                known = self._take_turn(arm, number).model_dump(mode="json")
                self._journal.add([number, arm.name], known)
            turn = Turn.model_validate(known)
            self._contest.add_turn(turn)
            spent += turn.seconds

    def _next_turns(self) -> Iterator[tuple[int, Arm]]:
        """Yield the turns, round by round; every second round reverses the order of arms, against drift of the host."""
        contest = self._contest
        for number in itertools.count():
            if number and self._temperature:
                self._add_variations()
            others = [arm for arm in contest.alive if arm is not UNDRAFTED]
            for arm in (UNDRAFTED, *(reversed(others) if number % 2 else others)):
                yield number, arm
            contest.end_slow_arms()
            if contest.is_decided or contest.find_fastest() is None:
                return

    def _add_variations(self) -> None:
        """Add arms that vary how drafts of the fastest model-drafted arm are sampled and verified."""
        contest = self._contest
        sampled = [arm for arm in contest.alive if arm.is_sampled]
        fastest = max(sampled, key=lambda arm: contest.describe(arm).speed, default=None)
        known = {arm.name for arm in contest.arms}
        contest.arms += [arm for arm in vary_sampling(fastest) if arm.name not in known] if fastest else []

    def _take_turn(self, arm: Arm, number: int) -> Turn:
        """Start an arm's server and send it all requests; if it died or was wrong, the turn states the failure."""
        begun = time.monotonic()
        try:
            turn, host = host_load.retry_until_idle(
                lambda watch: self._measure_arm(arm, number, watch),
                f"{arm.name}, round {number + 1}",
                even_if_busy=self._even_if_busy,
            )
        except (ServingError, ServerLostError, WrongResponsesError) as error:
            if arm is UNDRAFTED:
                raise
            failure = self._shorten(error)
            return Turn(arm=arm.name, number=number, seconds=time.monotonic() - begun, failure=failure)
        return turn.model_copy(update={"seconds": time.monotonic() - begun, "host": host})

    def _measure_arm(self, arm: Arm, number: int, watch: Watch) -> Turn:
        subject, variant = self._subject, self._subject.with_arm(arm)

        def progress(activity: str, done: float, total: float) -> None:
            self._progress(f"{arm.name}: {activity.removeprefix(f'{variant.name}: ')}", done, total)

        side = MeasuredVariant(variant, SharedState(subject.workload, 1, 1, progress))
        log = self._log.with_stem(f"{self._log.stem}-{re.sub('[^A-Za-z0-9]+', '-', arm.name)}")
        near_ties = 0
        with share_server(variant, port=subject.port, log=log, progress=progress) as served:
            if self._plain and not self._contest.turns_of(arm):
                near_ties = self._plain.compare(served.server, sorted({1, max(subject.loads)}), progress)
            side.take_round(0, served, watch)  # round number 0: every round sends the same requests
            kv_tokens = read_cache_labels(served).get("kv_cache_size_tokens", "")
            loads = tuple(_read_load(side, load) for load in subject.loads)
        return Turn(
            arm=arm.name,
            number=number,
            seconds=0,
            loads=loads,
            kv_tokens=int(kv_tokens) if kv_tokens.isdigit() else None,
            near_ties=near_ties,
        )

    def list_items(self) -> list[dict[str, Any]]:
        """One item for each turn and load."""
        return [
            {"arm": turn.arm, "round": turn.number, **each.as_json()}
            for turn in self._contest.turns
            for each in turn.loads
        ]

    def make_record(self, started: str, command: Sequence[str]) -> Tune:
        """Make the record of all turns so far."""
        subject, contest, workload = self._subject, self._contest, self._subject.workload
        chosen = _choose_arm(contest)
        lines = chosen.list_lines(subject.served, subject.sequences) if chosen else {}
        return Tune(
            variant=subject.variant.name,
            workload=workload.name,
            temperature=self._temperature,
            near_tie_nats=self._plain.near_tie_nats if self._plain else None,
            sequences=subject.sequences,
            arms=contest.describe_all(),
            chosen=chosen.name if chosen else None,
            lines={key: f"'{value}'" if value.startswith("{") else value for key, value in lines.items()},
            verdict=contest.verdict,
            provenance=provenance.describe(
                subject.resolve(UNDRAFTED),
                command,
                started,
                datasets=subject.inputs,
                seeds={"documents": workload.seed},
                host_load=host_load.highest_load([turn.host for turn in contest.turns if turn.host]),
            ),
        )


def _read_load(side: MeasuredVariant, load: int) -> LoadTurn:
    """Sum up the requests of one turn at a load.

    Raises:
        ServerLostError: requests failed.
    """
    results = [side.results[c.name] for c in side.classes if c.limit == load]
    rows = [row for result in results for row in result.rows]
    if failed := [row["error"] for row in rows if row["error"]]:
        raise ServerLostError(
            f"{len(failed)} of {len(rows)} requests failed, {load} at a time ({failed[0]}); read why in the server's "
            f"log: {side.log}"
        )
    return LoadTurn(
        load=load,
        output_tokens=sum(row["output_tokens"] for row in rows),
        seconds=sum(seconds for result in results for seconds in result.durations_s),
        ttft_ms=tuple(row["ttft_ms"] for row in rows),
        e2el_ms=tuple(row["e2el_ms"] for row in rows),
        drafts=sum(result.drafts for result in results),
        accepted_tokens=sum(result.accepted_tokens for result in results),
    )


def _choose_arm(contest: Contest) -> Arm | None:
    """The arm to serve by the rule of all verbs; None while more turns could change it. Arms lose no quality."""
    fastest = contest.find_fastest()
    if fastest is None:
        return UNDRAFTED if contest.verdict == Verdict.FAIL else None
    is_faster = {Verdict.PASS: True, Verdict.FAIL: False}.get(contest.verdict)
    decision = choice.decide(choice.Case(fastest.name, UNDRAFTED.name, Verdict.PASS, is_faster))
    if not decision.is_final:
        return None
    return fastest if decision.serve == fastest.name else UNDRAFTED


def apply_chosen(record: Tune, variant: Variant, name: str) -> Path | None:
    """Write a variant with the lines of the chosen arm; None if no arm is chosen, or `variant` has these lines."""
    if not record.lines:
        return None
    hypothesis = f"{variant.name} is faster with {record.chosen} and gives the same responses."
    return scaffold.create(name, variant.name, hypothesis, lines=record.lines, root=variant.root)
