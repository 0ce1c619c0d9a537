"""The command lines of GuideLLM (0.8) that send loads like those of a workload."""

import math
import shlex
from collections.abc import Iterator

from slimqwen.bench import BenchError
from slimqwen.bench.workload import PromptClass, Workload

RATE = "RATE"
"""Stands for a number that is known once the first class has been measured."""


def list_lines(
    workload: Workload, server: str, model: str, tokenizer: str, context: int, sequences: int
) -> list[str]:
    """Write a command line of GuideLLM for each prompt class.

    GuideLLM makes up its own text of the same length in tokens, so prefix hits and acceptance differ.

    Args:
        workload: workload whose load is imitated.
        server: URL, without /v1.
        model: the served model's name in requests.
        tokenizer: folder or name on a hub.
        context: longest prompt and response together, tokens.
        sequences: most requests that the server runs at once.

    Returns:
        Lines for a shell. A command follows comments (#) on what has to be filled in, or differs from the workload.

    Raises:
        BenchError: GuideLLM has no load of this shape, or the lengths do not fit the context.
    """
    if workload.shape != "new_text" or workload.prompts:
        what = "prompts from your own file" if workload.prompts else f"prompts of the shape {workload.shape}"
        raise BenchError(
            f"{workload.name} sends {what}, which GuideLLM cannot; choose a workload of new text, such as "
            "--workload classes"
        )
    lines: list[str] = []
    for each in workload.scaled(context, sequences):
        lines += _comments(each, workload)
        data = {"prompt_tokens": each.prompt_tokens, "output_tokens": each.output_tokens, **_spread(each)}
        words = [
            "guidellm", "run",
            "--backend", f"kind=openai_http,target={server},model={model},request_format=/v1/completions",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--data", ",".join(["kind=synthetic_text", *(f"{name}={value}" for name, value in data.items())]),
            "--profile", _profile(each),
            "--constraint", f"kind=max_requests,count={each.requests * workload.rounds}",
            "--seed", f"kind=static,value={workload.seed}",
            "--output", f"kind=json,path={workload.name}-{each.name}.json",
        ]  # fmt: skip
        lines.append(shlex.join(words))
    return lines


def _comments(each: PromptClass, workload: Workload) -> Iterator[str]:
    if each.load is not None:
        yield f"# {RATE}: {each.load:g} times the requests a second of {workload.classes[0].name}"
    if each.spread:
        yield f"# {each.name}: GuideLLM draws lengths from a normal distribution, the workload from a log-normal one"


def _profile(each: PromptClass) -> str:
    if each.load is not None:
        return f"kind=poisson,rate={RATE}"
    if each.gap_ms is not None:
        return f"kind=constant,rate={1000 / each.gap_ms:g}"
    return f"kind=concurrent,streams={each.limit}" if each.limit else "kind=throughput"


def _spread(each: PromptClass) -> dict[str, int]:
    """Standard deviations of a log-normal distribution with this mean, exp(mu + sigma^2 / 2)."""
    factor = math.sqrt(math.exp(each.spread**2) - 1)
    lengths = {"prompt_tokens_stdev": each.prompt_tokens, "output_tokens_stdev": each.output_tokens}
    return {name: round(length * factor) for name, length in lengths.items()} if each.spread else {}
