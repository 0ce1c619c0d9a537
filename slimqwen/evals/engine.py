"""Engine check: greedy tokens of an engine with the served flags, compared with those of the reference engine.

The reference engine has the same weights and number formats, and nothing else that could change its tokens: one request
at a time, whole prompts, eager execution, no drafts, no prefix cache. Compared with it are the served engine and two
neighbours: one with the prefix cache switched, one with drafts switched. They get prompts of consecutive lengths, each
alone, again from the prefix cache and all together; one of a single token while another response is generated; and then
the turns of several sessions, with a burst of short prompts and an abandoned one between them. Each engine runs in its
own process, so that a crash or hang of vLLM becomes a result.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, TypeAdapter

from slimqwen import host
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.evals import EvalError
from slimqwen.evals.engine_process import (
    SHORTEST,
    EngineRun,
    EngineSettings,
    Request,
    Response,
    Way,
    cut_requests,
    run_engine,
    run_reference,
)
from slimqwen.evals.engine_runs import EngineProcesses
from slimqwen.evals.invocation import Invocation
from slimqwen.progress import Progress
from slimqwen.records import provenance, store
from slimqwen.records.journal import Journal, journal_file, locked
from slimqwen.records.record import Block, Count, NonNegative, ServedRecord, Table
from slimqwen.records.settings import SettingsName
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant

EngineName = Literal["served", "with drafts", "without drafts", "with prefix cache", "without prefix cache"]
"""The served flags, or what differs from them."""

Result = TypeVar("Result", bound=tuple[Any, float])

_SHOWN_LENGTHS = 12


class CheckedEngine(Block):
    """Result of one engine: how its responses compare with the reference engine's."""

    name: EngineName
    draft_tokens: Count = Field(description="num_speculative_tokens of MTP, 0 without.")
    prefix_caching: bool
    sequences: Count = Field(description="Most requests at a time; 0 if the engine broke down.")
    responses: Count
    near_ties: Count = Field(description="Responses that differ only by a near tie: either token is correct.")
    wrong: dict[Way, tuple[Count, ...]] = Field(
        description="Prompt lengths in tokens whose response differs from the reference engine's by no near tie."
    )
    cached_tokens: Count = Field(description="Prompt tokens found in the prefix cache.")
    accepted_drafts: Count
    cold_turns: tuple[Count, ...] = Field(
        default=(),
        description="Prompt lengths in tokens of turns that found nothing of their session in the cache.",
    )
    failure: str | None = Field(description="Why the engine broke down; null if it did not.")
    seconds: NonNegative

    @property
    def wrong_responses(self) -> int:
        """Number of wrong responses over all ways of sending the prompts."""
        return sum(map(len, self.wrong.values()))

    @property
    def verdict(self) -> Verdict:
        """Fail on a wrong response or breakdown; inconclusive if no draft was accepted or a session found no prefix."""
        if self.wrong or self.failure:
            return Verdict.FAIL
        has_idle_drafts = self.draft_tokens > 0 and self.accepted_drafts == 0
        has_idle_cache = self.prefix_caching and (self.cached_tokens == 0 or bool(self.cold_turns))
        return Verdict.INCONCLUSIVE if has_idle_drafts or has_idle_cache else Verdict.PASS


