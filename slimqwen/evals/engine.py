"""Engine check: the greedy tokens of the flags that are served, compared with those of a plain reference engine.

The reference engine has the same weights and number formats, and nothing else that could change its tokens: one request
at a time, whole prompts, eager execution, no drafts, no prefix cache. The served flags and their neighbours (drafts
and prefix cache the other way) respond to prompts of consecutive lengths, alone, from the prefix cache and together,
and at each turn of several sessions at once. Each engine runs in a process of its own, so that a crash or hang of vLLM
becomes a result.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field

from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.errors import SlimqwenError
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
from slimqwen.progress import Progress, silent
from slimqwen.recipe import warm_worker
from slimqwen.recipe.warm_worker import WarmWorker
from slimqwen.recipe.worker import death_cause
from slimqwen.records import provenance, store
from slimqwen.records.record import Block, Count, NonNegative, ServedRecord, Table
from slimqwen.records.settings import SettingsName
from slimqwen.serving import platform as platforms
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.stats.verdict import Verdict
from slimqwen.text.corpus import resolve_text
from slimqwen.variant import Variant
from slimqwen.vllm_plugin import compile_watch

EngineName = Literal["served", "with drafts", "without drafts", "with prefix cache", "without prefix cache"]
"""The served flags, or what differs from them."""

Task = TypeVar("Task")
Result = TypeVar("Result")

_SHOWN_LENGTHS = 12
_END_S = 60.0  # a finished engine may still release a GPU


class CheckedEngine(Block):
    """One engine, and its responses compared with the reference engine's."""

    name: EngineName
    draft_tokens: Count = Field(description="num_speculative_tokens of MTP, 0 without.")
    prefix_caching: bool
    sequences: Count = Field(description="Requests at a time; 0 where the engine broke down.")
    responses: Count
    near_ties: Count = Field(description="Responses that differ where either token is correct.")
    wrong: dict[Way, tuple[Count, ...]] = Field(
        description="Prompt lengths whose response differs where the two tokens are no near tie."
    )
    cached_tokens: Count = Field(description="Prompt tokens found in the prefix cache.")
    accepted_drafts: Count
    failure: str | None = Field(description="Why the engine broke down; null where it did not.")
    seconds: NonNegative

    @property
    def wrong_responses(self) -> int:
        """Number of wrong responses, in all ways."""
        return sum(map(len, self.wrong.values()))

    @property
    def verdict(self) -> Verdict:
        """Fail with a wrong response or a breakdown; inconclusive where drafts or prefix cache had no effect."""
        if self.wrong or self.failure:
            return Verdict.FAIL
        has_idle_drafts = self.draft_tokens > 0 and self.accepted_drafts == 0
        has_idle_cache = self.prefix_caching and self.cached_tokens == 0
        return Verdict.INCONCLUSIVE if has_idle_drafts or has_idle_cache else Verdict.PASS


class EngineCheck(ServedRecord):
    """Greedy tokens of a variant's served flags and their neighbours, compared with a plain reference engine's."""

    kind = "engine"
    version = 2
    verb = "eval engine"

    settings_name: SettingsName = Field(description="Name of the settings in eval/gates/.")
    near_tie_nats: float = Field(
        ge=0,
        description="Log-probability gap of the reference engine up to which either token is correct: a multiple of "
        "the noise of such gaps in the same run.",
    )
    engines: tuple[CheckedEngine, ...] = Field(min_length=1, description="The served one first.")

    @property
    def served(self) -> CheckedEngine:
        """The engine with the served flags."""
        return self.engines[0]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the served flags; no server of the variant runs with a neighbour's."""
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
                shown = ", ".join(map(str, lengths[:_SHOWN_LENGTHS]))
                more = f" and {len(lengths) - _SHOWN_LENGTHS} more" if len(lengths) > _SHOWN_LENGTHS else ""
                notes.append(f"Wrong, {row.name}, {way}: prompts of {shown}{more} tokens.")
            if row.failure:
                notes.append(f"Broke down, {row.name}: {row.failure}.")
        title = f"Engine check of {self.variant}: {self.verdict}"
        return [Table.from_rows(title, self.engines, columns, *notes, text_columns=2)]


