"""Latency and throughput of served variants, measured by vLLM's own serving benchmark client.

TTFT is the time to the first token, TPOT the time per output token after it, ITL the time between two streamed
chunks, E2EL the time from sending a request to its last token; all in milliseconds, seen by the client over HTTP.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import statistics
from slimqwen.evaluation.output import output_to
from slimqwen.evaluation.prompts import PromptCutter, Tokens, digest, documents
from slimqwen.evaluation.served import Served, lost, require_healthy, serve
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.serving import launch
from slimqwen.variant import Variant

_COUNTED = "openai-counted"  # our name in the benchmark's table of request functions


class WorkloadError(SlimqwenError):
    """A workload file that cannot be used, or that the served context cannot hold."""


@dataclass(frozen=True)
class PromptClass:
    """Requests of one shape: lengths in tokens, and how many a round."""

    name: str
    prompt_tokens: int
    output_tokens: int
    requests: int


@dataclass(frozen=True)
class Workload:
    """What is sent, as eval/workloads/<name>.yaml states it; that file explains each field."""

    file: Path
    documents: str
    seed: int
    reference_context_tokens: int
    min_tokens: int
    concurrency: int
    warmup_requests: int
    rounds: int
    sampling: Mapping[str, float]
    classes: tuple[PromptClass, ...]

    @property
    def name(self) -> str:
        """The file's name."""
        return self.file.stem

    def scale(self, max_model_len: int) -> float:
        """The factor on all lengths for a served context of so many tokens."""
        return min(1.0, max_model_len / self.reference_context_tokens)

    def scaled(self, max_model_len: int) -> list[PromptClass]:
        """The classes with the lengths that are really sent.

        Raises:
            WorkloadError: the shortest lengths allowed do not fit the context.
        """
        factor = self.scale(max_model_len)
        classes = []
        for c in self.classes:
            output_tokens = max(self.min_tokens, math.floor(c.output_tokens * factor))
            room = min(math.floor(c.prompt_tokens * factor), max_model_len - output_tokens)
            classes.append(PromptClass(c.name, max(self.min_tokens, room), output_tokens, c.requests))
        for c in classes:
            if c.prompt_tokens + c.output_tokens > max_model_len:
                raise WorkloadError(
                    f"{self.name}: class {c.name} needs {c.prompt_tokens} + {c.output_tokens} tokens at least and "
                    f"the server takes {max_model_len}: raise VLLM_MAX_MODEL_LEN"
                )
        return classes


@dataclass
class _Sent:
    """What was sent of one class to one variant so far, over the rounds."""

    prompts: list[Tokens] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    duration_s: float = 0.0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[float] = field(default_factory=list)


class _Measured:
    """One variant's side of a run."""

    def __init__(self, variant: Variant, workload: Workload) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(variant.weights, local_files_only=True)
        self.variant = variant
        self.workload = workload
        self.cutter = PromptCutter(
            documents(workload.documents, workload.seed, variant.root),
            lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        )
        self.sent: dict[str, _Sent] = {c.name: _Sent() for c in workload.classes}
        self.served: Served | None = None

    def take_round(self, number: int, served: Served, rounds: int, log: Path, progress: Progress) -> None:
        """Send one round of every class."""
        if self.served is not None and served.max_model_len != self.served.max_model_len:
            raise WorkloadError(f"{self.variant.name}: the served context changed between two rounds")
        self.served = served
        for c in self.workload.scaled(served.max_model_len):
            self._take_class(c, number, served, rounds, log, progress)

    def _take_class(
        self, c: PromptClass, number: int, served: Served, rounds: int, log: Path, progress: Progress
    ) -> None:
        activity = f"{self.variant.name}: {c.name} {c.prompt_tokens} -> {c.output_tokens} tokens"
        counter = itertools.count(number * c.requests + 1)

        def answered() -> None:
            progress(activity, next(counter), rounds * c.requests)

        warmup = self.cutter.cut(self.workload.warmup_requests, c.prompt_tokens)
        if warmup:
            _send(served, warmup, c.output_tokens, self.workload, log, activity, lambda: None)
        fresh = self.cutter.cut(c.requests, c.prompt_tokens)
        result = _send(served, fresh, c.output_tokens, self.workload, log, activity, answered)
        sent = self.sent[c.name]
        _add(sent, c, number, fresh, result)
        if any(row["error"] for row in sent.rows):
            require_healthy(served.server.base_url, f"measuring {c.name}", log)


