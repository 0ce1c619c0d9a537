"""Where does the time of a request go? Phases by vLLM's clock; parts of a step and operators by vLLM's torch profiler.

The engine runs in this process with the variant's flags. Requests of each class of a workload are timed one at a time
without the profiler, which slows down what it observes; then the beginning of one more request is profiled. Traces for
Perfetto or chrome://tracing are written to logs/profile-<variant>/.

    .venv/bin/python scripts/profile_model.py --variant tiny-mtp4
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from slimqwen.bench.workload import PromptClass, Workload
from slimqwen.captured_log import capture_output
from slimqwen.cli.exploration import run_exploration
from slimqwen.records.table import Table
from slimqwen.serving import in_process
from slimqwen.serving.command import ServerCommand
from slimqwen.stats import intervals
from slimqwen.text.prompts import PromptCutter, Tokens
from slimqwen.variant import Variant

PROFILED_TOKENS = 16
"""Output tokens of the profiled request; few, because a trace grows by megabytes per step."""

OPERATORS = 12
SCOPE = "gpu_model_runner: "
"""Prefix of the names of parts of a step in traces, which VLLM_CUSTOM_SCOPES_FOR_PROFILING turns on."""


def generate(llm: Any, prompt: Tokens, tokens: int) -> dict[str, float]:
    """Generate exactly `tokens` tokens for a prompt, and return the seconds of each phase."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    times = llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)[0].metrics
    return {
        "queue": times.scheduled_ts - times.queued_ts,
        "prefill": times.first_token_ts - times.scheduled_ts,
        "decode": times.last_token_ts - times.first_token_ts,
    }


def profile_class(llm: Any, requests: PromptClass, prompts: Sequence[Tokens]) -> dict[str, Any]:
    """Time all prompts but the first, which warms up, and the last, which is profiled.

    Returns:
        Seconds of each phase; share of each part in the profiled steps; and name, calls, milliseconds and share of the
        operators with the longest own time (on a GPU the time of their kernels).
    """
    import torch

    generate(llm, prompts[0], requests.output_tokens)
    times = [generate(llm, prompt, requests.output_tokens) for prompt in prompts[1:-1]]
    llm.start_profile(requests.name)
    generate(llm, prompts[-1], min(requests.output_tokens, PROFILED_TOKENS))
    llm.stop_profile()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    events = worker.profiler.profiler.key_averages()
    names = {event.key: event.key.removeprefix(SCOPE) for event in events if event.key.startswith(SCOPE)}
    # All scopes with other names are nested in those with this prefix.
    parts = {names[event.key]: event.cpu_time_total for event in events if names.get(event.key, "").isalpha()}
    own_time = attrgetter("self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total")
    operators = [event for event in events if "::" in event.key or ": " not in event.key]
    whole, step = math.fsum(map(own_time, operators)), math.fsum(parts.values())
    longest = sorted(operators, key=own_time, reverse=True)[:OPERATORS]
    return {
        "class": f"{requests.name} {requests.prompt_tokens} -> {requests.output_tokens}",
        "seconds": {phase: asdict(intervals.mean([time[phase] for time in times])) for phase in times[0]},
        "step": {name: time / step for name, time in sorted(parts.items(), key=lambda part: -part[1])},
        "operators": [
            [event.key, event.count, own_time(event) / 1e3, own_time(event) / whole] for event in longest
        ],
    }


def explore_requests(variant: Variant, options: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    """Profile each class of the workload; traces and vLLM's output are written to logs/."""
    workload = Workload.load(options.workload, variant.root)
    server = ServerCommand.resolve(variant)
    cutter = PromptCutter.for_checkpoint(variant.weights, workload.documents, workload.seed, variant.root)
    classes = workload.scaled(server.max_model_len, int(server.flags.get("max-num-seqs") or 1))
    traces = variant.root / "logs" / f"profile-{variant.name}"
    profiler = {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False}
    with (
        capture_output(traces.with_suffix(".log")),
        in_process.environment({"VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"}),
        in_process.served_engine(variant.weights, server.flags, profiler_config=profiler) as llm,
    ):
        rows = [
            profile_class(llm, each, cutter.cut(options.requests + 2, each.prompt_tokens)) for each in classes
        ]
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "class, tokens": lambda row: row["class"],
        "queue, prefill, decode, ms": lambda row: ", ".join(
            f"{1e3 * phase['value']:,.1f}" for phase in row["seconds"].values()
        ),
        "parts of a step": lambda row: ", ".join(
            f"{part} {share:.0%}" for part, share in row["step"].items() if share >= 0.01
        ),
        "longest operators": lambda row: ", ".join(
            f"{name} {share:.0%}" for name, _, _, share in row["operators"][:3]
        ),
    }
    table = Table.from_rows(f"Requests of {variant.name}", rows, columns, text_columns=4)
    return table, {"workload": workload.name, "classes": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Phases of a variant's requests, parts of a step, operators."
    )
    parser.add_argument(
        "--workload", default="classes", help="name of a file of eval/workloads/, without .yaml"
    )
    parser.add_argument("--requests", type=int, default=4, help="timed requests of each class, at least two")
    run_exploration("profile", parser, explore_requests)
