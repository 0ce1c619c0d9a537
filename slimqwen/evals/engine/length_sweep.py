"""Length sweep: greedy tokens of consecutive prompt lengths, cold and from the prefix cache, with and without MTP.

A hybrid model keeps a recurrent state at block boundaries alone, so a fault of its copies breaks one prompt length in
every block, or one in 128; a handful of lengths misses it. Each arm is an engine of its own; every answer is
compared with the reference engine's, which has neither drafts nor a prefix cache.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.evals import EvalError
from slimqwen.evals.engine import combinations, modes, scenarios
from slimqwen.evals.engine.combinations import REFERENCE_MODES, NearTie, ServedEngine, TestedBuild
from slimqwen.evals.engine.isolation import Engines, server_here, titled
from slimqwen.evals.engine.scenarios import Answer, Request, TieNoise
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.collection import Collection
from slimqwen.records.record import Block, Count, NonNegative, ServedRecord, Table
from slimqwen.records.settings import Settings
from slimqwen.serving import in_process, unsafe_engines
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.unsafe_engines import Modes
from slimqwen.stats.verdict import Verdict, overall
from slimqwen.text import prompts
from slimqwen.variant import Variant

Cache = Literal["cold", "hit"]

REPORTED_PERIOD = 128
"""Tokens after which the broken prefix hits of upstream reports repeat."""

_SHOWN_LENGTHS = 12

_NOISE_LENGTHS = 64


class LengthSweepSettings(Settings):
    """eval/length_sweep/<name>.yaml; tinyworld.yaml explains each field."""

    folder: ClassVar[str] = "length_sweep"

    text: str
    seed: int
    noise_factor: float = Field(ge=1)
    draft_tokens: int = Field(ge=1)
    lengths: int = Field(ge=2)
    output_tokens: int = Field(ge=1)
    timeout_s: float = Field(gt=0)


class BrokenLength(Block):
    """A prompt length whose answer is not the reference engine's."""

    cache: Cache
    prompt_tokens: Count
    first_difference: Count = Field(description="Tokens of the answer before the first that differs.")
    gap_nats: float | None = Field(
        description="Log-probability gap of the two tokens for the reference engine; null beyond its likeliest."
    )


class Arm(Block):
    """An engine, and what it answered."""

    modes: Modes
    token_budget: Count = Field(description="Largest number of tokens in a step.")
    block_size: Count = Field(description="Tokens in a block of the KV cache; 0 where the engine broke down.")
    first_length: Count = Field(description="Shortest prompt, tokens.")
    lengths: Count = Field(description="Consecutive prompt lengths, each asked cold and again.")
    hit_tokens: Count = Field(description="Prompt tokens taken from the prefix cache when asked again.")
    misses: Count = Field(description="Lengths without a hit when asked again.")
    near_ties: Count = Field(description="Answers that differ where either token is correct.")
    broken: tuple[BrokenLength, ...]
    failure: str | None = Field(description="Why the engine broke down; null where it did not.")
    seconds: NonNegative

    @property
    def verdict(self) -> Verdict:
        """Fail with a broken length; inconclusive where no hit was seen."""
        if self.broken or self.failure:
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE if self.misses else Verdict.PASS


