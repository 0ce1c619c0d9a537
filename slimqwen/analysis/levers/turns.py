"""One turn: a variant's engine in a process of its own, a request as warm-up, and one whose steps are timed."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.host_load import HostLoad, Watch
from slimqwen.progress import Progress, silent
from slimqwen.recipe import worker

_WARM_UP_TOKENS = 12
_KV_CACHE_BYTES = 256 << 20


class TurnError(SlimqwenError):
    """An engine could not be timed."""


@dataclass(frozen=True)
class Task:
    """Input of a turn.

    Attributes:
        flags: vLLM's flags by name, as a server of the variant has them.
    """

    flags: Mapping[str, Any]
    prompt_tokens: int
    output_tokens: int


def decode(weights: Path, folder: Path, task: Task, progress: Progress) -> tuple[dict[str, float], HostLoad]:
    """Decode one sequence and time its steps; runs in a worker process.

    Args:
        folder: unused, but part of every worker's job.

    Returns:
        `steps` and `tokens` after the first token, their `seconds`; `memory`: anonymous resident bytes at the end,
        which are weights, caches and the engine, without mapped files. With the load of the host during the timed
        request.
    """
    from vllm import SamplingParams

    from slimqwen.serving import in_process

    progress("loading", 0, 0)
    with in_process.served_engine(weights, task.flags, kv_cache_memory_bytes=_KV_CACHE_BYTES) as llm:
        prompt = {"prompt_token_ids": [100 + number % 1000 for number in range(task.prompt_tokens)]}
        for name, tokens in (("warm-up", _WARM_UP_TOKENS), ("timed", task.output_tokens)):
            progress(name, 0, 0)
            settings = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            llm.llm_engine.add_request(name, prompt, settings)
            watch = Watch()
            with watch.section():
                figures = _timed_steps(llm.llm_engine)
        memory = float(_anonymous_bytes())
    return {**figures, "memory": memory}, watch.load()


def _timed_steps(engine: Any) -> dict[str, float]:
    """Step an engine until its request is answered: steps, tokens and seconds after the first token."""
    started, steps, first_tokens, count = 0.0, 0, 0, 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        count = max([count, *(len(output.outputs[0].token_ids) for output in outputs)])
        if count and not started:
            started, first_tokens = now, count
        elif count:
            steps += 1
    return {"steps": float(steps), "tokens": float(count - first_tokens), "seconds": now - started}


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def in_worker(
    function: Any,
    weights: Path,
    task: Any,
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    progress: Progress = silent,
) -> tuple[dict[str, float], HostLoad]:
    """Call `decode` or `device.measure` in a process of its own.

    Args:
        function: (weights, folder, task, progress) -> (figures, load).
        task: argument of the function, picklable.
        log: file for the output of the process.

    Raises:
        TurnError: the function failed, or its process died or took too long; names the log.
    """
    deadline = time.monotonic() + timeout_s
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as output,
        worker.started(environment, output) as (process, messages),
        contextlib.suppress(EOFError, BrokenPipeError),
    ):
        worker.give(process, function, weights, log.parent, task)
        while messages.poll(max(0.0, deadline - time.monotonic())):
            kind, *content = messages.recv()
            if kind == "progress":
                progress(*content)
            elif kind == "done":
                worker.wait_for_end(process)
                result: tuple[dict[str, float], HostLoad] = content[0]
                return result
            else:
                raise TurnError(f"an engine on {weights.name} failed: {content[0]}; its log is {log}")
    reason = "did not end in time" if time.monotonic() >= deadline else "died"
    raise TurnError(f"the process of an engine on {weights.name} {reason}; its log is {log}")
