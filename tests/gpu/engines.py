"""Step c: the engine check of the embedded model: no draft, no prefix of a cache and no other request changes a token.

For each runner of vLLM and each K, an engine with the prefix cache and one without it answer prompts of consecutive
lengths from two blocks on, cold and again from the cache, all together, one of a single token while another response is
generated, and the turns of concurrent sessions. A plain engine of the same device says what is right.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.evals.engine import compare_engine, reference_flags
from slimqwen.evals.engine_process import EngineRun, EngineSettings, Request, Way, run_engine, run_reference
from slimqwen.evals.engine_runs import EngineProcesses
from slimqwen.progress import silent
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from tests.gpu.steps import Here

DEPTHS = (0, 1, 4)
RUNNERS = {"V1": "0", "V2": "1"}
"""vLLM's model runner -> value of VLLM_USE_V2_MODEL_RUNNER; a CPU has V1 alone."""

WAYS: Mapping[bool, tuple[Way, ...]] = {
    True: ("alone", "cached", "joining", "session"),
    False: ("together", "joining"),
}
"""Whether the prefix cache is on -> ways to send the prompts."""

_KV_CACHE_BYTES = 2**30

Run = Callable[[Callable[..., Any], Any, str], Any]
"""(function of `evals.engine_process`, its task, a title) -> its result, or one line that says why there is none."""


def run(here: Here) -> str:
    """Check every runner and K, on a GPU all at once: the model is small."""
    jobs = [(runner, (depth,)) for runner in RUNNERS for depth in DEPTHS] if here.gpu else [("V1", DEPTHS)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: check(here, *job), jobs))
    found = here.parts.values()
    engines = [engine for each in found for engine in each.get("engines", ())]
    wrong = [engine for engine in engines if engine["verdict"] == Verdict.FAIL]
    idle = [engine["title"] for engine in engines if engine["verdict"] == Verdict.INCONCLUSIVE]
    line = (
        f"{len(engines)} engines, {sum(engine['responses'] for engine in engines)} responses, "
        f"{sum(engine['near_ties'] for engine in engines)} near ties, {len(wrong)} engines wrong"
        f"{'; no draft accepted or no prefix found: ' if idle else ''}{', '.join(idle)}"
    )
    assert not wrong, "; ".join(
        [line, *(f"{each['title']}: {each['failure'] or each['wrong']}" for each in wrong)]
    )
    return line


def check(here: Here, runner: str, depths: Sequence[int]) -> None:
    """Check the engines of a runner at each K, forks of one process that has imported vLLM."""
    if here.gpu is None:
        subject, settings = rehearsed(here.root)
    else:
        settings = EngineSettings.load("tinyworld", here.root)
        lines = {
            "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner],
            "VLLM_GPU_MEMORY_UTILIZATION": "0.05",
            "VLLM_KV_CACHE_MEMORY_BYTES": str(_KV_CACHE_BYTES),
        }
        subject = variants.load("tiny", here.root).with_lines(lines)
    log = here.root / "logs" / f"gpu-check-c-{runner}-{depths[0]}.log"
    with EngineProcesses.started(ServerCommand.resolve(subject), settings.timeout_s, log) as processes:

        def run(function: Callable[..., Any], task: Any, title: str) -> Any:
            return processes.run(function, task, title, silent)

        def compare(depth: int) -> dict[str, Any]:
            engines = check_depth(subject, depth, settings, run)
            return {"engines": [{**engine, "title": f"{runner}, {engine['title']}"} for engine in engines]}

        for depth in depths:
            here.part(f"{runner}, K={depth}", partial(compare, depth))


def rehearsed(root: Path) -> tuple[Variant, EngineSettings]:
    """The embedded model with a short context, and fewer prompts than its gate has."""
    fewer = {"lengths": 6, "output_tokens": 8}
    settings = EngineSettings.load("tinyworld", root).model_copy(update=fewer)
    return variants.load("tiny", root).with_lines({"VLLM_MAX_MODEL_LEN": "640"}), settings


def check_depth(subject: Variant, depth: int, settings: EngineSettings, run: Run) -> list[dict[str, Any]]:
    """Compare an engine with and one without the prefix cache, at K = `depth`, with the plain engine.

    Raises:
        AssertionError: the plain engine does not run.
    """
    assert has_mtp_head(subject.weights)
    server = ServerCommand.resolve(subject.with_lines({"VLLM_MAX_NUM_SEQS": str(settings.concurrency)}))
    made: dict[str, tuple[bool, Mapping[str, Any], EngineRun | str]] = {}
    requests: list[Request] | None = None
    drafts = {"speculative-config": {"method": "mtp", "num_speculative_tokens": depth}} if depth else {}
    for cache, ways in WAYS.items():
        flags = {**server.flags, **drafts, "enable-prefix-caching": cache}
        name = f"K={depth}, prefix cache {'on' if cache else 'off'}"
        answered = run(run_engine, (settings, flags, ways, requests, subject.root), name)
        made[name] = cache, flags, answered
        if isinstance(answered, EngineRun):
            requests = answered.requests
    assert requests is not None, f"no engine runs: {[answered for *_, answered in made.values()]}"
    runs = [answered for *_, answered in made.values() if isinstance(answered, EngineRun)]
    asked = list(dict.fromkeys([*requests, *(request for each in runs for _, request, _ in each.responses)]))
    reference = run(run_reference, (reference_flags(server), asked), "plain")
    assert not isinstance(reference, str), f"the plain engine does not run: {reference}"
    responses, noise_nats = reference
    right = dict(zip(asked, responses, strict=True))
    near_tie_nats = settings.noise_factor * noise_nats
    found = []
    for name, (cache, flags, answered) in made.items():
        kind = "with prefix cache" if cache else "without prefix cache"
        engine, _ = compare_engine(kind, flags, answered, right, near_tie_nats, 0.0)
        found.append({**engine.model_dump(mode="json"), "verdict": engine.verdict, "title": name})
    return found


def in_this_process(weights: Path) -> Run:
    """Run the engines in this process: quicker for a test, but a crash of vLLM would end it."""

    def run(function: Callable[..., Any], task: Any, title: str) -> Any:
        return function(weights, task, silent)

    return run
