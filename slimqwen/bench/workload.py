"""Workloads, which state the prompt classes that a measurement sends; read from eval/workloads/<name>.yaml."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from slimqwen.bench import BenchError
from slimqwen.bench.load_shapes import SHAPES, SUFFIX_TOKENS
from slimqwen.records.settings import OWN, Settings, find_own_evaluation
from slimqwen.text.corpus import resolve_text
from slimqwen.text.tables import find_table
from slimqwen.variant import Variant
from slimqwen.yaml_file import YamlPart, YamlText

TO_MAX_NUM_SEQS = "1..max_num_seqs"
"""Concurrency of a class that stands for several classes: 1, 2, 4, … up to the sequences that a server runs at once."""


_PROMPTS = "prompts"
"""Name without its ending of the file of an own evaluation's prompts."""

UNLIMITED = "unlimited"
"""Concurrency of a class whose requests are all sent at once."""

DEFAULT_COLUMNS = (
    "ttft_ms.mean",
    "tpot_ms.mean",
    "itl_ms.mean",
    "e2el_ms.mean",
    "output_throughput_tokens_per_s",
    "acceptance_length",
    "memory_share",
)

_STATISTIC = r"(ttft|tpot|itl|e2el)_ms\.(mean|median|p90|p95|p99)"
FIGURES = (
    "request_throughput_per_s",
    "output_throughput_tokens_per_s",
    "total_throughput_tokens_per_s",
    "goodput_per_s",
    "good_share",
    "rate_per_s",
    "concurrency",
    "acceptance_length",
    "memory_share",
    "prefix_hits",
    "repeat_speedup",
)
Column = Annotated[str, Field(pattern=rf"^({_STATISTIC}|{'|'.join(FIGURES)})$")]

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceLevel(_Strict):
    """Limits within which a request counts for the goodput: largest TTFT and largest TPOT, milliseconds."""

    ttft_ms: Positive
    tpot_ms: Positive

    def is_met_by(self, request: Mapping[str, Any]) -> bool:
        """Whether a successful request, a mapping with `ttft_ms` and `tpot_ms`, is within both limits."""
        return bool(request["ttft_ms"] <= self.ttft_ms and request["tpot_ms"] <= self.tpot_ms)


class PromptClass(_Strict):
    """A prompt class: requests of equal or alike lengths that are sent in the same way.

    Attributes:
        name: key of the class in the file.
        prompt_tokens: length of a prompt, tokens; the mean length if there is a spread.
        output_tokens: length of a response, tokens, for which the model's end of text is ignored; also a mean.
        requests: number of requests a round; in a sweep of the concurrency, at least the concurrency.
        spread: standard deviation of the natural logarithm of both lengths, which are drawn independently from
            log-normal distributions; 0 makes all requests equally long.
        concurrency: most requests in flight, "unlimited", or "1..max_num_seqs"; by default the workload's. A class with
            an arrival process (one of the next two fields) has no limit.
        gap_ms: fixed gap between two requests, milliseconds.
        load: rate of a Poisson process, as a share of the throughput that the first variant reached in the first class.
    """

    name: str
    prompt_tokens: Count
    output_tokens: Annotated[int, Field(ge=2)]
    requests: Annotated[int, Field(ge=2)]
    spread: Annotated[float, Field(ge=0)] = 0.0
    concurrency: Count | Literal["unlimited", "1..max_num_seqs"] | None = None
    gap_ms: Positive | None = None
    load: Positive | None = None

    @model_validator(mode="after")
    def _has_one_arrival(self) -> "PromptClass":
        if sum(value is not None for value in (self.concurrency, self.gap_ms, self.load)) > 1:
            raise ValueError("concurrency, gap_ms and load exclude each other; keep one of them")
        return self

    @property
    def arrives(self) -> bool:
        """Whether requests are sent at given times; if not, the next is sent when a response has arrived."""
        return self.gap_ms is not None or self.load is not None

    @property
    def limit(self) -> int | None:
        """Most requests in flight; None for no limit."""
        return None if self.concurrency in (None, UNLIMITED, TO_MAX_NUM_SEQS) else int(self.concurrency)

    def lengths(self, seed: Sequence[int], min_tokens: int, max_model_len: int) -> list[tuple[int, int]]:
        """Draw lengths of prompt and response, tokens, for each request of a round; equal seeds give equal lengths.

        Args:
            seed: numbers that seed the generator.
            min_tokens: lower bound of a prompt's and of a response's length, tokens.
            max_model_len: longest prompt and response together; longer pairs are cut to it.
        """
        if not self.spread:
            return [(self.prompt_tokens, self.output_tokens)] * self.requests
        rng = np.random.default_rng(seed)

        def draw(mean: int) -> list[int]:
            # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
            lengths = rng.lognormal(math.log(mean) - self.spread**2 / 2, self.spread, self.requests)
            return [max(min_tokens, round(length)) for length in lengths]

        pairs = []
        for prompt, output in zip(draw(self.prompt_tokens), draw(self.output_tokens), strict=True):
            prompt = min(prompt, max_model_len - min_tokens)
            pairs.append((prompt, min(output, max_model_len - prompt)))
        return pairs