def load_workload(name: str, root: Path) -> Workload:
    """Read eval/workloads/<name>.yaml.

    Raises:
        WorkloadError: no such workload, or a field is missing or wrong.
    """
    file = root / "eval" / "workloads" / f"{name}.yaml"
    place = f"eval/workloads/{file.name}"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        classes = tuple(PromptClass(name=key, **lengths) for key, lengths in content.pop("classes").items())
        return Workload(file=file, classes=classes, **content)
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.yaml")))
        raise WorkloadError(f"{place} does not exist; there is: {known}") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise WorkloadError(f"{place}: unusable ({error})") from error


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

    Several variants take turns, each time on a fresh server: A B A B. They get the same texts in the same order.
    One variant keeps its server for all rounds.

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
        WorkloadError, DocumentsError: the workload does not fit the server, or its text does not last.
        SlimqwenError: a server cannot be started.
    """
    rounds = workload.rounds if rounds is None else rounds
    if rounds < 1:
        raise WorkloadError(f"{rounds} rounds measure nothing: take 1 or more")
    started = provenance.utc_now()
    sides = [_Measured(variant, workload) for variant in variants]
    with contextlib.ExitStack() as kept:
        for number in range(rounds):
            for side in sides:
                logs = side.variant.root / "logs"
                with contextlib.ExitStack() as turn:
                    if len(sides) > 1 or side.served is None:
                        lifetime = kept if len(sides) == 1 else turn
                        server_log = logs / f"serve_{side.variant.name}.log"
                        served = lifetime.enter_context(
                            serve(side.variant, port=port, log=server_log, progress=progress)
                        )
                    else:
                        served = side.served
                    side.take_round(
                        number, served, rounds, logs / f"latency_{side.variant.name}.log", progress
                    )
    folders = records_folders or [variant.folder for variant in variants]
    bodies = [_record(side, sides, rounds, started, command) for side in sides]
    return [
        store.write(folder, body, (row for sent in side.sent.values() for row in sent.rows))
        for folder, body, side in zip(folders, bodies, sides, strict=True)
    ]


def summarise(rows: Sequence[Mapping[str, Any]], duration_s: float) -> dict[str, Any]:
    """The figures of one class from its per-request rows.

    Args:
        rows: with output_tokens, ttft_ms, tpot_ms, e2el_ms, itl_ms and error, as the items of a record.
        duration_s: wall time that the requests took together.

    Raises:
        TooFewItemsError: fewer than two requests succeeded.
    """
    done = [row for row in rows if row["error"] is None]
    intervals = [row["itl_ms"] for row in done if row["itl_ms"]]
    summary = {
        "request_count": len(rows),
        "failure_count": len(rows) - len(done),
        "duration_s": duration_s,
        "request_throughput_per_s": len(done) / duration_s,
        "output_throughput_tokens_per_s": sum(row["output_tokens"] for row in done) / duration_s,
    }
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        values = [row[name] for row in done]
        summary[name] = _distribution(values, statistics.mean(values), len(done))
    # Intervals of one request belong together, so its mean is the unit, weighted by how many it has.
    estimate = statistics.mean([np.mean(i) for i in intervals], [len(i) for i in intervals])
    summary["itl_ms"] = _distribution([value for i in intervals for value in i], estimate, len(intervals))
    return summary


def _distribution(
    values: Sequence[float], estimate: statistics.Estimate, request_count: int
) -> dict[str, float]:
    return {
        "mean": estimate.value,
        "standard_error": estimate.standard_error,
        "median": float(np.median(values)),
        **{f"p{p}": float(np.percentile(values, p)) for p in statistics.supported_percentiles(request_count)},
    }


def _send(
    served: Served,
    token_prompts: list[Tokens],
    output_tokens: int,
    workload: Workload,
    log: Path,
    doing: str,
    answered: Callable[[], None],
) -> dict[str, Any]:
    """Send the prompts through vLLM's benchmark client, all at once up to the concurrency, and wait for the answers."""
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
        requests = [
            SampleRequest(prompt=tokens, prompt_len=len(tokens), expected_output_len=output_tokens)
            for tokens in token_prompts
        ]
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
                    input_requests=requests,
                    logprobs=None,
                    request_rate=math.inf,
                    burstiness=1.0,
                    disable_tqdm=True,
                    num_warmups=0,  # its warm-up and readiness check repeat the first prompt; ours is separate
                    ready_check_timeout_sec=0,
                    profile=False,
                    selected_percentile_metrics=[],
                    selected_percentiles=[],
                    ignore_eos=True,
                    goodput_config_dict={},
                    max_concurrency=workload.concurrency,
                    lora_modules=None,
                    extra_headers=launch.authorization(),
                    extra_body=dict(workload.sampling),
                )
            )
        except OSError as error:
            raise lost(f"measuring {doing}", error, log) from error
    if result["completed"] == 0:
        reason = result["errors"][0].strip().splitlines()[-1:] or ["no answer"]
        raise lost(f"measuring {doing}", ConnectionError(reason[0]), log)
    return result


def _add(sent: _Sent, c: PromptClass, number: int, fresh: list[Tokens], result: Mapping[str, Any]) -> None:
    """Add what the benchmark client returned for one round of a class."""
    sent.prompts += fresh
    sent.duration_s += result["duration"]
    for index in range(len(fresh)):
        tokens, ttft_s = result["output_lens"][index], result["ttfts"][index]
        latency_s, error = result["latencies"][index], result["errors"][index].strip()
        if not error and tokens != c.output_tokens:
            # An engine that dies ends its streams politely; the missing tokens give it away.
            error = f"the stream ended after {tokens} of {c.output_tokens} tokens"
        sent.rows.append(
            {
                "class": c.name,
                "round": number,
                "index": index,
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
    side: _Measured, sides: Sequence[_Measured], rounds: int, started: str, command: Sequence[str]
) -> dict[str, Any]:
    assert side.served is not None
    served, workload = side.served, side.workload
    text_file = served.variant.root / workload.documents
    return {
        "schema": "latency/1",
        "variant": side.variant.name,
        "workload": workload.name,
        "max_model_len": served.max_model_len,
        "scale": workload.scale(served.max_model_len),
        "rounds": rounds,
        "run": started,
        "interleaved_with": [other.variant.name for other in sides if other is not side],
        "classes": {
            c.name: {
                "prompt_tokens": c.prompt_tokens,
                "output_tokens": c.output_tokens,
                "named_prompt_tokens": named.prompt_tokens,
                "named_output_tokens": named.output_tokens,
                "concurrency": workload.concurrency,
                **summarise(side.sent[c.name].rows, side.sent[c.name].duration_s),
                "acceptance": _acceptance(side.sent[c.name]),
                "prompts_sha256": digest(side.sent[c.name].prompts),
            }
            for c, named in zip(workload.scaled(served.max_model_len), workload.classes, strict=True)
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