@dataclass(frozen=True)
class TokenComparison:
    """A response compared with the reference engine's.

    Attributes:
        same: number of equal tokens before the first difference.
        near_tie: whether it differs where either token is correct.
        gap_nats: log-probability gap between the two tokens for the reference engine; None where the other token is
            not among its likeliest, or nothing differs.
    """

    same: int
    differs: bool
    near_tie: bool
    gap_nats: float | None


def measure_engine(
    variant: Variant,
    settings_name: str,
    *,
    command: Sequence[str],
    records_folder: Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Compare the responses of a variant's engines with the reference engine's, and write the record.

    Args:
        records_folder: folder of the record instead of the variant's.

    Raises:
        EvalError: the reference engine fails, or a process was killed.
        ServingError: the variant needs a GPU and there is none.
    """
    started = provenance.utc_now()
    settings = EngineSettings.load(settings_name, variant.root)
    variant.require_weights()
    server = ServerCommand.resolve(variant)
    if server.platform != platforms.detect():
        raise ServingError(f"{variant.name} needs a GPU and there is none here; check it on a GPU host")
    log = variant.root / "logs" / f"engine-{variant.name}.log"
    flags_by_name = list_engines(server, settings)
    runs: dict[EngineName, tuple[EngineRun | str, float]] = {}
    # Chosen by the first engine that runs, which knows its block and token budget.
    requests: list[Request] | None = None
    with EngineProcesses.started(server, settings.timeout_s, log) as processes:
        for name, flags in flags_by_name.items():
            start_s = time.monotonic()
            task = (settings, flags, _ways(name, flags), requests, variant.root)
            run = processes.run(run_engine, task, f"engine {name}", progress, is_served=name == "served")
            runs[name] = run, round(time.monotonic() - start_s, 1)
            if isinstance(run, EngineRun):
                requests = run.requests
        requests = requests or cut_requests(
            settings, variant.weights, variant.root, SHORTEST, server.max_model_len
        )
        # Engines that respond alike have the same sessions.
        answered = (
            request for run, _ in runs.values() if isinstance(run, EngineRun) for _, request in run.responses
        )
        requests = list(dict.fromkeys([*requests, *answered]))
        reference = processes.run(
            run_reference, (reference_flags(server), requests), "reference engine", progress
        )
    if isinstance(reference, str):
        raise EvalError(f"{variant.name}: the reference engine fails ({reference}); its log says why: {log}")
    responses, noise_nats = reference
    by_request = dict(zip(requests, responses, strict=True))
    near_tie_nats = settings.noise_factor * noise_nats
    engines: list[CheckedEngine] = []
    items: list[dict[str, Any]] = [
        {"engine": "reference", "prompt_tokens": len(request.prompt), "tokens": response.tokens}
        for request, response in by_request.items()
    ]
    for name, (run, seconds) in runs.items():
        engine, compared = compare_engine(name, flags_by_name[name], run, by_request, near_tie_nats, seconds)
        engines.append(engine)
        items += compared
    record = EngineCheck(
        variant=variant.name,
        settings_name=settings_name,
        near_tie_nats=near_tie_nats,
        engines=tuple(engines),
        provenance=provenance.describe(
            server,
            command,
            started,
            datasets=[settings.file(variant.root), resolve_text(settings.text, variant.root)],
            seeds={"prompts": settings.seed},
        ),
    )
    return store.write_record(records_folder or variant.folder, record, items)


def list_engines(server: ServerCommand, settings: EngineSettings) -> dict[EngineName, dict[str, Any]]:
    """Flags of the served engine and of its neighbours, which run several requests at a time in any case."""
    served = dict(server.flags)
    # Sizes of CUDA graphs fit the served depth and number of requests.
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
    """All ways for the served engine; for each neighbour, to save time, those that its prefix cache suggests."""
    if name == "served":
        return ("alone", "cached", "together", "session")
    return ("alone", "cached", "session") if flags.get("enable-prefix-caching") else ("together",)


def reference_flags(server: ServerCommand) -> dict[str, Any]:
    """The served flags without everything that could change a token but weights and number formats."""
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
        run: the reason where the engine broke down.
        reference: the reference engine's responses.

    Returns:
        The engine, and one item per response; where tokens differ it has them.
    """
    made = run if isinstance(run, EngineRun) else EngineRun([], {}, False, 0, 0, 0)
    items: list[dict[str, Any]] = []
    wrong: dict[Way, list[int]] = {}
    for (way, request), tokens in made.responses.items():
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
        failure=run if isinstance(run, str) else None,
        seconds=seconds,
    )
    return engine, items


