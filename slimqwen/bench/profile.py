"""Profile of a request: its phases by vLLM's own clock, a step's parts and operators by torch's profiler.

The engine runs in this process with the variant's flags, so that one profiler sees the scheduler, the model runner and
the sampler. Phases are timed without the profiler, because it slows what it observes.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from slimqwen import host_load
from slimqwen.bench import BenchError
from slimqwen.bench.workload import PromptClass, Workload
from slimqwen.captured_log import capture_output
from slimqwen.host_load import HostLoad, Watch
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.panel import Line, Panel
from slimqwen.records.record import Block, Count, Estimate, NonNegative, Positive, Record, Share
from slimqwen.records.table import Table
from slimqwen.serving import in_process
from slimqwen.serving.command import ServerCommand
from slimqwen.stats import intervals
from slimqwen.text.prompts import PromptCutter, Tokens
from slimqwen.variant import Variant

PHASES = ("queue", "prefill", "decode")
"""Waiting to be scheduled, from there to the first token, from the first token to the last."""

OPERATORS = 12
"""Number of operators in a record."""

PROFILED_TOKENS = 16
"""Output tokens of the request under the profiler: a trace of every operator grows by megabytes a step."""

_SCOPE = "gpu_model_runner: "


class Operator(Block):
    """Time of one operator, on a GPU that of its kernels."""

    name: str = Field(min_length=1)
    calls: Count
    milliseconds: NonNegative = Field(description="Its own time, without operators that it calls.")
    share: Share


class ClassProfile(Block):
    """Profile of one prompt class."""

    class_: str = Field(validation_alias="class", serialization_alias="class", min_length=1)
    prompt_tokens: Positive
    output_tokens: Positive
    seconds: dict[str, Estimate] = Field(description="Seconds by phase of a request.")
    decode_share: Share = Field(description="Share of the decode phase in all phases.")
    step: dict[str, Share] = Field(min_length=1, description="Share of the profiled steps by part.")
    operators: tuple[Operator, ...] = Field(description="By their own time, the longest first.")


class Profile(Record):
    """Where the time of a variant's requests goes: phases, parts of a step, operators."""

    kind = "profile"
    verb = "bench profile"

    workload: str = Field(min_length=1)
    requests: int = Field(ge=2, description="Timed requests per class.")
    classes: tuple[ClassProfile, ...] = Field(min_length=1)

    def tables(self, path: Path) -> list[Table]:
        """Phases and parts of a step by class; the longest operators of each class."""
        phases = tuple(
            (
                f"{row.class_} {row.prompt_tokens} -> {row.output_tokens}",
                *(f"{row.seconds[phase].value * 1e3:,.1f}" for phase in PHASES),
                f"{row.decode_share:.0%}",
                ", ".join(f"{part} {share:.0%}" for part, share in row.step.items() if share >= 0.01),
            )
            for row in self.classes
        )
        operators = tuple(
            (row.class_, each.name, str(each.calls), f"{each.milliseconds:,.1f}", f"{each.share:.1%}")
            for row in self.classes
            for each in row.operators[:5]
        )
        phase_headings = ("class, tokens", *(f"{phase}, ms" for phase in PHASES), "decode", "parts of a step")
        operator_headings = ("class", "operator", "calls", "own time, ms", "share")
        notes = provenance.source_notes(self, path)
        return [
            Table(f"Phases of a request of {self.variant}", phase_headings, phases, notes),
            Table(f"Operators of {self.variant}", operator_headings, operators, notes, text_columns=2),
        ]

    def panels(self) -> list[Panel]:
        """Seconds of each phase and shares of a step's parts against the length of the prompt."""
        rows = sorted(self.classes, key=lambda row: row.prompt_tokens)
        lengths = [row.prompt_tokens for row in rows]
        phases = [
            Line(
                phase,
                lengths,
                [row.seconds[phase].value for row in rows],
                [row.seconds[phase].standard_error for row in rows],
            )
            for phase in rows[0].seconds
        ]
        parts = dict.fromkeys(part for row in rows for part in row.step)
        shares = [Line(part, lengths, [row.step.get(part, 0.0) for row in rows]) for part in parts]
        return [
            Panel("prompt (tokens)", "seconds of a request (bars: 1 SE)", phases),
            Panel("prompt (tokens)", "share of a step", shares),
        ]


