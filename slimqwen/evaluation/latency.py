"""Latency and throughput of served variants, measured by vLLM's own serving benchmark client.

TTFT is the time to the first token, TPOT the time per output token after it, ITL the time between two streamed
chunks, E2EL the time from sending a request to its last token; all in milliseconds, seen by the client over HTTP.
"""

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from slimqwen.evaluation import comparison, statistics
from slimqwen.evaluation.answers import kept, unfinished
from slimqwen.evaluation.output import output_to
from slimqwen.evaluation.prompts import PromptCutter, Tokens, digest, documents
from slimqwen.evaluation.served import Served, ServerLostError, lost, require_healthy, serve
from slimqwen.evaluation.workload import PromptClass, ServiceLevel, Workload, WorkloadError
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.serving import launch, unsafe_engines
from slimqwen.variant import Setting, Variant

PERCENTILES = (90, 95, 99)

_COUNTED = "openai-counted"  # our name in the benchmark's table of request functions
_MTP = "VLLM_SPECULATIVE_CONFIG"


@dataclass
class _Sent:
    """What was sent of one class to one variant so far, over the rounds."""

    prompts: list[Tokens] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    rate_per_s: float | None = None
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[float] = field(default_factory=list)
    queried_tokens: float = 0
    hit_tokens: float = 0


@dataclass(frozen=True)
class _Sending:
    """What every request of a run shares.

    Attributes:
        max_num_seqs: requests that the most capable of the variants works on at once.
        rounds: how many there will be.
        saturation: class -> requests a second that the first variant reached in it; filled by the first round.
        progress: told of each answered request.
    """

    workload: Workload
    max_num_seqs: int
    rounds: int
    progress: Progress
    saturation: dict[str, float] = field(default_factory=dict)


