"""Where a request's time goes: its phases by vLLM's own clock, a step's parts and operators by torch's profiler.

The engine runs in this process with the variant's flags, so that one profiler sees the scheduler, the model runner and
the sampler. Phases are timed without the profiler, which slows what it looks at.
"""

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import engine_scenarios, statistics
from slimqwen.evaluation.prompts import PromptCutter, documents
from slimqwen.evaluation.workload import Workload
from slimqwen.progress import Progress, silent
from slimqwen.serving import launch
from slimqwen.variant import Variant

PHASES = ("queue", "prefill", "decode")
"""Waiting to be scheduled, from there to the first token, from the first token to the last."""

OPERATORS = 12
"""How many are listed."""

PROFILED_TOKENS = 16
"""Output tokens of a class's one request under the profiler: a trace of every operator grows by megabytes a step."""

_SCOPE = "gpu_model_runner: "
_SCOPES_VARIABLE = "VLLM_CUSTOM_SCOPES_FOR_PROFILING"


class ProfileError(SlimqwenError):
    """vLLM gave no times, or no parts of a step."""


def profile(
    one: Variant, workload: Workload, requests: int, traces: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Answer requests of each class one at a time, timed, then the beginning of one more under the profiler.

    Args:
        one: the variant.
        workload: its classes and documents.
        requests: timed, a class; two or more.
        traces: a folder; <class>.trace.json.gz is written there for chrome://tracing or Perfetto.
        progress: hears the requests done.

    Returns:
        {"workload", "classes": [{"class", "prompt_tokens", "output_tokens", "seconds": {phase: estimate},
        "decode_share", "step": {part: share of the profiled steps}, "operators": [{"name", "calls", "milliseconds",
        "share"}]}]}; operators by their own time, on a GPU that of its kernels. Profiled are one whole prompt and
        `PROFILED_TOKENS` of output.

    Raises:
        ProfileError: vLLM's version does not tell.
        TooFewItemsError: fewer than two requests.
        WorkloadError, DocumentsError: the workload does not fit the context, or its text does not last.
        SlimqwenError: weights are missing.
    """
    checkpoint.check(one.weights, variants.making_command(one.weights, one.root))
    command = launch.resolve(one)
    tokenizer = transformers.AutoTokenizer.from_pretrained(one.weights, local_files_only=True)
    cutter = PromptCutter(
        documents(workload.documents, workload.seed, one.root),
        lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )
    classes = workload.scaled(command.max_model_len, int(command.flags.get("max-num-seqs") or 1))
    rows = []
    traces.mkdir(parents=True, exist_ok=True)
    with (
        _scopes(),
        engine_scenarios.engine(one.weights, command.flags) as llm,
    ):
        for number, each in enumerate(classes):
            prompts = cutter.cut(requests + 2, each.prompt_tokens)
            _answer(llm, prompts[0], each.output_tokens)  # meets cold code
            times = []
            for done, prompt in enumerate(prompts[1:-1]):
                progress(f"{each.name}: {each.prompt_tokens} -> {each.output_tokens} tokens", done, requests)
                times.append(_phases(_answer(llm, prompt, each.output_tokens)))
            trace = traces / f"{each.name}.trace.json.gz"
            step, operators = _profiled(llm, prompts[-1], min(each.output_tokens, PROFILED_TOKENS), trace)
            seconds = {phase: statistics.mean([time[phase] for time in times]) for phase in PHASES}
            rows.append(
                {
                    "class": each.name,
                    "prompt_tokens": each.prompt_tokens,
                    "output_tokens": each.output_tokens,
                    "seconds": {phase: dataclasses.asdict(seconds[phase]) for phase in PHASES},
                    "decode_share": seconds["decode"].value / math.fsum(s.value for s in seconds.values()),
                    "step": step,
                    "operators": operators,
                }
            )
            progress("classes", number + 1, len(classes))
    return {"workload": workload.name, "requests": requests, "classes": rows}


@contextmanager
def _scopes() -> Iterator[None]:
    """Have vLLM name the parts of a step to the profiler."""
    from vllm.v1 import utils

    before = os.environ.get(_SCOPES_VARIABLE)
    os.environ[_SCOPES_VARIABLE] = "1"
    # Decided once a process; an engine may have run here before.
    utils._PROFILER_FUNC = None
    try:
        yield
    finally:
        utils._PROFILER_FUNC = None
        os.environ.pop(_SCOPES_VARIABLE)
        if before is not None:
            os.environ[_SCOPES_VARIABLE] = before


def _answer(llm: Any, prompt: Sequence[int], tokens: int) -> Any:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": list(prompt)}], settings, use_tqdm=False)[0]


def _phases(output: Any) -> dict[str, float]:
    times = output.metrics
    if times is None or not times.last_token_ts:
        raise ProfileError("vLLM says nothing about a request's times; its version may differ")
    return {
        "queue": times.scheduled_ts - times.queued_ts,
        "prefill": times.first_token_ts - times.scheduled_ts,
        "decode": times.last_token_ts - times.first_token_ts,
    }


def _profiled(
    llm: Any, prompt: Sequence[int], tokens: int, trace: Path
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Shares of a step's parts, and the operators that take most time of their own."""
    import torch
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        _answer(llm, prompt, tokens)
    profiler.export_chrome_trace(str(trace))
    events = profiler.key_averages()
    parts = {event.key.removeprefix(_SCOPE): event.cpu_time_total for event in events if _is_part(event.key)}
    if not parts:
        raise ProfileError(
            "vLLM named no part of a step; its version may differ from the one this was written for"
        )
    whole = math.fsum(parts.values())
    own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    operators = sorted(
        (event for event in events if ": " not in event.key and not event.key.startswith("ProfilerStep")),
        key=lambda event: -getattr(event, own),
    )
    all_time = math.fsum(getattr(event, own) for event in operators)
    return (
        dict(sorted(((name, time / whole) for name, time in parts.items()), key=lambda part: -part[1])),
        [
            {
                "name": event.key,
                "calls": event.count,
                "milliseconds": getattr(event, own) / 1e3,
                "share": getattr(event, own) / all_time,
            }
            for event in operators[:OPERATORS]
        ],
    )


def _is_part(name: str) -> bool:
    # Others nest in these.
    return name.startswith(_SCOPE) and name.removeprefix(_SCOPE).isalpha()
