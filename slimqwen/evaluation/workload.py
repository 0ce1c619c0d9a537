"""What a latency measurement sends, as eval/workloads/<name>.yaml states it: one description for every workload."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from slimqwen.errors import SlimqwenError

TO_MAX_NUM_SEQS = "1..max_num_seqs"
"""A class's concurrency that stands for a class for each of 1, 2, 4, … and what the server works on at once."""

UNLIMITED = "unlimited"
"""A concurrency without a limit: all requests are sent upfront."""

DEFAULT_COLUMNS = (
    "ttft_ms.mean",
    "tpot_ms.mean",
    "itl_ms.mean",
    "e2el_ms.mean",
    "output_throughput_tokens_per_s",
    "acceptance_length",
)

_STATISTIC = r"(ttft|tpot|itl|e2el)_ms\.(mean|median|p90|p95|p99)"
_FIGURES = (
    "request_throughput_per_s",
    "output_throughput_tokens_per_s",
    "total_throughput_tokens_per_s",
    "goodput_per_s",
    "good_share",
    "rate_per_s",
    "concurrency",
    "acceptance_length",
    "prefix_hits",
    "repeat_speedup",
)
Column = Annotated[str, Field(pattern=rf"^({_STATISTIC}|{'|'.join(_FIGURES)})$")]

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class WorkloadError(SlimqwenError):
    """A workload file that cannot be used, or that the served context cannot hold."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceLevel(_Strict):
    """What a request has to meet to count for the goodput: its TTFT and its TPOT, both in milliseconds at most."""

    ttft_ms: Positive
    tpot_ms: Positive


class PromptClass(_Strict):
    """Requests of one kind.

    In the file, one of prompt_tokens, concurrency, rate_per_s and load may be a list: it stands for a class for each
    value, named <name>-<value>.

    Attributes:
        name: its key in the file.
        prompt_tokens: length of a prompt; the mean length where there is a spread.
        output_tokens: tokens that are generated, whatever the model would end with; likewise a mean.
        requests: a round; in a sweep of the concurrency never fewer than that.
        spread: standard deviation of the natural logarithm of both lengths, which are drawn independently from
            log-normal distributions; 0 makes all requests alike.
        concurrency: requests in flight at most, "unlimited", or "1..max_num_seqs"; not given, the workload's. A class
            with one of the three arrival processes below has no limit: requests come when they come.
        gap_ms: a request every so often.
        rate_per_s: requests a second, arriving as a Poisson process.
        load: the same, as a share of the throughput that the first variant reached in the class `load_of`.
        suffix_tokens: makes a prompt of as many whole effective attention blocks of the server as fit into
            prompt_tokens, followed by so many tokens of its own.
        repeats: the class whose prompts' blocks are sent again, each followed by a new suffix.
    """

    name: str
    prompt_tokens: Count
    output_tokens: Annotated[int, Field(ge=2)]
    requests: Annotated[int, Field(ge=2)]
    spread: Annotated[float, Field(ge=0)] = 0.0
    concurrency: Count | Literal["unlimited", "1..max_num_seqs"] | None = None
    gap_ms: Positive | None = None
    rate_per_s: Positive | None = None
    load: Positive | None = None
    load_of: str | None = None
    suffix_tokens: Count | None = None
    repeats: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "PromptClass":
        arrivals = [self.gap_ms, self.rate_per_s, self.load]
        if sum(one is not None for one in arrivals) > 1:
            raise ValueError("gap_ms, rate_per_s and load exclude each other")
        if self.arrives and self.concurrency is not None:
            raise ValueError("a class with an arrival process has no concurrency")
        if (self.load is None) != (self.load_of is None):
            raise ValueError("load and load_of belong together")
        if self.repeats is not None and self.suffix_tokens is None:
            raise ValueError("a class that repeats another needs suffix_tokens")
        if self.suffix_tokens is not None and self.spread:
            raise ValueError("prompts of whole blocks have no spread")
        return self

    @property
    def arrives(self) -> bool:
        """Whether requests come at times of their own, instead of when others are answered."""
        return any(one is not None for one in (self.gap_ms, self.rate_per_s, self.load))

    def lengths(self, seed: Sequence[int], min_tokens: int, max_model_len: int) -> list[tuple[int, int]]:
        """Tokens of prompt and output of each request of a round; the same seed gives the same lengths."""
        if not self.spread:
            return [(self.prompt_tokens, self.output_tokens)] * self.requests
        chance = np.random.default_rng(seed)

        def draw(mean: int) -> list[int]:
            # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
            drawn = chance.lognormal(math.log(mean) - self.spread**2 / 2, self.spread, self.requests)
            return [max(min_tokens, round(one)) for one in drawn]

        pairs = []
        for prompt, output in zip(draw(self.prompt_tokens), draw(self.output_tokens), strict=True):
            prompt = min(prompt, max_model_len - min_tokens)
            pairs.append((prompt, min(output, max_model_len - prompt)))
        return pairs


class Workload(_Strict):
    """One file of eval/workloads/.

    Attributes:
        documents: what prompts are cut from: tinyworld, or a text file.
        seed: of the documents, of lengths that are drawn, and of arrivals.
        reference_context_tokens: the served context that the lengths are written for; a shorter one scales all of
            them by max_model_len / reference_context_tokens.
        min_tokens: no length is scaled below it.
        concurrency: of classes without their own.
        warmup_requests: before every class, not counted.
        rounds: times that the classes are gone through; several variants take turns.
        sampling: fields of a request.
        config: lines of a config.env laid over each variant's for this workload alone.
        service_level: what a good request meets; None where no goodput is counted.
        columns: the figures of its table, `<measure>.<statistic>` or a figure of a class.
        classes: in the order in which they are sent.
    """

    documents: str
    seed: int
    reference_context_tokens: Count
    min_tokens: Annotated[int, Field(ge=2)]
    concurrency: Count = 1
    warmup_requests: Annotated[int, Field(ge=0)]
    rounds: Count
    sampling: dict[str, float]
    config: dict[str, str] = {}
    service_level: ServiceLevel | None = None
    columns: tuple[Column, ...] = DEFAULT_COLUMNS
    classes: Annotated[tuple[PromptClass, ...], Field(min_length=1)]

    _file: Path = PrivateAttr()

    @model_validator(mode="after")
    def _check_names(self) -> "Workload":
        seen: set[str] = set()
        usable: set[str] = set()
        for c in self.classes:
            if c.name in seen:
                raise ValueError(f"class {c.name} stands twice")
            for other in (c.load_of, c.repeats):
                if other is not None and other not in usable:
                    raise ValueError(f"class {c.name} needs class {other} before it, and a single one")
            seen.add(c.name)
            if c.concurrency != TO_MAX_NUM_SEQS:
                usable.add(c.name)
        return self

    @property
    def file(self) -> Path:
        """Where it stands."""
        return self._file

    @property
    def name(self) -> str:
        """The file's name."""
        return self._file.stem

    @property
    def needs_prefix_cache(self) -> bool:
        """Whether it measures repeated prefixes."""
        return any(c.repeats for c in self.classes)

    @property
    def sweeps_concurrency(self) -> bool:
        """Whether its classes depend on what the server works on at once."""
        return any(c.concurrency == TO_MAX_NUM_SEQS for c in self.classes)

    def scale(self, max_model_len: int) -> float:
        """The factor on all lengths for a served context of so many tokens."""
        return min(1.0, max_model_len / self.reference_context_tokens)

    def expanded(self, max_num_seqs: int = 1) -> list[PromptClass]:
        """The classes with the lengths that the file names; a sweep of the concurrency as a class for each value."""
        classes = []
        for c in self.classes:
            if c.concurrency != TO_MAX_NUM_SEQS:
                limit = c.concurrency or (UNLIMITED if c.arrives else self.concurrency)
                # An arrival process forbids a concurrency in the file; here it says that there is no limit.
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
        """The expanded classes with the lengths that are really sent.

        Args:
            max_model_len: tokens that the server takes, prompt and output together.
            max_num_seqs: requests that it works on at once.
            block_tokens: its effective attention block, which prefixes consist of.

        Raises:
            WorkloadError: the shortest lengths allowed do not fit the context, or no block fits a prompt.
        """
        factor = self.scale(max_model_len)
        classes = []
        for c in self.expanded(max_num_seqs):
            output_tokens = max(self.min_tokens, math.floor(c.output_tokens * factor))
            room = min(math.floor(c.prompt_tokens * factor), max_model_len - output_tokens)
            prompt_tokens = max(self.min_tokens, room)
            if prompt_tokens + output_tokens > max_model_len:
                raise WorkloadError(
                    f"{self.name}: class {c.name} needs {prompt_tokens} + {output_tokens} tokens at least and "
                    f"the server takes {max_model_len}: raise VLLM_MAX_MODEL_LEN"
                )
            if c.suffix_tokens is not None:
                blocks = (prompt_tokens - c.suffix_tokens) // block_tokens
                if blocks < 1:
                    raise WorkloadError(
                        f"{self.name}: class {c.name} has prompts of {prompt_tokens} tokens, and the server caches "
                        f"whole blocks of {block_tokens}: raise VLLM_MAX_MODEL_LEN or prompt_tokens"
                    )
                prompt_tokens = blocks * block_tokens + c.suffix_tokens
            classes.append(
                c.model_copy(update={"prompt_tokens": prompt_tokens, "output_tokens": output_tokens})
            )
        return classes


def load(name: str, root: Path) -> Workload:
    """Read eval/workloads/<name>.yaml.

    Raises:
        WorkloadError: no such workload, or a field is missing or wrong.
    """
    file = root / "eval" / "workloads" / f"{name}.yaml"
    place = f"eval/workloads/{file.name}"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        classes = [one for key, body in content.pop("classes").items() for one in _listed(key, body)]
        workload = Workload.model_validate({**content, "classes": classes})
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.yaml")))
        raise WorkloadError(f"{place} does not exist; there is: {known}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise WorkloadError(f"{place}: {where + ': ' if where else ''}{first['msg']}; mend it") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise WorkloadError(f"{place}: unusable ({said}); classes.yaml shows the form") from error
    workload._file = file
    return workload


def _listed(name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A class of the file as one entry, or as one for each value of the field that is a list."""
    lists = [key for key, value in body.items() if isinstance(value, list)]
    if not lists:
        return [{"name": name, **body}]
    if len(lists) > 1:
        raise TypeError(f"class {name}: only one field may be a list, not {' and '.join(lists)}")
    return [{**body, "name": f"{name}-{value}", lists[0]: value} for value in body[lists[0]]]
