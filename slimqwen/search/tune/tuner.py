"""The tuner: measures arms in turns on fresh servers, all with the same requests, until the winner is clear.

Drafts come first; then each change of a setting beside the drafts that won; then the union of what paid, in turns.
Before an arm is timed for the first time, the responses of that very server are compared with the reference engine's.
Finished turns are kept in a journal, from which the same command continues.
"""

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimqwen import host_load
from slimqwen.bench.client import counters
from slimqwen.bench.latency.measured_variant import (
    PREFIX_HITS,
    MeasuredVariant,
    SharedState,
    read_cache_labels,
)
from slimqwen.bench.workload import Workload, name_workload
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.evals.engine_runs import EngineProcesses
from slimqwen.host_load import Watch
from slimqwen.processes import spawner
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.journal import Journal, journal_file, locked
from slimqwen.report import choice
from slimqwen.search import SearchError
from slimqwen.search.tune.arms import UNDRAFTED, Arm, list_arms, own_arm
from slimqwen.search.tune.changes import list_changes
from slimqwen.search.tune.contest import Contest, LoadTurn, Turn
from slimqwen.search.tune.preparation import prepare_arms, shorten
from slimqwen.search.tune.record import FlagContest, Tune
from slimqwen.search.tune.responses import SETTINGS, PlainResponses, WrongResponsesError
from slimqwen.search.tune.subject import SESSION_TOKENS, SESSIONS, TuneSubject
from slimqwen.serving import checks, speed_only
from slimqwen.serving.errors import ServingError
from slimqwen.serving.shared_server import ServerLostError, SharedServer, share_server
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant, scaffold

FLAGS = ("none", "exact", "lossy")
"""Serving flags to try: none; those that keep greedy responses; also those that round numbers otherwise."""


@spawner.share_spawner()
def tune_variant(
    variant: Variant,
    loads: Sequence[int] | None,
    *,
    minutes: float,
    command: Sequence[str],
    flags: str = "none",
    sessions: bool = True,
    temperature: float | None = None,
    port: int | None = None,
    even_if_busy: bool = False,
    progress: Progress = silent,
) -> Path:
    """Time ways to speculate, and then serving flags, for a variant at each load, and write the record.

    If the minutes do not suffice, the record's verdict is inconclusive, and the same call with more minutes continues.

    Args:
        loads: numbers of concurrent requests; None for 1, 4, 16 and max_num_seqs, up to max_num_seqs.
        minutes: time limit after which no turn begins; the time of an interrupted run counts.
        command: command line that the record states as its origin.
        flags: which serving flags to try: "none"; "exact", those that keep greedy responses; or "lossy", also those
            that make vLLM round differently. If any, drafts get at most half of the minutes.
        sessions: whether flags are timed over sessions of an agent, too.
        temperature: temperature of the timed requests; None for the workload's.
        port: TCP port of the servers; None for the variant's own.
        even_if_busy: whether to keep turns that were timed on a busy host.

    Returns:
        File of the record, in the variant's folder.

    Raises:
        HostBusyError: the host was too busy in all attempts at a turn; finished turns are kept.
        ServingError, ServerLostError: the undrafted server cannot be started, or died.
        WrongResponsesError: the undrafted server responds differently from the reference engine.
        BenchError, CorpusError: the workload does not fit the loads or the server, or has too little text.
    """
    started = provenance.utc_now()
    workload = Workload.load(name_workload(variant), variant.root)
    if temperature is not None:
        workload = workload.model_copy(update={"sampling": {**workload.sampling, "temperature": temperature}})
    subject = TuneSubject.of_variant(variant, workload, loads, port, sessions=sessions and flags != "none")
    undrafted = subject.resolve(UNDRAFTED)
    checks.check_command(undrafted)
    with locked(_journal(subject, even_if_busy, flags)) as journal:
        tuner = _Tuner(subject, journal, even_if_busy, progress)
        tuner.take_turns(60 * minutes, flags)
        record = tuner.make_record(started, command)
        path = store.write_record(variant.folder, record, tuner.list_items())
        if record.is_decided:  # an open run can be continued with more minutes
            journal.discard()
    return path