class LengthSweep(ServedRecord):
    """Greedy tokens of consecutive prompt lengths with a prefix cache, compared with an engine that has none."""

    kind = "length_sweep"
    verb = "eval lengths"

    settings_name: str = Field(
        min_length=1,
        description="Name of the settings in eval/length_sweep/.",
        validation_alias="plan",
        serialization_alias="plan",
    )
    build: TestedBuild
    near_tie_nats: NearTie
    cached_tie_nats: float | None = Field(
        default=None,
        description="The same for an answer from the cache that is not the cold one; only in old records.",
    )
    arms: tuple[Arm, ...] = Field(min_length=1)

    @property
    def outcome(self) -> Verdict:
        """The worst verdict of its arms."""
        return overall([arm.verdict for arm in self.arms])

    def finding(self, path: Path, records: Collection) -> str:
        """The verdict and the broken lengths."""
        broken = sum(len(arm.broken) for arm in self.arms)
        answers = sum(2 * arm.lengths for arm in self.arms)
        return f"{self.outcome}: {broken} of {answers} answers with a prefix cache differ from those without"

    def tables(self, path: Path) -> list[Table]:
        """One row per arm; broken lengths are listed below with their remainders."""
        columns = {
            "MTP K": lambda arm: arm.modes.draft_tokens or "off",
            "tokens a step": lambda arm: arm.token_budget,
            "block": lambda arm: arm.block_size,
            "prompt lengths": lambda arm: (
                f"{arm.first_length} to {arm.first_length + arm.lengths - 1}" if arm.lengths else None
            ),
            "hits, tokens": lambda arm: arm.hit_tokens,
            "near ties": lambda arm: arm.near_ties,
            "broken": lambda arm: arm.failure or len(arm.broken),
            "verdict": lambda arm: arm.verdict,
        }
        notes = [
            f"K={arm.modes.draft_tokens}, {cache}: {_listed(arm, cache)}"
            for arm in self.arms
            for cache in ("cold", "hit")
            if any(each.cache == cache for each in arm.broken)
        ]
        title = f"Length sweep of {self.variant}: {self.outcome}"
        return [Table.from_rows(title, self.arms, columns, *notes)]


def _listed(arm: Arm, cache: Cache) -> str:
    """Broken lengths with their remainders by the block and by 128."""
    lengths = [each.prompt_tokens for each in arm.broken if each.cache == cache]
    shown = ", ".join(
        f"{length} (mod {arm.block_size}: {length % arm.block_size}, "
        f"mod {REPORTED_PERIOD}: {length % REPORTED_PERIOD})"
        for length in lengths[:_SHOWN_LENGTHS]
    )
    rest = f" and {len(lengths) - _SHOWN_LENGTHS} more" if len(lengths) > _SHOWN_LENGTHS else ""
    return f"{shown}{rest}"


@dataclass(frozen=True)
class Sweep:
    """The answers of an engine.

    Attributes:
        block_size: tokens in a block of its KV cache.
        answers: tokens by state of the cache and prompt length.
        hit_tokens: prompt tokens taken from the cache when asked again, by prompt length.
    """

    block_size: int
    answers: Mapping[tuple[Cache, int], tuple[int, ...]]
    hit_tokens: Mapping[int, int]


def measure(
    variant: Variant, settings_name: str, *, command: Sequence[str], progress: Progress = silent
) -> Path:
    """Sweep the prompt lengths of a variant, and write its record; a broken arm goes into eval/unsafe_engines.json.

    Raises:
        EvalError: the settings do not fit the variant, or the reference engine fails.
        ServingError: the variant needs a GPU and there is none.
    """
    started = provenance.utc_now()
    settings = LengthSweepSettings.load(settings_name, variant.root)
    variant.require_weights()
    server = server_here(variant, "sweep")
    log = log_file(variant)
    engine, served = ServedEngine.from_command(server), _served_modes(server)
    with Engines.started(server, settings.timeout_s, log) as engines:
        arms: list[_ArmRun] = []
        for depth in _depths(variant, served, settings):
            arm_modes = served.model_copy(
                update={"draft_tokens": depth, "prefix_caching": True, "concurrency": 1}
            )
            flags = combinations.flags_of(arm_modes, served, engine)
            budget = engine.context_len
            # First whole prompts, then prompts in parts of one block, the fewest tokens that a step may have.
            for title in ("whole prompts", "prompts in parts"):
                start_s = time.monotonic()
                budget_flags = {**flags, "max-num-batched-tokens": budget}
                sweep = engines.run(
                    sweep_lengths,
                    (settings, budget_flags, variant.root),
                    titled(f"K={depth}, {title}", progress),
                    modes=arm_modes,
                )
                arms.append(_ArmRun(arm_modes, budget, sweep, round(time.monotonic() - start_s, 1)))
                if isinstance(sweep, str):
                    break
                budget = sweep.block_size
        lengths = sorted({length for arm in arms for _, length in arm.answers})
        flags = combinations.flags_of(REFERENCE_MODES, served, engine)
        task = (settings, flags, lengths, variant.root)
        reference = engines.run(answer_lengths, task, titled("reference engine", progress))
        if isinstance(reference, str):
            raise EvalError(
                f"{variant.name}: the reference engine fails ({reference}); its log says why: {log}"
            )
    answers, noise = reference
    near_tie_nats = noise.near_tie_nats(settings.noise_factor)
    arm_results = [judge(arm, answers, near_tie_nats) for arm in arms]
    record = LengthSweep(
        variant=variant.name,
        settings_name=settings_name,
        build=unsafe_engines.build(variant.weights, server.platform),
        near_tie_nats=near_tie_nats,
        arms=tuple(arm for arm, _ in arm_results),
        provenance=provenance.describe(
            server,
            command,
            started,
            datasets=[settings.file(variant.root)],
            seeds={"prompts": settings.seed},
        ),
    )
    items = [{"arm": number, **item} for number, (_, compared) in enumerate(arm_results) for item in compared]
    path = store.write(variant.folder, record, items)
    _add_unsafe(record, path, variant.root)
    return path