class _Measured:
    """One variant's side of a run."""

    def __init__(self, variant: Variant, lines: Mapping[str, str], run: _Sending) -> None:
        from transformers import AutoTokenizer

        self.lines = lines
        tokenizer = AutoTokenizer.from_pretrained(variant.weights, local_files_only=True)
        self.variant = variant
        self.run = run
        self.cutter = PromptCutter(
            documents(run.workload.documents, run.workload.seed, variant.root),
            lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        )
        self.sent = {c.name: _Sent() for c in run.workload.expanded(run.max_num_seqs)}
        self.served: Served | None = None
        self.block_tokens = 1
        self.logs = variant.root / "logs"
        self.log = self.logs / f"latency_{variant.name}.log"
        self._prefixes: dict[str, list[Tokens]] = {}

    @property
    def classes(self) -> list[PromptClass]:
        """The classes as they are sent to the server."""
        assert self.served is not None
        return self.run.workload.scaled(self.served.max_model_len, self.run.max_num_seqs, self.block_tokens)

    def take_round(self, number: int, served: Served) -> None:
        """Send one round of every class."""
        if self.served is not None and served.max_model_len != self.served.max_model_len:
            raise WorkloadError(f"{self.variant.name}: the served context changed between two rounds")
        self.served = served
        if self.run.workload.needs_prefix_cache:
            self.block_tokens = _block_tokens(served, self.log)
        self._prefixes = {}
        for place, c in enumerate(self.classes):
            self._take_class(c, place, number, served)

    def state(self) -> dict[str, Any]:
        """All that the rounds so far leave to the next ones and to the record, as JSON."""
        return {
            "documents_used": self.cutter.documents_used,
            "sent": {name: asdict(sent) for name, sent in self.sent.items()},
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Take up where an interrupted run was when it gave its state."""
        self.sent = {name: _Sent(**sent) for name, sent in state["sent"].items()}
        given = (prompt for sent in self.sent.values() for prompt in sent.prompts)
        self.cutter.go_on(state["documents_used"], given)

    def _take_class(self, c: PromptClass, place: int, number: int, served: Served) -> None:
        run, sent = self.run, self.sent[c.name]
        activity = f"{self.variant.name}: {c.name} {c.prompt_tokens} -> {c.output_tokens} tokens"
        counter = itertools.count(number * c.requests + 1)

        def answered() -> None:
            run.progress(activity, next(counter), run.rounds * c.requests)

        if c.load is not None and c.load_of is not None:
            c = c.model_copy(update={"rate_per_s": c.load * run.saturation[c.load_of]})
        elif c.gap_ms is not None:
            c = c.model_copy(update={"rate_per_s": 1e3 / c.gap_ms})
        sent.rate_per_s = c.rate_per_s
        warmup = [
            (prompt, c.output_tokens)
            for prompt in self.cutter.cut(run.workload.warmup_requests, c.prompt_tokens)
        ]
        if warmup:
            _send(served, warmup, c, run.workload, 0, self.log, lambda: None)
        seed = (run.workload.seed, number, place)
        lengths = c.lengths(seed, run.workload.min_tokens, served.max_model_len)
        prompts = self._prompts(c, [prompt for prompt, _ in lengths])
        fresh = list(zip(prompts, (output for _, output in lengths), strict=True))
        before = _prefix_counts(served, self.log) if c.suffix_tokens else (0.0, 0.0)
        result = _send(served, fresh, c, run.workload, number, self.log, answered)
        _add(sent, c, number, fresh, result)
        if any(row["error"] for row in sent.rows):
            require_healthy(served.server.base_url, f"measuring {c.name}", self.log)
        if c.suffix_tokens:
            self._prove_prefixes(c, sent, before, _prefix_counts(served, self.log))
        run.saturation.setdefault(c.name, result["completed"] / result["duration"])

    def _prompts(self, c: PromptClass, lengths: Sequence[int]) -> list[Tokens]:
        """Prompts of text that was never sent, but for the prefixes that a class repeats."""
        if c.suffix_tokens is None:
            return [prompt for length in lengths for prompt in self.cutter.cut(1, length)]
        if c.repeats is None:
            self._prefixes[c.name] = self.cutter.cut(c.requests, c.prompt_tokens - c.suffix_tokens)
        prefixes = self._prefixes[c.repeats or c.name]
        whole = [prefix[: c.prompt_tokens - c.suffix_tokens] for prefix in prefixes]
        suffixes = self.cutter.cut(c.requests, c.suffix_tokens)
        return [prefix + suffix for prefix, suffix in zip(itertools.cycle(whole), suffixes, strict=False)]

    def _prove_prefixes(
        self, c: PromptClass, sent: _Sent, before: tuple[float, float], after: tuple[float, float]
    ) -> None:
        """Check by the server's own counters that what is called repeated was in its cache, and nothing else."""
        queried, hit = after[0] - before[0], after[1] - before[1]
        if c.repeats and not hit:
            raise WorkloadError(
                f"{self.variant.name}: the prefix cache had none of the {queried:,.0f} tokens of class {c.name}, which "
                f"repeats {c.repeats}; the KV cache may be too small for {c.requests} prompts: lower requests"
            )
        if not c.repeats and hit:
            raise WorkloadError(
                f"{self.variant.name}: the prefix cache knew {hit:,.0f} tokens of class {c.name} before it was sent; "
                "end the server that runs, so that a fresh one is started"
            )
        sent.queried_tokens += queried
        sent.hit_tokens += hit


def measure(
    variants: Sequence[Variant],
    workload: Workload,
    *,
    command: Sequence[str],
    rounds: int | None = None,
    port: int | None = None,
    records_folders: Sequence[Path] | None = None,
    progress: Progress = silent,
) -> list[Path]:
    """Measure variants over a workload and write a latency record for each.

    Every round has a fresh server; several variants take turns: A B A B. They get the same texts in the same order, at
    the same times. A server that runs already is used, so its rounds are no restarts.

    Args:
        variants: what to measure; a server that already runs one is used.
        workload: what to send.
        command: the command that asked for it, for the records.
        rounds: instead of the workload's.
        port: where the servers are, or shall be.
        records_folders: instead of the variants' own folders, in their order.
        progress: told of starts, and of each answered request.

    Returns:
        The records' paths, in the order of the variants.

    Raises:
        ServerLostError: a server died; nothing is written for any variant.
        RunInProgressError: another process is at the same run.
        WorkloadError, DocumentsError: the workload does not fit the server, or its text does not last.
        SlimqwenError: a server cannot be started.
    """
    rounds = workload.rounds if rounds is None else rounds
    if rounds < 1:
        raise WorkloadError(f"{rounds} rounds measure nothing: take 1 or more")
    started = provenance.utc_now()
    run = _Sending(workload, _max_num_seqs(variants, workload), rounds, progress)
    sides = [_Measured(*_with_config(variant, workload), run) for variant in variants]
    with kept(_unfinished(sides, workload, rounds)) as finished:
        for number in range(rounds):
            state = finished.get(number)
            if state is not None:
                run.saturation.update(state["saturation"])
                for side, so_far in zip(sides, state["sides"], strict=True):
                    side.go_on(so_far)
                continue
            for side in sides:
                server_log = side.logs / f"serve_{side.variant.name}.log"
                with serve(side.variant, port=port, log=server_log, progress=progress) as served:
                    try:
                        side.take_round(number, served)
                    except ServerLostError as error:
                        raise ServerLostError(
                            f"{error}; {number} of {rounds} rounds are kept: the same command goes on from there"
                        ) from error
            if number < rounds - 1:
                so_far = [side.state() for side in sides]
                finished.keep(number, {"saturation": run.saturation, "sides": so_far})
        folders = records_folders or [variant.folder for variant in variants]
        bodies = [_record(side, sides, rounds, finished.taken_over, started, command) for side in sides]
        paths = [
            store.write(folder, body, (row for sent in side.sent.values() for row in sent.rows))
            for folder, body, side in zip(folders, bodies, sides, strict=True)
        ]
        finished.discard()
    return paths


def _unfinished(sides: Sequence[_Measured], workload: Workload, rounds: int) -> Path:
    """Where the rounds of a run are until it ends."""
    first, *others = [launch.resolve(side.variant) for side in sides]
    asked = workload.model_dump(mode="json")
    return unfinished("latency", first, asked, rounds, [unfinished("latency", one).name for one in others])


def summarise(
    rows: Sequence[Mapping[str, Any]], duration_s: float, service_level: ServiceLevel | None = None
) -> dict[str, Any]:
    """The figures of one class from its per-request rows.

    Args:
        rows: with prompt_tokens, output_tokens, ttft_ms, tpot_ms, e2el_ms, itl_ms and error, as the items of a record.
        duration_s: wall time that the requests took together.
        service_level: what a request has to meet to count for the goodput.

    Raises:
        TooFewItemsError: fewer than two requests succeeded.
    """
    done = [row for row in rows if row["error"] is None]
    talked = [row for row in done if row["itl_ms"]]
    intervals = [row["itl_ms"] for row in talked]
    output_tokens = sum(row["output_tokens"] for row in done)
    summary: dict[str, Any] = {
        "request_count": len(rows),
        "failure_count": len(rows) - len(done),
        "duration_s": duration_s,
        "request_throughput_per_s": len(done) / duration_s,
        "output_throughput_tokens_per_s": output_tokens / duration_s,
        "total_throughput_tokens_per_s": (sum(row["prompt_tokens"] for row in done) + output_tokens)
        / duration_s,
    }
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        values = [row[name] for row in done]
        estimate = statistics.mean(values, clusters=_rounds(done))
        summary[name] = _distribution(values, estimate, len(done))
    # Intervals of one request belong together, so its mean is the unit, weighted by how many it has.
    estimate = statistics.mean(
        [np.mean(i) for i in intervals], [len(i) for i in intervals], clusters=_rounds(talked)
    )
    summary["itl_ms"] = _distribution([value for i in intervals for value in i], estimate, len(intervals))
    summary["goodput"] = None
    if service_level is not None:
        good = sum(
            row["ttft_ms"] <= service_level.ttft_ms and row["tpot_ms"] <= service_level.tpot_ms
            for row in done
        )
        summary["goodput"] = {
            **service_level.model_dump(),
            "good_count": good,
            "requests_per_s": good / duration_s,
        }
    return summary


def _rounds(rows: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """The rounds of requests, which are what was drawn where there are several; else each request is."""
    numbers = [row.get("round", 0) for row in rows]
    return numbers if len(set(numbers)) > 1 else None


def _distribution(
    values: Sequence[float], estimate: statistics.Estimate, request_count: int
) -> dict[str, float]:
    return {
        "mean": estimate.value,
        "standard_error": estimate.standard_error,
        "median": float(np.median(values)),
        **{
            f"p{p}": float(np.percentile(values, p))
            for p in statistics.supported_percentiles(request_count, PERCENTILES)
        },
    }


def _with_config(variant: Variant, workload: Workload) -> tuple[Variant, Mapping[str, str]]:
    """The variant with the workload's lines over its own; without MTP where the two exclude each other here.

    Returns:
        The variant, and the lines that are not its own; an empty one unsets.

    Raises:
        WorkloadError: the platform cannot serve a line of the workload even so.
    """
    if not workload.config:
        return variant, {}
    choices = [workload.config, {**workload.config, _MTP: ""}]
    for lines in choices if _MTP in variant.settings else choices[:1]:
        changed = _with_lines(variant, lines)
        conflict = _conflict(launch.resolve(changed), lines)
        if conflict is None:
            return changed, lines
    raise WorkloadError(f"{workload.name}: {variant.name} cannot be served for it here: {conflict}")


def _conflict(command: launch.ServerCommand, lines: Mapping[str, str]) -> str | None:
    """Why these lines of the command's variant cannot be served here, None where they can."""
    for row in command.left_out:
        if row.key in lines:
            return f"{row.key}={row.value}: {row.why}"
    one = command.variant
    found = unsafe_engines.find(one.root, one.weights, command.flags, command.platform)
    if found is None or command.allow_unsafe:
        return None
    return f"{found.modes}: {found.reason} ({found.record})"


def _with_lines(variant: Variant, lines: Mapping[str, str]) -> Variant:
    given = {key: Setting(key, value, variant.folder / "config.env", 0) for key, value in lines.items()}
    settings = {key: one for key, one in {**variant.settings, **given}.items() if one.value}
    return dataclasses.replace(variant, settings=settings)


def _max_num_seqs(variants: Sequence[Variant], workload: Workload) -> int:
    """Requests that the most capable of the variants works on at once: all of them are sent the same."""
    if not workload.sweeps_concurrency:
        return 1
    most = 1
    for variant in variants:
        value = launch.resolve(variant).flags.get("max-num-seqs")
        if value is None:
            raise WorkloadError(
                f"{workload.name}: {variant.name} leaves VLLM_MAX_NUM_SEQS open; set it in its config.env"
            )
        most = max(most, int(value))
    return most


def _metrics(served: Served, log: Path) -> dict[str, tuple[float, Mapping[str, str]]]:
    """The server's metrics by sample name, summed over engines, with the labels of the first."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        # trust_env: a proxy of the shell must not stand between the client and the server it measures.
        answer = httpx.get(
            f"{served.server.base_url}/metrics", headers=launch.authorization(), timeout=30, trust_env=False
        ).raise_for_status()
    except httpx.HTTPError as error:
        raise lost("reading its metrics", error, log) from error
    found: dict[str, tuple[float, Mapping[str, str]]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            value, labels = found.get(sample.name, (0.0, sample.labels))
            found[sample.name] = (value + sample.value, labels)
    return found


def _block_tokens(served: Served, log: Path) -> int:
    """The server's effective attention block, which its prefix cache consists of: large for hybrid models.

    Raises:
        WorkloadError: it has no prefix cache.
    """
    _, config = _metrics(served, log).get("vllm:cache_config_info", (0.0, {}))
    block = config.get("effective_attention_block_size", "None")
    if config.get("enable_prefix_caching") != "True" or not block.isdigit():
        raise WorkloadError(
            f"{served.variant.name}: vLLM does no prefix caching for this model on this platform; its log says why"
        )
    return int(block)


def _prefix_counts(served: Served, log: Path) -> tuple[float, float]:
    """Tokens that the prefix cache was asked for so far, and those that it had."""
    metrics = _metrics(served, log)
    queried, hit = (
        metrics.get(f"vllm:prefix_cache_{name}_total", (0.0, {}))[0] for name in ("queries", "hits")
    )
    return queried, hit


def _send(
    served: Served,
    requests: Sequence[tuple[Tokens, int]],
    c: PromptClass,
    workload: Workload,
    number: int,
    log: Path,
    answered: Callable[[], None],
) -> dict[str, Any]:
    """Send one round's prompts, each with its output tokens, by vLLM's benchmark client as the class says, and wait."""
    # Outside output_to: vLLM's log handler keeps the stream that it finds when it is imported.
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS
    from vllm.benchmarks.serve import TaskType, benchmark

    with output_to(log):

        async def counted(*arguments: Any, **keywords: Any) -> Any:
            output = await ASYNC_REQUEST_FUNCS["openai"](*arguments, **keywords)
            answered()
            return output

        ASYNC_REQUEST_FUNCS[_COUNTED] = counted
        # The client draws arrivals from numpy's global generator: every variant gets the same ones.
        np.random.seed(workload.seed + number)
        try:
            result: dict[str, Any] = asyncio.run(
                benchmark(
                    task_type=TaskType.GENERATION,
                    endpoint_type=_COUNTED,
                    api_url=f"{served.server.base_url}/v1/completions",
                    base_url=served.server.base_url,
                    model_id=served.server.model,
                    model_name=served.server.model,
                    tokenizer=None,  # the server's own token counts are taken
                    input_requests=[
                        SampleRequest(
                            prompt=tokens, prompt_len=len(tokens), expected_output_len=output_tokens
                        )
                        for tokens, output_tokens in requests
                    ],
                    logprobs=None,
                    request_rate=c.rate_per_s or math.inf,
                    burstiness=math.inf if c.gap_ms else 1.0,  # infinite: a fixed gap; 1: a Poisson process
                    disable_tqdm=True,
                    num_warmups=0,  # its warm-up and readiness check repeat the first prompt; ours is separate
                    ready_check_timeout_sec=0,
                    profile=False,
                    selected_percentile_metrics=[],
                    selected_percentiles=[],
                    ignore_eos=True,
                    goodput_config_dict={},
                    max_concurrency=c.concurrency if isinstance(c.concurrency, int) else None,
                    lora_modules=None,
                    extra_headers=launch.authorization(),
                    extra_body=dict(workload.sampling),
                )
            )
        except OSError as error:
            raise lost(f"measuring {served.variant.name}: {c.name}", error, log) from error
    if result["completed"] == 0:
        reason = result["errors"][0].strip().splitlines()[-1:] or ["no answer"]
        raise lost(f"measuring {served.variant.name}: {c.name}", ConnectionError(reason[0]), log)
    return result


def _add(
    sent: _Sent,
    c: PromptClass,
    number: int,
    fresh: Sequence[tuple[Tokens, int]],
    result: Mapping[str, Any],
) -> None:
    """Add what the benchmark client returned for one round of a class."""
    sent.prompts += [prompt for prompt, _ in fresh]
    sent.durations_s.append(result["duration"])
    for index, (prompt, wanted) in enumerate(fresh):
        tokens, ttft_s = result["output_lens"][index], result["ttfts"][index]
        latency_s, error = result["latencies"][index], result["errors"][index].strip()
        if not error and tokens != wanted:
            # An engine that dies ends its streams politely; the missing tokens give it away.
            error = f"the stream ended after {tokens} of {wanted} tokens"
        sent.rows.append(
            {
                "class": c.name,
                "round": number,
                "index": index,
                "prompt_tokens": len(prompt),
                "output_tokens": tokens,
                "ttft_ms": ttft_s * 1e3,
                "tpot_ms": (latency_s - ttft_s) / max(1, tokens - 1) * 1e3,
                "e2el_ms": latency_s * 1e3,
                "itl_ms": [round(interval_s * 1e3, 3) for interval_s in result["itls"][index]],
                "error": error.splitlines()[-1] if error else None,
            }
        )
    drafts = result.get("spec_decode_num_drafts", 0)
    if drafts:
        rates = result["spec_decode_per_position_acceptance_rates"]
        sent.drafts += drafts
        sent.draft_tokens += result["spec_decode_draft_tokens"]
        sent.accepted_tokens += result["spec_decode_accepted_tokens"]
        before = sent.accepted_by_position or [0.0] * len(rates)
        sent.accepted_by_position = [a + rate * drafts for a, rate in zip(before, rates, strict=True)]


def _record(
    side: _Measured,
    sides: Sequence[_Measured],
    rounds: int,
    taken_over: int,
    started: str,
    command: Sequence[str],
) -> dict[str, Any]:
    assert side.served is not None
    served, workload = side.served, side.run.workload
    text_file = served.variant.root / workload.documents
    named = workload.expanded(side.run.max_num_seqs)
    return {
        "schema": "latency/1",
        "variant": side.variant.name,
        "workload": workload.name,
        "max_model_len": served.max_model_len,
        "scale": workload.scale(served.max_model_len),
        "rounds": rounds,
        "rounds_of_earlier_run": taken_over,
        "run": started,
        "interleaved_with": [other.variant.name for other in sides if other is not side],
        "config": dict(side.lines),
        "columns": list(workload.columns),
        "classes": {
            c.name: _class(side, c, as_named) for c, as_named in zip(side.classes, named, strict=True)
        },
        "provenance": provenance.describe(
            root=side.variant.root,
            command=command,
            started=started,
            flags=served.server.command.flags,
            environment=served.server.command.environment,
            weights=served.server.weights,
            datasets=[workload.file, *([text_file] if text_file.is_file() else [])],
            seeds={"documents": workload.seed},
            server="found" if served.found else "started",
        ),
    }


def _class(side: _Measured, c: PromptClass, as_named: PromptClass) -> dict[str, Any]:
    sent = side.sent[c.name]
    arrival = None
    if sent.rate_per_s is not None:
        arrival = {"process": "fixed gap" if c.gap_ms else "Poisson", "rate_per_s": sent.rate_per_s}
    prefix_cache = None
    if c.suffix_tokens is not None:
        prefix_cache = {
            "block_tokens": side.block_tokens,
            "prefix_tokens": c.prompt_tokens - c.suffix_tokens,
            "queried_tokens": round(sent.queried_tokens),
            "hit_tokens": round(sent.hit_tokens),
            "repeats": c.repeats,
            "repeat_speedup": _repeat_speedup(side, c),
        }
    return {
        "prompt_tokens": c.prompt_tokens,
        "output_tokens": c.output_tokens,
        "spread": c.spread,
        "named_prompt_tokens": as_named.prompt_tokens,
        "named_output_tokens": as_named.output_tokens,
        "concurrency": c.concurrency if isinstance(c.concurrency, int) else None,
        "arrival": arrival,
        "durations_s": sent.durations_s,
        **summarise(sent.rows, sum(sent.durations_s), side.run.workload.service_level),
        "acceptance": _acceptance(sent),
        "prefix_cache": prefix_cache,
        "prompts_sha256": digest(sent.prompts),
    }


def _repeat_speedup(side: _Measured, c: PromptClass) -> dict[str, float] | None:
    """Median TTFT of the prefixes' first time over that of their repetition, with its interval.

    None for the first time itself, and for repetitions that wait for each other otherwise than the first time did.
    """
    first = next((one for one in side.classes if one.name == c.repeats), None)
    if first is None or first.concurrency != c.concurrency or first.arrives or c.arrives:
        return None
    rounds = comparison.by_class_and_round([row for one in (first, c) for row in side.sent[one.name].rows])
    if first.name not in rounds or c.name not in rounds:
        raise statistics.TooFewItemsError(
            f"{side.variant.name}: no request of {first.name} or {c.name} succeeded"
        )
    cold, warm = (comparison.by_round(rounds[one.name], "ttft_ms") for one in (first, c))
    ratio, _ = statistics.ratio_by_round(cold, warm, in_turns=True)
    return asdict(ratio)


def _acceptance(sent: _Sent) -> dict[str, Any] | None:
    if not sent.drafts:
        return None
    return {
        "length": 1 + sent.accepted_tokens / sent.drafts,
        "drafts": sent.drafts,
        "draft_tokens": sent.draft_tokens,
        "accepted_tokens": sent.accepted_tokens,
        "per_position_rates": [accepted / sent.drafts for accepted in sent.accepted_by_position],
    }