def compare_tokens(reference: Response, tokens: Sequence[int], near_tie_nats: float) -> TokenComparison:
    """Compare tokens with the reference engine's up to the first difference; later tokens depend on it."""
    pairs = enumerate(zip(reference.tokens, tokens, strict=False))
    first = next((position for position, (expected, token) in pairs if expected != token), None)
    if first is None:
        shorter = min(len(reference.tokens), len(tokens))
        return TokenComparison(shorter, len(reference.tokens) != len(tokens), False, None)
    likeliest = reference.log_probabilities[first]
    log_probability = likeliest.get(tokens[first])
    gap = None if log_probability is None else likeliest[reference.tokens[first]] - log_probability
    return TokenComparison(first, True, gap is not None and gap <= near_tie_nats, gap)


@dataclass(frozen=True)
class EngineProcesses:
    """Processes of a variant's engines, one after the other.

    Attributes:
        server: command of the variant's server, whose environment they have.
        timeout_s: time limit of each, seconds.
        log: file for their output, named in errors.
        worker: process that has imported vLLM; the engines' processes are forked from it.
    """

    server: ServerCommand
    timeout_s: float
    log: Path
    worker: WarmWorker

    @classmethod
    @contextmanager
    def started(cls, server: ServerCommand, timeout_s: float, log: Path) -> Iterator[Self]:
        """Import vLLM for the length of a `with` block; the log's folder is made."""
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = _environment(server, is_served=True)
        with log.open("ab") as output, warm_worker.started(environment, output) as worker:
            yield cls(server, timeout_s, log, worker)

    def run(
        self,
        function: Callable[[Path, Path, Task, Progress], Result],
        task: Task,
        title: str,
        progress: Progress,
        *,
        is_served: bool = False,
    ) -> Result | str:
        """Call function(weights, the log's folder, task, progress) in a process of its own.

        Args:
            function: reports progress before anything else, because a process that ends before its first report
                says nothing about the engine.
            title: of the progress.
            is_served: whether it has the compile cache that a server would have.

        Returns:
            What the function returns; one line of text where it raised, crashed or hung.

        Raises:
            EvalError: the process ended before its first report, or was killed from outside, as by the kernel when
                memory runs out.
        """
        activity, result, refusal = "", None, None
        deadline, timed_out = time.monotonic() + self.timeout_s, False
        messages = self.worker.messages
        environment = _environment(self.server, is_served=is_served)
        try:
            process = self.worker.give(
                environment, function, self.server.variant.weights, self.log.parent, task
            )
            kind = "started"
            while kind != "ended":
                if not timed_out and not messages.poll(max(0.0, deadline - time.monotonic())):
                    timed_out = True
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                kind, *content = messages.recv()
                if kind == "progress":
                    activity = content[0]
                    progress(f"{title}: {activity}", content[1], content[2])
                elif kind != "ended":
                    result = f"{activity}: {content[0][:300]}" if kind == "failed" else content[0]
                    refusal = result if kind == "refused" else None
                    deadline = time.monotonic() + _END_S
        except (EOFError, BrokenPipeError):
            raise EvalError(f"the process that starts engines died; its log says why: {self.log}") from None
        if isinstance(refusal, SlimqwenError):
            raise refusal
        if result is not None:
            return result
        if timed_out:
            return f"{activity or 'starting'}: no end within {self.timeout_s:.0f} s"
        (exit_code,) = content
        death = death_cause(exit_code)
        if exit_code == -signal.SIGKILL or not activity:
            place = activity or "before its first report"
            raise EvalError(f"{title}: the process ended {place} ({death}); its log says why: {self.log}")
        return f"{activity}: the process died ({death})"


def _environment(server: ServerCommand, *, is_served: bool) -> dict[str, str]:
    """Environment of an engine's process: the server's; neighbours and reference share a compile cache.

    vLLM's own cache has a folder of torch's cache for every set of flags, so each engine would compile the same graphs
    again. Without vLLM's cache torch finds the graphs by their content.
    """
    environment = server.process_environment()
    environment.pop(compile_watch.VARIABLE, None)
    if not is_served:
        environment |= {
            "VLLM_DISABLE_COMPILE_CACHE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(server.variant.root / ".cache" / "engines"),
        }
    return environment