@dataclass(frozen=True)
class _ArmRun:
    """An arm before its answers are compared; its sweep is a line of text if the engine broke down."""

    modes: Modes
    token_budget: int
    sweep: Sweep | str
    seconds: float

    @property
    def answers(self) -> Mapping[tuple[Cache, int], tuple[int, ...]]:
        return {} if isinstance(self.sweep, str) else self.sweep.answers


def log_file(variant: Variant) -> Path:
    """The file that receives vLLM's output while a variant's prompt lengths are swept."""
    return variant.root / "logs" / f"lengths-{variant.name}.log"


def sweep_lengths(
    weights: Path, _: Path, task: tuple[LengthSweepSettings, Mapping[str, Any], Path], progress: Progress
) -> Sweep:
    """Ask an engine with a prefix cache each prompt length twice; `Engines` calls it in a process of its own.

    Raises:
        EvalError: the prompts do not fit the context.
    """
    settings, flags, root = task
    progress("starting", 0, 0)
    answers: dict[tuple[Cache, int], tuple[int, ...]] = {}
    hit_tokens: dict[int, int] = {}
    with in_process.served_engine(weights, flags) as llm:
        block_size = scenarios.cache_block_size(llm)
        # With drafts vLLM leaves out the last block of a hit: a hit needs more than two blocks.
        first = 2 * block_size + 1
        count = settings.lengths
        chat_request = _chat_requests(weights, settings, root, first + count)
        context_len = llm.llm_engine.vllm_config.model_config.max_model_len
        if first + count + settings.output_tokens > context_len:
            raise EvalError(
                f"prompts of {first} to {first + count - 1} tokens and {settings.output_tokens} more do not fit a "
                f"context of {context_len}; raise VLLM_MAX_MODEL_LEN"
            )
        for done, length in enumerate(range(first, first + count)):
            progress("sweeping", done, count)
            request = chat_request(length)
            llm.reset_prefix_cache()
            (cold,) = scenarios.replay(llm, [request])
            before = in_process.counter(llm, "vllm:prefix_cache_hits")
            (hit,) = scenarios.replay(llm, [request])
            hit_tokens[length] = int(in_process.counter(llm, "vllm:prefix_cache_hits") - before)
            answers["cold", length], answers["hit", length] = cold.tokens, hit.tokens
    return Sweep(block_size, answers, hit_tokens)


def answer_lengths(
    weights: Path,
    _: Path,
    task: tuple[LengthSweepSettings, Mapping[str, Any], Sequence[int], Path],
    progress: Progress,
) -> tuple[dict[int, Answer], TieNoise]:
    """Answer each prompt length with the reference engine; `Engines` calls it in a process of its own.

    Returns:
        Answers by prompt length, and the noise of their gaps on the first `_NOISE_LENGTHS` of them.
    """
    settings, flags, lengths, root = task
    progress("starting", 0, 0)
    answers = {}
    chat_request = _chat_requests(weights, settings, root, max(lengths, default=0))
    with in_process.served_engine(weights, flags, max_num_batched_tokens=flags["max-model-len"]) as llm:
        for done, length in enumerate(lengths):
            progress("answering", done, len(lengths))
            (answers[length],) = scenarios.replay(llm, [chat_request(length)], log_probabilities=True)
        read = lengths[:_NOISE_LENGTHS]
        noise = scenarios.measure_tie_noise(
            llm,
            {"lengths": [chat_request(length) for length in read]},
            {"lengths": [answers[length] for length in read]},
            progress,
        )
    return answers, noise