def _journal(subject: TuneSubject, even_if_busy: bool, flags: str = "none") -> Path:
    texts = provenance.data_digests(subject.inputs, subject.variant.root)
    workloads = [each and each.model_dump(mode="json") for each in (subject.workload, subject.sessions)]
    inputs = (workloads, texts, subject.sequences, even_if_busy, flags)
    return journal_file("tune", subject.resolve(UNDRAFTED), *inputs)


class _Tuner:
    """A tuning in progress."""

    def __init__(
        self, subject: TuneSubject, journal: Journal, even_if_busy: bool, progress: Progress
    ) -> None:
        self._subject, self._journal = subject, journal
        self._even_if_busy, self._progress = even_if_busy, progress
        self._log = subject.variant.root / "logs" / f"tune-{subject.variant.name}.log"
        self._temperature = subject.workload.sampling.get("temperature", 0.0)
        arms = list_arms(subject.served)
        self._refused, self._figures = self._prepare("drafts", arms)
        if reason := self._refused.get(UNDRAFTED.name):
            raise SearchError(
                f"{subject.variant.name} cannot be served without drafts ({reason}); correct its config.env"
            )
        plain = journal.answer("plain", self._respond_plainly)
        self._plain = PlainResponses.model_validate(plain) if plain else None
        self._drafts = Contest(arms, self._refused)
        self._flags: list[Contest] = []
        self._spent = 0.0

    def _prepare(self, key: str, arms: Sequence[Arm]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        log = self._log.with_stem(f"{self._log.stem}-plans")
        refused, figures = self._journal.answer(
            f"prepared {key}", lambda: prepare_arms(self._subject, arms, log, self._progress)
        )
        return refused, figures

    def _respond_plainly(self) -> dict[str, Any] | None:
        """The plain engine's responses as JSON; None for random weights."""
        undrafted = self._subject.resolve(UNDRAFTED)
        if speed_only.is_speed_only(undrafted.variant):
            return None
        settings = EngineSettings.load(SETTINGS, undrafted.variant.root)
        with EngineProcesses.started(undrafted, settings.timeout_s, self._log) as processes:
            return PlainResponses.generate(processes, settings, self._progress).model_dump(mode="json")

    def take_turns(self, seconds: float, flags: str) -> None:
        """Measure turns until the winners are clear or `seconds` have been spent on turns."""
        self._run("drafts", self._drafts, seconds if flags == "none" else seconds / 2)
        if flags == "none":
            return
        reference = _choose_drafts(self._drafts) or own_arm(self._subject.served)
        self._subject = self._subject.for_flags()
        changes = list_changes(
            self._figures.get(reference.name, {}), rounding=flags == "lossy", sampling=self._temperature > 0
        )
        arms = [reference, *(replace(reference, parts=(change,)) for change in changes)]
        refused, _ = self._prepare(f"flags beside {reference.name}", arms)
        singles = Contest(arms, refused, reference, separately=True)
        self._flags.append(singles)
        if self._run("flags", singles, seconds) and (paid := singles.paid):
            exact = [arm for arm in paid if not arm.rounds]
            unions = [*(arms[0].unite(arms) for arms in (paid, exact) if arms), paid[0]]
            union = Contest([reference, *{arm.name: arm for arm in unions}.values()], {}, reference)
            self._flags.append(union)
            self._run("union", union, seconds)

    def _run(self, stage: str, contest: Contest, seconds: float) -> bool:
        """Measure a contest until it is decided, or `seconds` have been spent in all; returns whether it is."""
        for number, arm in self._next_turns(contest):
            key = [stage, contest.reference.name, number, arm.name]
            if (known := self._journal.get(key)) is None:
                if self._spent >= seconds:
                    return False
                known = self._take_turn(contest, arm, number).model_dump(mode="json")
                self._journal.add(key, known)
            turn = Turn.model_validate(known)
            contest.add_turn(turn)
            self._spent += turn.seconds
        return contest.verdict != Verdict.INCONCLUSIVE

    def _next_turns(self, contest: Contest) -> Iterator[tuple[int, Arm]]:
        """Yield the turns, round by round; every second round reverses the order of arms, against drift of the host."""
        reference = contest.reference
        for number in itertools.count():
            others = [arm for arm in contest.alive if arm is not reference]
            for arm in (reference, *(reversed(others) if number % 2 else others)):
                yield number, arm
            contest.end_slow_arms()
            if contest.is_decided or contest.find_fastest() is None:
                return

    def _take_turn(self, contest: Contest, arm: Arm, number: int) -> Turn:
        """Start an arm's server and send it all requests; if it died or was wrong, the turn states the failure."""
        begun = time.monotonic()
        try:
            turn, host = host_load.retry_until_idle(
                lambda watch: self._measure_arm(contest, arm, number, watch),
                f"{arm.name}, round {number + 1}",
                even_if_busy=self._even_if_busy,
            )
        except (ServingError, ServerLostError, WrongResponsesError) as error:
            if arm is contest.reference:
                raise
            failure = shorten(error, self._subject)
            return Turn(arm=arm.name, number=number, seconds=time.monotonic() - begun, failure=failure)
        return turn.model_copy(update={"seconds": time.monotonic() - begun, "host": host})

    def _measure_arm(self, contest: Contest, arm: Arm, number: int, watch: Watch) -> Turn:
        subject, variant = self._subject, self._subject.with_arm(arm)

        def progress(activity: str, done: float, total: float) -> None:
            self._progress(f"{arm.name}: {activity.removeprefix(f'{variant.name}: ')}", done, total)

        side = MeasuredVariant(variant, SharedState(subject.workload, 1, 1, progress))
        log = self._log.with_stem(f"{self._log.stem}-{re.sub('[^A-Za-z0-9]+', '-', arm.name)}")
        near_ties = 0
        with share_server(variant, port=subject.port, log=log, progress=progress) as served:
            if self._plain and not arm.rounds and not contest.turns_of(arm):
                near_ties = self._compare(self._plain, arm, served, progress)
            side.take_round(0, served, watch)  # round number 0: every round sends the same requests
            loads = [_read_load(side, load) for load in subject.loads]
            if subject.sessions and contest is not self._drafts:
                side = MeasuredVariant(variant, SharedState(subject.sessions, 1, 1, progress))
                context = min(served.max_model_len, SESSION_TOKENS)
                side.take_round(0, replace(served, max_model_len=context), watch)
                loads.append(_read_load(side, SESSIONS))
            kv_tokens = read_cache_labels(served).get("kv_cache_size_tokens", "")
        return Turn(
            arm=arm.name,
            number=number,
            seconds=0,
            loads=tuple(loads),
            kv_tokens=int(kv_tokens) if kv_tokens.isdigit() else None,
            near_ties=near_ties,
        )

    def _compare(self, plain: PlainResponses, arm: Arm, served: SharedServer, progress: Progress) -> int:
        """Compare a server's greedy responses with the plain engine's; returns the number of near ties.

        Raises:
            WrongResponsesError: responses differ by more than near ties, or none came from a prefix cache that the arm
                switches on.
        """
        has_cache = read_cache_labels(served).get("enable_prefix_caching") == "True"
        caches = has_cache and "VLLM_ENABLE_PREFIX_CACHING" in arm.changes
        loads = [1, max(self._subject.loads)]
        near_ties = plain.compare(served.server, loads if caches else sorted({*loads}), progress)
        if caches and not counters(served.server.base_url).get(PREFIX_HITS):
            raise WrongResponsesError(
                "no compared response came from the prefix cache, so nothing shows that it is right; raise "
                "VLLM_MAX_MODEL_LEN"
            )
        return near_ties

    def list_items(self) -> list[dict[str, Any]]:
        """One item for each turn and load."""
        return [
            {"arm": turn.arm, "beside": contest.reference.name, "round": turn.number, **each.as_json()}
            for contest in (self._drafts, *self._flags)
            for turn in contest.turns
            for each in turn.loads
        ]

    def make_record(self, started: str, command: Sequence[str]) -> Tune:
        """Make the record of all turns so far."""
        subject, contest, workload = self._subject, self._drafts, self._subject.workload
        turns = [turn for each in (contest, *self._flags) for turn in each.turns]
        chosen = _choose_drafts(contest)
        if len(self._flags) > 1 and self._flags[-1].verdict == Verdict.PASS:
            chosen = self._flags[-1].find_fastest()
        lines = chosen.list_lines(subject.served, subject.sequences) if chosen else {}
        return Tune(
            variant=subject.variant.name,
            workload=workload.name,
            temperature=self._temperature,
            near_tie_nats=self._plain.near_tie_nats if self._plain else None,
            sequences=subject.sequences,
            arms=contest.describe_all(),
            flags=tuple(
                FlagContest(reference=each.reference.name, arms=each.describe_all(), verdict=each.verdict)
                for each in self._flags
            ),
            chosen=chosen.name if chosen else None,
            lines={key: f"'{value}'" if value.startswith("{") else value for key, value in lines.items()},
            verdict=contest.verdict,
            provenance=provenance.describe(
                subject.resolve(UNDRAFTED),
                command,
                started,
                datasets=subject.inputs,
                seeds={"documents": workload.seed},
                host_load=host_load.highest_load([turn.host for turn in turns if turn.host]),
            ),
        )


def _read_load(side: MeasuredVariant, load: int | str) -> LoadTurn:
    """Sum up the requests of one turn at a load.

    Raises:
        ServerLostError: requests failed.
    """
    results = [side.results[c.name] for c in side.classes if load in (c.limit, SESSIONS)]
    rows = [row for result in results for row in result.rows]
    if failed := [row["error"] for row in rows if row["error"]]:
        raise ServerLostError(
            f"{len(failed)} of {len(rows)} requests failed at load {load} ({failed[0]}); read why in the server's log: "
            f"{side.log}"
        )
    return LoadTurn(
        load=str(load),
        output_tokens=sum(row["output_tokens"] for row in rows),
        seconds=sum(seconds for result in results for seconds in result.durations_s),
        ttft_ms=tuple(row["ttft_ms"] for row in rows),
        e2el_ms=tuple(row["e2el_ms"] for row in rows),
        drafts=sum(result.drafts for result in results),
        accepted_tokens=sum(result.accepted_tokens for result in results),
    )


def _choose_drafts(contest: Contest) -> Arm | None:
    """The drafts to serve by the rule of all verbs; None while more turns could change it. Drafts lose no quality."""
    fastest = contest.find_fastest()
    if fastest is None:
        return UNDRAFTED if contest.verdict == Verdict.FAIL else None
    is_faster = {Verdict.PASS: True, Verdict.FAIL: False}.get(contest.verdict)
    decision = choice.decide(choice.Case(fastest.name, UNDRAFTED.name, Verdict.PASS, is_faster))
    if not decision.is_final:
        return None
    return fastest if decision.serve == fastest.name else UNDRAFTED


def apply_chosen(record: Tune, variant: Variant, name: str) -> Path | None:
    """Write a new variant with the config.env lines of the chosen arm.

    Args:
        variant: the variant that was tuned, which the new one inherits.
        name: name of the new variant.

    Returns:
        Folder of the new variant; None if no arm is chosen, or `variant` has these lines already.
    """
    if not record.lines:
        return None
    may_lose = record.winner is not None and record.winner.needs_gate
    kept = "keeps every limit of its gate" if may_lose else "gives the same responses"
    hypothesis = f"{variant.name} is faster with {record.chosen} and {kept}."
    return scaffold.create(name, variant.name, hypothesis, lines=record.lines, root=variant.root)