class Engine(ServedRecord):
    """Greedy tokens of a variant's served engine and its neighbours, compared with those of the reference engine.

    A neighbour has the served flags with drafts or prefix cache switched.
    """

    kind = "engine"
    version = 2
    verb = "eval engine"

    settings_name: SettingsName = Field(description="Name of the settings file in eval/gates/.")
    near_tie_nats: float = Field(
        ge=0,
        description="Log-probability gap of the reference engine up to which either token is correct: a multiple of "
        "the noise of such gaps in the same run.",
    )
    engines: tuple[CheckedEngine, ...] = Field(min_length=1, description="The served engine is first.")

    @property
    def served(self) -> CheckedEngine:
        """The engine with the served flags."""
        return self.engines[0]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the served engine alone, because no server runs with the flags of a neighbour."""
        return self.served.verdict

    def tables(self, path: Path) -> list[Table]:
        """One row per engine; wrong responses and breakdowns are listed below."""
        columns: dict[str, Callable[[CheckedEngine], object]] = {
            "flags": lambda row: row.name,
            "verdict": lambda row: row.verdict,
            "MTP K": lambda row: row.draft_tokens or "off",
            "at a time": lambda row: row.sequences,
            "responses": lambda row: row.responses,
            "near ties": lambda row: row.near_ties,
            "wrong": lambda row: row.wrong_responses,
            "cached tokens": lambda row: row.cached_tokens if row.prefix_caching else None,
            "accepted drafts": lambda row: row.accepted_drafts,
            "seconds": lambda row: f"{row.seconds:.0f}",
        }
        notes = [f"A near tie is a gap of at most {self.near_tie_nats:.3g} nats."]
        for row in self.engines:
            for way, lengths in row.wrong.items():
                notes.append(f"Wrong, {row.name}, {way}: prompts of {_first_lengths(lengths)} tokens.")
            if row.cold_turns:
                turns = _first_lengths(row.cold_turns)
                notes.append(
                    f"Nothing of its session in the prefix cache, {row.name}: turns of {turns} tokens."
                )
            if row.failure:
                notes.append(f"Broke down, {row.name}: {row.failure}.")
        title = f"Engine check of {self.variant}: {self.verdict}"
        return [Table.from_rows(title, self.engines, columns, *notes, text_columns=2)]


def _first_lengths(lengths: Sequence[int]) -> str:
    more = f" and {len(lengths) - _SHOWN_LENGTHS} more" if len(lengths) > _SHOWN_LENGTHS else ""
    return ", ".join(map(str, lengths[:_SHOWN_LENGTHS])) + more


@dataclass(frozen=True)
class TokenComparison:
    """A response compared with the reference engine's.

    Attributes:
        same: number of equal tokens before the first difference.
        differs: whether a token or the length differs.
        near_tie: whether the two tokens of the first difference are equally likely up to rounding noise.
        gap_nats: log-probability of the reference engine's token minus that of the other one, both by the reference
            engine; None if nothing differs or the other token is not among its likeliest.
    """

    same: int
    differs: bool
    near_tie: bool
    gap_nats: float | None


def measure_engine(
    variant: Variant,
    settings: EngineSettings,
    invocation: Invocation,
) -> Path:
    """Compare the responses of a variant's engines with the reference engine's, and write the record.

    An engine that crashes, hangs or answers wrongly is a result, which the record has. Engines that an interrupted
    check has run are not run again.

    Returns:
        Path of the record.

    Raises:
        EvalError: the reference engine fails, or the process of an engine was killed from outside; no record is
            written.
        ServingError: the variant needs a GPU and there is none.
        MissingCheckpointError, CorruptCheckpointError: the variant's checkpoint is missing or damaged.
    """
    started = provenance.utc_now()
    variant.require_weights()
    server = ServerCommand.resolve(variant)
    if server.platform != host.detect():
        raise ServingError(f"{variant.name} needs a GPU and there is none here; check it on a GPU host")
    log = variant.root / "logs" / f"engine-{variant.name}.log"
    with locked(_journal(server, settings)) as journal:
        with EngineProcesses.started(server, settings.timeout_s, log) as processes:
            runs, reference, noise_nats = _run_engines(processes, settings, journal, invocation.progress)
        near_tie_nats = settings.noise_factor * noise_nats
        engines: list[CheckedEngine] = []
        items: list[dict[str, Any]] = [
            {"engine": "reference", "prompt_tokens": len(request.prompt), "tokens": response.tokens}
            for request, response in reference.items()
        ]
        flags = list_engines(server, settings)
        for name, (run, seconds) in runs.items():
            engine, compared = compare_engine(name, flags[name], run, reference, near_tie_nats, seconds)
            engines.append(engine)
            items += compared
        record = Engine(
            variant=variant.name,
            settings_name=settings.name,
            near_tie_nats=near_tie_nats,
            engines=tuple(engines),
            provenance=provenance.describe(
                server,
                invocation.command,
                started,
                datasets=settings.inputs(variant.root),
                seeds={"prompts": settings.seed},
            ),
        )
        path = store.write_record(invocation.records_of(variant), record, items)
        journal.discard()
    return path


def _journal(server: ServerCommand, settings: EngineSettings) -> Path:
    root = server.variant.root
    data = provenance.data_digests(settings.inputs(root), root)
    return journal_file("engine", server, settings.model_dump(mode="json"), data)


def _run_engines(
    processes: EngineProcesses, settings: EngineSettings, journal: Journal, progress: Progress
) -> tuple[dict[EngineName, tuple[EngineRun | str, float]], dict[Request, Response], float]:
    """Run the engines that an interrupted check has not run.

    Returns:
        Each engine's run, or why it broke down, with its seconds; responses of the reference engine; its noise, nats.

    Raises:
        EvalError: as `measure_engine`.
    """
    server = processes.server
    runs: dict[EngineName, tuple[EngineRun | str, float]] = {}
    # The first engine that runs chooses the requests, because it knows its block size and token budget.
    requests: list[Request] | None = None
    for name, flags in list_engines(server, settings).items():
        task = (settings, flags, _ways(name, flags), requests, server.variant.root)
        run, _ = runs[name] = _recall(_RUN, journal, name, partial(_time, processes, name, task, progress))
        if isinstance(run, EngineRun):
            requests = run.requests
    requests = requests or cut_requests(
        settings, server.variant.weights, server.variant.root, SHORTEST, server.max_model_len
    )
    # Engines with equal responses share requests, also the session turns that contain earlier responses.
    answered = (
        request for run, _ in runs.values() if isinstance(run, EngineRun) for _, request, _ in run.responses
    )
    requests = list(dict.fromkeys([*requests, *answered]))
    refer = partial(_refer, processes, requests, progress)
    responses, noise_nats = _recall(_REFERENCE, journal, "reference engine", refer)
    return runs, dict(zip(requests, responses, strict=True)), noise_nats


_RUN: TypeAdapter[tuple[EngineRun | str, float]] = TypeAdapter(tuple[EngineRun | str, float])
_REFERENCE: TypeAdapter[tuple[list[Response], float]] = TypeAdapter(tuple[list[Response], float])


def _recall(kind: TypeAdapter[Result], journal: Journal, engine: str, make: Callable[[], Result]) -> Result:
    """What the journal has of an engine; without it what `make` returns, which the journal then has.

    A breakdown is not kept: what caused it, such as too little memory, may be gone when the check is continued.
    """
    if (known := journal.get(engine)) is not None:
        return kind.validate_python(known)
    made = make()
    if not isinstance(made[0], str):
        journal.add(engine, kind.dump_python(made, mode="json"))
    return made


def _time(
    processes: EngineProcesses, name: EngineName, task: Any, progress: Progress
) -> tuple[EngineRun | str, float]:
    start_s = time.monotonic()
    run = processes.run(run_engine, task, f"engine {name}", progress, is_served=name == "served")
    return run, round(time.monotonic() - start_s, 1)


def _refer(
    processes: EngineProcesses, requests: list[Request], progress: Progress
) -> tuple[list[Response], float]:
    server = processes.server
    reference = processes.run(
        run_reference, (reference_flags(server), requests), "reference engine", progress
    )
    if isinstance(reference, str):
        raise EvalError(
            f"{server.variant.name}: the reference engine failed ({reference}); read why in its log: {processes.log}"
        )
    return reference


def list_engines(server: ServerCommand, settings: EngineSettings) -> dict[EngineName, dict[str, Any]]:
    """List the engines to compare, by name -> flags of vLLM, the served one first.

    A neighbour has drafts or the prefix cache switched, and runs at least `concurrency` requests at a time.

    Args:
        server: command of the variant's server.
        settings: concurrency, and K for a variant that is served without drafts.
    """
    served = dict(server.flags)
    # The sizes of the served CUDA graphs fit the served K and number of requests, not a neighbour's.
    neighbour = {name: value for name, value in served.items() if name != "cudagraph-capture-sizes"}
    if "max-num-seqs" in neighbour:
        neighbour["max-num-seqs"] = max(neighbour["max-num-seqs"], settings.concurrency)
    engines: dict[EngineName, dict[str, Any]] = {"served": served}
    if served.get("speculative-config"):
        engines["without drafts"] = {
            name: value for name, value in neighbour.items() if name != "speculative-config"
        }
    elif has_mtp_head(server.variant.weights):
        drafts = {"method": "mtp", "num_speculative_tokens": settings.draft_tokens}
        engines["with drafts"] = neighbour | {"speculative-config": drafts}
    if served.get("enable-prefix-caching"):
        engines["without prefix cache"] = neighbour | {"enable-prefix-caching": False}
    else:
        engines["with prefix cache"] = neighbour | {"enable-prefix-caching": True}
    return engines


def _ways(name: EngineName, flags: Mapping[str, Any]) -> tuple[Way, ...]:
    """Ways in which prompts are sent to an engine: all for the served one; to save time, fewer for a neighbour."""
    if name == "served":
        return ("alone", "cached", "together", "joining", "session")
    if flags.get("enable-prefix-caching"):
        return ("alone", "cached", "session")
    return ("together", "joining")


def reference_flags(server: ServerCommand) -> dict[str, Any]:
    """Flags of the reference engine: weights and number formats as served, nothing else that could change a token."""
    left_out = ("speculative-config", "compilation-config", "cudagraph-capture-sizes")
    plain = {name: value for name, value in server.flags.items() if name not in left_out}
    return plain | {
        "max-model-len": server.max_model_len,
        "max-num-batched-tokens": server.max_model_len,  # no prompt is cut
        "max-num-seqs": 1,
        "enforce-eager": True,
        "enable-prefix-caching": False,
    }


def compare_engine(
    name: EngineName,
    flags: Mapping[str, Any],
    run: EngineRun | str,
    reference: Mapping[Request, Response],
    near_tie_nats: float,
    seconds: float,
) -> tuple[CheckedEngine, list[dict[str, Any]]]:
    """Compare the responses of an engine with the reference engine's.

    Args:
        name: name of the engine.
        flags: its flags of vLLM, by name without dashes.
        run: its responses and counters, or the reason if it broke down.
        reference: the reference engine's response to each request.
        near_tie_nats: largest gap of two log-probabilities that counts as a near tie.
        seconds: duration of the run.

    Returns:
        The engine's result, and one item per response; an item has the tokens only if they differ from the reference's.
    """
    made = run if isinstance(run, EngineRun) else EngineRun([], [], False, 0, 0, 0)
    items: list[dict[str, Any]] = []
    wrong: dict[Way, list[int]] = {}
    for way, request, tokens in made.responses:
        length = len(request.prompt)
        comparison = compare_tokens(reference[request], tokens, near_tie_nats)
        item = {"engine": name, "way": way, "prompt_tokens": length, **asdict(comparison)}
        if comparison.differs:
            item |= {"tokens": tokens}
            if not comparison.near_tie:
                wrong.setdefault(way, []).append(length)
        items.append(item)
    engine = CheckedEngine(
        name=name,
        draft_tokens=int((flags.get("speculative-config") or {}).get("num_speculative_tokens", 0)),
        prefix_caching=made.prefix_caching,
        sequences=made.sequences,
        responses=len(items),
        near_ties=sum(item["near_tie"] for item in items),
        wrong={way: tuple(lengths) for way, lengths in wrong.items()},
        cached_tokens=made.cached_tokens,
        accepted_drafts=made.accepted_drafts,
        cold_turns=tuple(made.cold_turns),
        failure=run if isinstance(run, str) else None,
        seconds=seconds,
    )
    return engine, items


def compare_tokens(reference: Response, tokens: Sequence[int], near_tie_nats: float) -> TokenComparison:
    """Compare tokens with the reference engine's up to the first difference, on which all later tokens depend.

    Args:
        reference: response of the reference engine, with log-probabilities.
        tokens: token IDs of the other engine's response.
        near_tie_nats: largest gap of two log-probabilities that counts as a near tie.
    """
    pairs = enumerate(zip(reference.tokens, tokens, strict=False))
    first = next((position for position, (expected, token) in pairs if expected != token), None)
    if first is None:
        shorter = min(len(reference.tokens), len(tokens))
        return TokenComparison(shorter, len(reference.tokens) != len(tokens), False, None)
    likeliest = reference.log_probabilities[first]
    log_probability = likeliest.get(tokens[first])
    gap = None if log_probability is None else likeliest[reference.tokens[first]] - log_probability
    return TokenComparison(first, True, gap is not None and gap <= near_tie_nats, gap)