def judge(
    run: _ArmRun,
    reference: Mapping[int, Answer],
    near_tie_nats: float,
) -> tuple[Arm, list[dict[str, Any]]]:
    """Compare an arm's answers with the reference engine's.

    Args:
        reference: answers by prompt length.

    Returns:
        The arm, and one item per answer.
    """
    broken: list[BrokenLength] = []
    items: list[dict[str, Any]] = []
    for (cache, length), tokens in run.answers.items():
        comparison = modes.compare(reference[length], tokens, near_tie_nats)
        items.append({"cache": cache, "prompt_tokens": length, **asdict(comparison)})
        if comparison.differs and not comparison.near_tie:
            broken.append(
                BrokenLength(
                    cache=cache,
                    prompt_tokens=length,
                    first_difference=comparison.same,
                    gap_nats=comparison.gap_nats,
                )
            )
    sweep = run.sweep if isinstance(run.sweep, Sweep) else Sweep(0, {}, {})
    arm = Arm(
        modes=run.modes,
        token_budget=run.token_budget,
        block_size=sweep.block_size,
        first_length=min(sweep.hit_tokens, default=0),
        lengths=len(sweep.hit_tokens),
        hit_tokens=sum(sweep.hit_tokens.values()),
        misses=sum(tokens == 0 for tokens in sweep.hit_tokens.values()),
        near_ties=sum(item["near_tie"] for item in items),
        broken=tuple(broken),
        failure=run.sweep if isinstance(run.sweep, str) else None,
        seconds=run.seconds,
    )
    return arm, items


def _chat_requests(
    weights: Path, settings: LengthSweepSettings, root: Path, longest: int
) -> Callable[[int], Request]:
    """A function from a length to a chat of one user message, cut so that the whole prompt has that many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
    mark = "SLIMQWEN-MESSAGE"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, after = (
        tuple(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in chat.split(mark)
    )
    cutter = prompts.PromptCutter.for_checkpoint(weights, settings.text, settings.seed, root)
    message = cutter.cut(1, longest)[0]

    def request(length: int) -> Request:
        prompt = (*before, *message[: length - len(before) - len(after)], *after)
        return Request(prompt, settings.output_tokens)

    return request


def _served_modes(server: ServerCommand) -> Modes:
    """The variant's modes; those that its flags leave open are the reference engine's."""
    flag_modes = unsafe_engines.served_modes(server.flags, server.platform)
    return REFERENCE_MODES.model_copy(
        update={name: value for name, value in flag_modes.items() if value is not None}
    )


def _depths(variant: Variant, served: Modes, settings: LengthSweepSettings) -> list[int]:
    config = checkpoint.text_config(checkpoint.read_config(variant.weights))
    if not config.get("mtp_num_hidden_layers"):
        return [0]
    return [0, served.draft_tokens or settings.draft_tokens]


def _add_unsafe(record: LengthSweep, path: Path, root: Path) -> None:
    location = provenance.portable(str(path), root)
    # Whole prompts and prompts in parts are one combination of modes.
    failed = {arm.modes.model_dump_json(): arm for arm in record.arms if arm.verdict == Verdict.FAIL}
    findings = [
        unsafe_engines.Finding(
            build=record.build,
            modes=arm.modes,
            reason=arm.failure or f"{len(arm.broken)} of {2 * arm.lengths} answers of prompt lengths differ",
            record=location,
        )
        for arm in failed.values()
    ]
    # A sweep without findings removes no entry: `eval engine` asks more kinds of requests.
    unsafe_engines.update(root, record.build, location, unsafe=findings, fine=[])
