"""The combinations of engine modes that are compared, their vLLM flags, and the reference engine's answers.

The reference engine serves the same checkpoint with nothing that could change its tokens: no MTP, no prefix caching, no
chunked prefill, no compilation, the model's own KV cache dtype, one request at a time.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import Field, ValidationError

from slimqwen import checkpoint
from slimqwen.evals.engine import scenarios
from slimqwen.evals.engine.scenarios import Answer, EngineSettings, Mode, Request, TieNoise
from slimqwen.progress import Progress
from slimqwen.serving import in_process, unsafe_engines
from slimqwen.serving import platform as platforms
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.unsafe_engines import Build, Modes

REFERENCE_MODES = Modes(
    draft_tokens=0,
    prefix_caching=False,
    kv_cache_dtype="auto",
    # vLLM does not guarantee this model without it; with a token budget of the whole context no prompt is cut.
    chunked_prefill=True,
    concurrency=1,
    graphs="eager",
)

TestedBuild = Annotated[
    Build, Field(description="The build of vLLM, hardware and architecture that the results hold for.")
]
NearTie = Annotated[
    float,
    Field(
        ge=0,
        description="Log-probability gap of the reference engine up to which either token is correct: a multiple of "
        "the noise of such gaps in the same run.",
    ),
]


@dataclass(frozen=True)
class Combination:
    """One combination of engine modes.

    Attributes:
        flags: vLLM's flags, by name without dashes.
        served: whether the variant is served with it.
        mixed: whether it answers the mixed requests too.
        refusal: why this platform or vLLM's configuration does not allow it; None where they do.
    """

    modes: Modes
    flags: Mapping[str, Any]
    served: bool
    mixed: bool
    refusal: str | None = None


@dataclass(frozen=True)
class Reference:
    """The combinations, their requests by group, the reference engine's answers in the same order, and its noise."""

    combinations: list[Combination]
    requests: Mapping[str, list[Request]]
    answers: Mapping[str, list[Answer]]
    noise: TieNoise


@dataclass(frozen=True)
class ServedEngine:
    """How a variant is served: what a process of its own can be sent of a `ServerCommand`."""

    flags: Mapping[str, Any]
    platform: platforms.Platform
    context_len: int
    root: Path

    @classmethod
    def from_command(cls, server: ServerCommand) -> Self:
        """The engine that a server's command starts."""
        return cls(dict(server.flags), server.platform, server.max_model_len, server.variant.root)


def combine(
    settings: EngineSettings, served: Modes, engine: ServedEngine, *, has_mtp: bool
) -> list[Combination]:
    """List the combinations that the settings ask for, the served one first, none twice.

    Args:
        engine: its flags have max-num-batched-tokens.
    """
    values: dict[Mode, Sequence[Any]] = {
        "draft_tokens": (0, served.draft_tokens or settings.draft_tokens),
        "prefix_caching": (False, True),
        "kv_cache_dtype": list(dict.fromkeys([served.kv_cache_dtype, *settings.kv_cache_dtypes])),
        "chunked_prefill": (True, False),
        "concurrency": (1, served.concurrency if served.concurrency > 1 else settings.concurrency),
        "graphs": get_args(unsafe_engines.GraphMode)[: 2 if engine.platform == "cpu" else 3],
    }
    requested = [served]
    for group in settings.crossed:
        for group_values in itertools.product(*(values[mode] for mode in group)):
            requested.append(served.model_copy(update=dict(zip(group, group_values, strict=True))))
    combinations = []
    for modes in dict.fromkeys(requested):
        flags = flags_of(modes, served, engine)
        differs_in_concurrency_only = modes.model_copy(update={"concurrency": served.concurrency}) == served
        combinations.append(
            Combination(
                modes=modes,
                flags=flags,
                served=modes == served,
                mixed=modes == served or (differs_in_concurrency_only and modes.concurrency > 1),
                refusal=_platform_refusal(modes, flags, engine.platform, has_mtp=has_mtp),
            )
        )
    return combinations


def _platform_refusal(
    modes: Modes, flags: Mapping[str, Any], platform: platforms.Platform, *, has_mtp: bool
) -> str | None:
    if modes.draft_tokens and not has_mtp:
        return "the checkpoint has no MTP head"
    if platform != "cpu":
        return None
    refusals = (row for row in platforms.GPU_ONLY if row.flag in flags and row.applies(flags[row.flag]))
    return next((row.why for row in refusals), None)