def write(
    variant: Variant,
    workload: Workload,
    requests: int,
    traces: Path,
    *,
    command: Sequence[str],
    even_if_busy: bool = False,
    progress: Progress = silent,
) -> Path:
    """Time requests of each class one at a time, profile the beginning of one more, and write the record.

    The profile covers one whole prompt and `PROFILED_TOKENS` of output.

    Args:
        traces: folder for <class>.trace.json.gz, for chrome://tracing or Perfetto; vLLM's output goes to <traces>.log.

    Raises:
        HostBusyError: the host was too busy in all attempts at the requests of a class.
        BenchError: vLLM's version gives no times or parts, or the workload does not fit the context.
        CorpusError: the workload's text is used up.
        TooFewItemsError: fewer than two requests.
    """
    started = provenance.utc_now()
    variant.require_weights()
    server = ServerCommand.resolve(variant)
    cutter = PromptCutter.for_checkpoint(variant.weights, workload.documents, workload.seed, variant.root)
    classes = workload.scaled(server.max_model_len, int(server.flags.get("max-num-seqs") or 1))
    rows: list[ClassProfile] = []
    loads: list[HostLoad] = []
    traces.mkdir(parents=True, exist_ok=True)
    with (
        capture_output(traces.with_name(f"{traces.name}.log")),
        _scopes(),
        in_process.served_engine(variant.weights, server.flags) as llm,
    ):
        for number, c in enumerate(classes):
            prompts = cutter.cut(requests + 2, c.prompt_tokens)
            times, load = host_load.undisturbed(
                partial(_phase_times, llm, c, prompts[:-1], progress),
                f"class {c.name}",
                even_if_busy=even_if_busy,
            )
            loads.append(load)
            rows.append(_class_profile(llm, c, times, prompts[-1], traces / f"{c.name}.trace.json.gz"))
            progress("classes", number + 1, len(classes))
    record = Profile(
        variant=variant.name,
        workload=workload.name,
        requests=requests,
        classes=tuple(rows),
        provenance=provenance.of_served_variant(variant, command, started, host_load=host_load.worst(loads)),
    )
    return store.write(variant.root / "results", record)


def _phase_times(
    llm: Any, c: PromptClass, prompts: Sequence[Tokens], progress: Progress, watch: Watch
) -> list[dict[str, float]]:
    """Seconds by phase of each request; the first prompt warms up."""
    first, *timed_prompts = prompts
    _generate(llm, first, c.output_tokens)
    times = []
    with watch.section():
        for done, prompt in enumerate(timed_prompts):
            progress(f"{c.name}: {c.prompt_tokens} -> {c.output_tokens} tokens", done, len(timed_prompts))
            times.append(_phases(_generate(llm, prompt, c.output_tokens)))
    return times


def _class_profile(
    llm: Any, c: PromptClass, times: Sequence[Mapping[str, float]], profiled_prompt: Tokens, trace: Path
) -> ClassProfile:
    step, operators = _step_profile(llm, profiled_prompt, min(c.output_tokens, PROFILED_TOKENS), trace)
    seconds = {phase: intervals.mean([time[phase] for time in times]) for phase in PHASES}
    return ClassProfile(
        class_=c.name,
        prompt_tokens=c.prompt_tokens,
        output_tokens=c.output_tokens,
        seconds={phase: Estimate.from_estimate(estimate) for phase, estimate in seconds.items()},
        decode_share=seconds["decode"].value / math.fsum(estimate.value for estimate in seconds.values()),
        step=step,
        operators=operators,
    )


@contextmanager
def _scopes() -> Iterator[None]:
    """Have vLLM name the parts of a step to the profiler."""
    from vllm.v1 import utils

    # vLLM decides once per process; an earlier engine may have run here.
    utils._PROFILER_FUNC = None
    try:
        with in_process.environment({"VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"}):
            yield
    finally:
        utils._PROFILER_FUNC = None


def _generate(llm: Any, prompt: Sequence[int], tokens: int) -> Any:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": list(prompt)}], settings, use_tqdm=False)[0]


def _phases(output: Any) -> dict[str, float]:
    times = output.metrics
    if times is None or not times.last_token_ts:
        raise BenchError("vLLM reports no times of a request; its version may differ")
    return {
        "queue": times.scheduled_ts - times.queued_ts,
        "prefill": times.first_token_ts - times.scheduled_ts,
        "decode": times.last_token_ts - times.first_token_ts,
    }


def _step_profile(
    llm: Any, prompt: Sequence[int], tokens: int, trace: Path
) -> tuple[dict[str, float], tuple[Operator, ...]]:
    """Shares of a step's parts, and the operators with the most time of their own."""
    import torch
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        _generate(llm, prompt, tokens)
    profiler.export_chrome_trace(str(trace))
    events = profiler.key_averages()
    parts = {event.key.removeprefix(_SCOPE): event.cpu_time_total for event in events if _is_part(event.key)}
    if not parts:
        raise BenchError("vLLM names no part of a step; its version may differ")
    parts_time = math.fsum(parts.values())
    shares = {name: time / parts_time for name, time in sorted(parts.items(), key=lambda part: -part[1])}
    own_time = operator.attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    operators = [
        event for event in events if ": " not in event.key and not event.key.startswith("ProfilerStep")
    ]
    operators_time = math.fsum(map(own_time, operators))
    longest = sorted(operators, key=own_time, reverse=True)[:OPERATORS]
    return shares, tuple(
        Operator(
            name=event.key,
            calls=event.count,
            milliseconds=own_time(event) / 1e3,
            share=own_time(event) / operators_time,
        )
        for event in longest
    )


def _is_part(name: str) -> bool:
    # Scopes with other names are nested in these.
    return name.startswith(_SCOPE) and name.removeprefix(_SCOPE).isalpha()
