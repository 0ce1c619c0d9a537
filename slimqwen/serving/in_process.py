"""vLLM engines in this process, for stages and tests: no HTTP, readable counters, the same result every time.

Loading a small model takes about 5 seconds, the first time 15 more for imports. A process can run several engines one
after the other, but not two at once.
"""

import copy
import ctypes
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from slimqwen import checkpoint, host, lifeline
from slimqwen.checkpoint.weights import has_mtp_head, refuse_without_cpu_kernel
from slimqwen.serving.errors import ServingError
from slimqwen.variant import repository_root

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a scheduler in its own process would form batches by chance of timing
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for the length of a `with` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def engine(folder: Path | str, **arguments: Any) -> Iterator[Any]:
    """A `vllm.LLM` on a checkpoint folder, shut down after the block; a multimodal checkpoint is loaded without vision.

    Args:
        folder: a checkpoint that vLLM can load.
        arguments: arguments of `LLM`. By default bfloat16, eager, in this process (uni), a context of 256 tokens, 32
            sequences at a time, no prefix cache, seed 0, statistics on; on a CPU a KV cache of 256 MiB.
            `num_speculative_tokens=K` is short for MTP with drafts of K tokens; 0, the default, means no drafts.

    Raises:
        UnsupportedFormatError: there is no GPU, and vLLM's CPU build has no kernel for the checkpoint.
    """
    if host.detect() == "cpu":
        refuse_without_cpu_kernel(Path(folder))
    drafts = arguments.pop("num_speculative_tokens", 0)
    if drafts:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    small = {
        "distributed_executor_backend": "uni",
        "dtype": "bfloat16",
        "enforce_eager": True,
        # A prefix hit changes which tokens are computed together, and with it the outcome of near ties.
        "enable_prefix_caching": False,
        # On a GPU, vLLM's own share of its memory.
        **({"kv_cache_memory_bytes": 256 << 20} if host.detect() == "cpu" else {}),
        "max_model_len": 256,
        "max_num_seqs": 32,
        "disable_log_stats": False,
        "seed": 0,
        **({"language_model_only": True} if "vision_config" in checkpoint.read_config(Path(folder)) else {}),
    }
    with ExitStack() as stack:
        stack.enter_context(environment(_ENVIRONMENT | host.user_variables(os.environ, repository_root())))
        # Imported only now, because vLLM's modules read the environment at import.
        from vllm import LLM, envs
        from vllm.distributed import cleanup_dist_env_and_memory

        stack.callback(envs.disable_envs_cache)  # an engine freezes vLLM's view of the environment
        llm, ends_process = None, False
        try:
            llm = LLM(str(folder), **{**small, **arguments})
            yield llm
        except lifeline.ProcessEndsError:
            ends_process = True  # and with it all that the engine holds: its clean-up takes seconds
            raise
        finally:
            if not ends_process:
                if llm is not None:
                    llm.llm_engine.engine_core.shutdown()
                del llm
                cleanup_dist_env_and_memory()
                return_freed_memory()


def return_freed_memory() -> None:
    """Return this process's free heap memory to the operating system, so that a server started now can use it.

    After an engine of a 135M model the heap shrank by 0.7 GB.
    """
    gc.collect()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def served_arguments(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a server's flags, by name without dashes, to arguments of `vllm.LLM`; those of HTTP are left out."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}
    # Copied, because vLLM writes into the dictionaries that it is given.
    named = {name.replace("-", "_"): copy.deepcopy(value) for name, value in flags.items()}
    return {
        "dtype": "auto",
        "enforce_eager": False,
        "language_model_only": False,
        **{name: value for name, value in named.items() if name in known},
        "disable_log_stats": False,  # the counters
    }


def served_engine(weights: Path, flags: Mapping[str, Any], **overrides: Any) -> AbstractContextManager[Any]:
    """A `vllm.LLM` with the flags of a server, for a `with` block; flags of HTTP are left out.

    Args:
        weights: folder of the checkpoint.
        flags: values by flag name without dashes.
        overrides: arguments of `LLM` that replace what the flags say.
    """
    arguments = served_arguments(flags)
    space_gib = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if space_gib is not None and host.detect() == "cpu":
        arguments["kv_cache_memory_bytes"] = int(float(space_gib) * 2**30)
    return engine(weights, **{**arguments, **overrides})


def try_out(folder: Path) -> None:
    """Check that vLLM can load a checkpoint, with its MTP head if it has one, and generate a token.

    Raises:
        ServingError: vLLM cannot load it or generates nothing.
    """
    from vllm import SamplingParams

    drafts = 1 if has_mtp_head(folder) else 0
    try:
        with engine(folder, num_speculative_tokens=drafts, max_model_len=64, max_num_seqs=1) as llm:
            few = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], few, use_tqdm=False)
    except Exception as error:
        what = " ".join(str(error).split())
        raise ServingError(
            f"{folder}: vLLM does not serve it ({type(error).__name__}: {what[:300]}); make or download the "
            "checkpoint anew"
        ) from error


def read_prompts(llm: Any, prompts: Sequence[Sequence[int]], consume: Callable[[Any, Any], None]) -> None:
    """Have an engine read prompts together, and pass its next-token distributions to `consume`.

    vLLM makes a Python object of every number that it returns, millions for the whole distributions of a text. They
    are therefore intercepted where vLLM takes its top k from them: `sampler.gather_logprobs`, in this process.

    Args:
        llm: engine of `engine`.
        prompts: token ids.
        consume: called with log-probabilities [positions, vocabulary] and the tokens that follow [positions], for a
            prompt or a chunk of it; the chunks of a prompt come in order, prompts in any order.
    """
    from vllm import SamplingParams

    sampler = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.sampler
    stock = sampler.gather_logprobs

    def gather_logprobs(scores: Any, count: int, targets: Any, *more: Any, **named: Any) -> Any:
        consume(scores.float().cpu(), targets.long().cpu())
        return stock(scores, count, targets, *more, **named)

    sampler.gather_logprobs = gather_logprobs
    try:
        settings = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], settings, use_tqdm=False)
    finally:
        sampler.gather_logprobs = stock


def read_head_inputs(llm: Any, prompts: Sequence[Sequence[int]], consume: Callable[[Any], None]) -> None:
    """Have an engine read prompts, and pass the hidden states after its last norm (inputs of lm_head) to `consume`.

    Args:
        llm: engine of `engine`, with weights of any format that vLLM serves.
        prompts: token ids.
        consume: called several times with the hidden states of some tokens, [tokens, hidden], in any order.
    """
    from vllm import SamplingParams

    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    stock = model.compute_logits

    def compute_logits(hidden: Any, *more: Any, **named: Any) -> Any:
        consume(hidden)
        return stock(hidden, *more, **named)

    model.compute_logits = compute_logits
    try:
        # Log-probabilities of the prompt are requested so that the output head is computed at each of its tokens.
        settings = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], settings, use_tqdm=False)
    finally:
        del model.compute_logits


def counter(llm: Any, name: str) -> int:
    """Present value of a counter of the engine, such as `vllm:spec_decode_num_accepted_tokens`; 0 if there is none."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def vector(llm: Any, name: str) -> tuple[int, ...]:
    """Present values of a counter that the engine has per position; empty if there is none.

    An example is `vllm:spec_decode_num_accepted_tokens_per_pos`, accepted draft tokens at positions 1..K.
    """
    vectors = [tuple(metric.values) for metric in llm.get_metrics() if metric.name == name]
    return tuple(map(sum, zip(*vectors, strict=True)))