def flags_of(modes: Modes, served: Modes, engine: ServedEngine) -> dict[str, Any]:
    """The variant's flags with other modes.

    Flags that set no mode are kept, except those that depend on a mode that is not as served.
    """
    flags = {
        **engine.flags,
        "enable-prefix-caching": modes.prefix_caching,
        "kv-cache-dtype": modes.kv_cache_dtype,
        "enable-chunked-prefill": modes.chunked_prefill,
        "max-num-seqs": modes.concurrency,
        "enforce-eager": modes.graphs == "eager",
        "max-model-len": engine.context_len,
    }
    if modes.draft_tokens != served.draft_tokens:
        flags["speculative-config"] = {"method": "mtp", "num_speculative_tokens": modes.draft_tokens}
    if not modes.draft_tokens:
        flags.pop("speculative-config", None)
    if not modes.chunked_prefill:
        flags["max-num-batched-tokens"] = max(engine.context_len, engine.flags["max-num-batched-tokens"])
    if (modes.draft_tokens, modes.concurrency) != (served.draft_tokens, served.concurrency):
        flags.pop("cudagraph-capture-sizes", None)
    if engine.platform == "cuda" and modes.graphs != served.graphs:
        compilation = dict(engine.flags.get("compilation-config") or {})
        compilation.pop("cudagraph_mode", None)
        if modes.graphs == "compiled":
            compilation["cudagraph_mode"] = "NONE"
        flags["compilation-config"] = compilation
    return flags


def answer_by_reference(
    weights: Path, _: Path, task: tuple[EngineSettings, ServedEngine], progress: Progress
) -> Reference:
    """List the combinations, make the requests, and answer them with the reference engine.

    `slimqwen.evals.engine.isolation` calls it in a process of its own.

    Raises:
        EvalError: a request does not fit the context.
    """
    progress("starting", 0, 0)
    settings, engine = task
    # Modes that the flags leave open are those that vLLM's server chooses.
    config = _vllm_config(weights, engine.flags)
    defaults = {
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "concurrency": config.scheduler_config.max_num_seqs,
    }
    flag_modes = unsafe_engines.served_modes(engine.flags, engine.platform)
    served = Modes(**{name: defaults[name] if value is None else value for name, value in flag_modes.items()})
    tokens_per_step = (
        engine.flags.get("max-num-batched-tokens") or config.scheduler_config.max_num_batched_tokens
    )
    engine = dataclasses.replace(engine, flags={**engine.flags, "max-num-batched-tokens": tokens_per_step})
    has_mtp = bool(checkpoint.text_config(checkpoint.read_config(weights)).get("mtp_num_hidden_layers"))
    combinations = [
        dataclasses.replace(each, refusal=each.refusal or _vllm_refusal(weights, each.flags))
        for each in combine(settings, served, engine, has_mtp=has_mtp)
    ]
    with in_process.served_engine(
        weights,
        flags_of(REFERENCE_MODES, served, engine),
        max_num_batched_tokens=max(engine.context_len, tokens_per_step),
    ) as llm:
        requests = scenarios.cut_requests(
            settings,
            weights,
            engine.root,
            context_len=engine.context_len,
            max_batched_tokens=tokens_per_step,
            block_size=scenarios.cache_block_size(llm),
            draft_tokens=served.draft_tokens or settings.draft_tokens,
            concurrency=served.concurrency if served.concurrency > 1 else settings.concurrency,
        )
        answers = scenarios.answer_singly(llm, requests, progress)
        noise = scenarios.measure_tie_noise(llm, requests, answers, progress)
    return Reference(combinations, requests, answers, noise)


def _vllm_config(weights: Path, flags: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments = EngineArgs(model=str(weights), **in_process.served_arguments(flags))
    return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)


def _vllm_refusal(weights: Path, flags: Mapping[str, Any]) -> str | None:
    """Why vLLM does not accept the flags; None where it does."""
    try:
        _vllm_config(weights, flags)
    except (ValueError, NotImplementedError, AssertionError) as error:
        message = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        return f"vLLM refuses it: {' '.join(message.split())[:200]}"
    return None