class Workload(Settings):
    """A workload: one file of eval/workloads/.

    Attributes:
        documents: text from which prompts are cut: name of a text in eval/texts, or a path relative to the repository.
        seed: seed of the first document, of drawn lengths and of arrival times.
        reference_context_tokens: context length for which the lengths are written; for a shorter served context, all
            lengths are multiplied by max_model_len / reference_context_tokens.
        min_tokens: shortest length after scaling, tokens.
        concurrency: most requests in flight in classes that do not set it.
        warmup_requests: number of requests before every class whose times are not used.
        rounds: number of times that all classes are sent.
        sampling: further fields of a request.
        config: config.env lines that replace each variant's own for this workload.
        service_level: limits within which a request counts for the goodput; None for no goodput.
        columns: figures of the table: `<measure>.<statistic>`, or a figure of a class.
        shape: what the prompts begin with: new text, prefixes that were sent before, or the earlier turns of a session.
        classes: classes in the order in which they are sent.
        prompts: file of prompts that are sent unchanged in every round, relative to the repository; None if prompts are
            cut from `documents`.
        output_tokens: length of the response, tokens, to a prompt of the file `prompts` that states none.
    """

    folder: ClassVar[str] = "workloads"
    own_file: ClassVar[str] = "workload"

    documents: str
    seed: int
    reference_context_tokens: Count
    min_tokens: Annotated[int, Field(ge=2)]
    concurrency: Count = 1
    warmup_requests: Annotated[int, Field(ge=0)]
    rounds: Count
    sampling: dict[str, float]
    config: dict[str, str] = Field(default={})
    service_level: ServiceLevel | None = None
    columns: tuple[Column, ...] = DEFAULT_COLUMNS
    shape: Literal["new_text", "prefixes", "sessions"] = "new_text"
    classes: Annotated[tuple[PromptClass, ...], Field(min_length=1)]
    prompts: Path | None = None
    output_tokens: Annotated[int, Field(ge=2)] | None = None

    @classmethod
    def _load_own(cls, name: str, root: Path) -> "Workload":
        settings = super()._load_own(name, root)
        if settings.prompts or settings.documents:
            return settings
        return settings.model_copy(
            update={"prompts": OWN / name / find_table(root / OWN / name, _PROMPTS).name}
        )

    @classmethod
    def _from_text(cls, text: YamlText, name: str) -> "Workload":
        content = text.content
        if not isinstance(content, dict) or "classes" in content or "output_tokens" not in content:
            return super()._from_text(text, name)
        # The lengths of own prompts are not known before a tokenizer has counted them: see `of_own_prompts`.
        only = PromptClass(name="own", prompt_tokens=1, output_tokens=2, requests=2)
        own = {"documents": "", "seed": 0, "reference_context_tokens": 1, "min_tokens": 2, "classes": (only,)}
        return super()._from_text(replace(text, content={**own, **content}), name)

    def inputs(self, root: Path) -> Sequence[Path | YamlPart]:
        """Files on which the requests depend: the workload's YAML file, and its prompts or documents."""
        text = root / self.prompts if self.prompts else resolve_text(self.documents, root)
        return [*super().inputs(root), text]

    def of_own_prompts(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int]) -> "Workload":
        """A copy of the workload whose only class stands for given prompts; the class states their mean lengths.

        Args:
            prompts: token IDs of each prompt.
            output_tokens: length of the response to each prompt, tokens.
        """
        lengths = {
            "prompt_tokens": round(statistics.fmean(map(len, prompts))),
            "output_tokens": round(statistics.fmean(output_tokens)),
            "requests": len(prompts),
        }
        return self.model_copy(update={"classes": (self.classes[0].model_copy(update=lengths),)})

    @field_validator("classes", mode="before")
    @classmethod
    def _read_by_name(cls, classes: Any) -> Any:
        if not isinstance(classes, dict):
            return classes
        entries = {
            name: {"name": name, **body} if isinstance(body, dict) else body for name, body in classes.items()
        }
        # Validated by name, so that a fault has the line of its class.
        return tuple(TypeAdapter(dict[str, PromptClass]).validate_python(entries).values())

    @model_validator(mode="after")
    def _check_order(self) -> "Workload":
        if self.classes[0].load is not None:
            raise ValueError(
                "a `load` is a share of the throughput of the first class; remove `load` from the first class"
            )
        if self.shape != "new_text" and any(c.spread for c in self.classes):
            raise ValueError(f"prompts of the shape {self.shape} have fixed lengths; remove `spread`")
        if self.shape == "sessions":
            turns = [(c.requests, c.prompt_tokens) for c in self.classes]
            if any(later[0] != turn[0] or later[1] <= turn[1] for turn, later in pairwise(turns)):
                raise ValueError(
                    "give each turn of sessions the same `requests` and longer prompts than the turn before"
                )
        return self

    @property
    def needs_prefix_cache(self) -> bool:
        """Whether the workload measures the prefix cache: it repeats prefixes, and its `config` turns the cache on."""
        return self.shape != "new_text" and self.config.get("VLLM_ENABLE_PREFIX_CACHING") == "1"

    @property
    def sweeps_concurrency(self) -> bool:
        """Whether a class sweeps the concurrency up to the number of sequences that the server runs at once."""
        return any(c.concurrency == TO_MAX_NUM_SEQS for c in self.classes)

    def scale(self, max_model_len: int) -> float:
        """Scale of all lengths, at most 1: `max_model_len` / context length that the workload was written for."""
        return min(1.0, max_model_len / self.reference_context_tokens)

    def expanded(self, max_num_seqs: int = 1) -> list[PromptClass]:
        """The classes with the lengths in the file; a sweep of the concurrency becomes one class for each value.

        Args:
            max_num_seqs: sequences that the server runs at once, the last value of a sweep.
        """
        classes = []
        for c in self.classes:
            if c.concurrency != TO_MAX_NUM_SEQS:
                limit = c.concurrency or (UNLIMITED if c.arrives else self.concurrency)
                classes.append(c.model_copy(update={"concurrency": limit}))
                continue
            powers = [2**n for n in range(max_num_seqs.bit_length()) if 2**n < max_num_seqs]
            classes += [
                c.model_copy(
                    update={"name": f"{c.name}-{n}", "concurrency": n, "requests": max(c.requests, n)}
                )
                for n in (*powers, max_num_seqs)
            ]
        return classes

    def scaled(self, max_model_len: int, max_num_seqs: int = 1, block_tokens: int = 1) -> list[PromptClass]:
        """The classes with their lengths scaled to a server's context; a sweep becomes one class for each concurrency.

        Args:
            max_model_len: longest prompt and output together that the server accepts, tokens.
            max_num_seqs: sequences that the server runs at once.
            block_tokens: block size of the server's prefix cache, tokens, of which prefixes are multiples.

        Raises:
            BenchError: the shortest lengths do not fit in the context, or a prompt is shorter than a block.
        """
        factor = self.scale(max_model_len)
        classes = []
        for c in self.expanded(max_num_seqs):
            output_tokens = max(self.min_tokens, math.floor(c.output_tokens * factor))
            room = min(math.floor(c.prompt_tokens * factor), max_model_len - output_tokens)
            prompt_tokens = max(self.min_tokens, room)
            if prompt_tokens + output_tokens > max_model_len:
                raise BenchError(
                    f"{self.name}: class {c.name} needs at least {prompt_tokens} + {output_tokens} tokens and "
                    f"the server accepts {max_model_len}; raise VLLM_MAX_MODEL_LEN"
                )
            if SHAPES[self.shape].whole_blocks:
                blocks = (prompt_tokens - SUFFIX_TOKENS) // block_tokens
                if blocks < 1:
                    raise BenchError(
                        f"{self.name}: class {c.name} has prompts of {prompt_tokens} tokens, and the server caches "
                        f"whole blocks of {block_tokens}; raise VLLM_MAX_MODEL_LEN or prompt_tokens"
                    )
                prompt_tokens = blocks * block_tokens + SUFFIX_TOKENS
            classes.append(
                c.model_copy(update={"prompt_tokens": prompt_tokens, "output_tokens": output_tokens})
            )
        return classes


def name_workload(variant: Variant) -> str:
    """Name of a variant's default workload: the own evaluation that its EVALUATION names, if prompts are in it.

    Without such a file of prompts in eval/own/<name>/ it is `classes`.
    """
    own = find_own_evaluation(variant)
    return own.name if own and find_table(own, _PROMPTS).is_file() else "classes"
