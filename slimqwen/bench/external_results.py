"""Results of other load generators, read to stand beside records: GuideLLM, AIPerf and `vllm bench serve`.

What each of them calls the figures of a latency record (medians over the requests that succeeded), read in GuideLLM
0.8.1, AIPerf 0.13.0 and vLLM 0.32.0:

| record | GuideLLM | AIPerf | vllm bench serve |
|---|---|---|---|
| TTFT | `time_to_first_token_ms` | `time_to_first_token` | `ttft` |
| TPOT, without the first token | `inter_token_latency_ms` | `inter_token_latency` | `tpot` |
| E2EL | `request_latency`, seconds | `request_latency` | `e2el`, if asked for |

GuideLLM's `time_per_output_token_ms` counts the first token, too, so it is not our TPOT; ITL, the time between two
streamed chunks, is AIPerf's `inter_chunk_latency` and vLLM's `itl`, and is left out: GuideLLM has none.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slimqwen.bench import BenchError

MOST_BYTES = 512 * 2**20
"""Size of a file that is still read: GuideLLM writes every request, some kilobytes each."""

_KNOWN = (
    "name GuideLLM's benchmarks.json, AIPerf's profile_export_aiperf.json or a file that "
    "`vllm bench serve --save-result` wrote"
)


class ExternalRun(NamedTuple):
    """One run of another load generator: a load, and medians over the requests that succeeded.

    Attributes:
        tool: the tool and its version, where its file states one.
        model: name of the model in requests; empty where the file does not say.
        load: load in words, such as "4 at a time".
        prompt_tokens: mean length of a prompt, tokens.
        output_tokens: mean length of a response, tokens.
        requests: number of requests that succeeded.
        failures: number of requests that failed or did not end.
        ttft_ms, tpot_ms, e2el_ms: medians, as in a latency record; None if the file has none.
        output_tokens_per_s: output tokens per second of all requests together; None if the file has none.
        limits: phrases that say what of the run cannot be compared with a record.
    """

    tool: str
    model: str
    load: str
    prompt_tokens: float
    output_tokens: float
    requests: int
    failures: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    output_tokens_per_s: float | None
    limits: tuple[str, ...]


def read_external(file: Path) -> list[ExternalRun]:
    """Read the runs in a result file of GuideLLM, AIPerf or `vllm bench serve`.

    Returns:
        At least one run, each with a request that succeeded.

    Raises:
        BenchError: the file cannot be read, exceeds `MOST_BYTES`, is of no such tool, lacks a field, or holds no run;
            or a run was cancelled or had no success.
    """
    try:
        if file.stat().st_size > MOST_BYTES:
            raise BenchError(f"{file} has more than {MOST_BYTES / 2**20:.0f} MiB; name a smaller file")
        documents = list(_parse_documents(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise BenchError(f"{file}: {error.strerror}; name a result file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{file} is no JSON file; {_KNOWN}") from error
    runs: list[ExternalRun] = []
    for document in documents:
        name = next((each for each, form in _FORMS.items() if form.mark <= document.keys()), None)
        if name is None:
            raise BenchError(f"{file} is not a result file of a known load generator; {_KNOWN}")
        try:
            runs += _FORMS[name].model_validate(document).runs()
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            raise BenchError(
                f"{file} cannot be read as a result of {name}: {place}: {fault['msg'].lower()}; "
                f"run the benchmark again with a current version of {name}"
            ) from None
    if not runs:
        raise BenchError(f"{file} holds no benchmark run; name a result file with at least one")
    if idle := next((run for run in runs if not run.requests), None):
        raise BenchError(
            f"{file}: no request of {idle.tool} succeeded; read why in the server's log, then run it again"
        )
    return runs


def _parse_documents(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file: one, or with `vllm bench serve --append-result` several, one after the other."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text.rstrip()):
        document, place = decoder.raw_decode(text, len(text) - len(text[place:].lstrip()))
        if not isinstance(document, dict):
            raise ValueError("no object")
        yield document


_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    """What is read of a part of a file; other fields are left out."""

    model_config = ConfigDict(frozen=True)


class _Form(_Part):
    """A whole file of a tool.

    Attributes:
        mark: fields that a file of this tool has, and of no other one.
    """

    mark: ClassVar[frozenset[str]]

    def runs(self) -> Iterator[ExternalRun]:
        """The runs of the file."""
        raise NotImplementedError


class _Distribution(_Part):
    mean: _Number
    median: _Number


class _ByStatus(_Part):
    successful: _Distribution | None

    @property
    def median(self) -> float | None:
        return self.successful.median if self.successful else None

    @property
    def mean(self) -> float:
        return self.successful.mean if self.successful else 0.0


class _Counts(_Part):
    successful: _Count
    errored: _Count
    incomplete: _Count


class _GuideMetrics(_Part):
    request_totals: _Counts
    prompt_token_count: _ByStatus
    output_token_count: _ByStatus
    time_to_first_token_ms: _ByStatus
    inter_token_latency_ms: _ByStatus
    request_latency: _ByStatus
    output_tokens_per_second: _ByStatus


class _GuideStrategy(_Part):
    type_: str
    streams: int | None = None
    rate: float | None = None
    max_concurrency: int | None = None

    def describe(self) -> str:
        match self.type_:
            case "synchronous":
                return at_a_time(1)
            case "concurrent" if self.streams:
                return at_a_time(self.streams)
            case "throughput":
                return at_a_time(self.max_concurrency)
            case "constant" | "poisson" if self.rate:
                return f"{self.rate:.3g}/s, {'Poisson' if self.type_ == 'poisson' else 'fixed gap'}"
        return self.type_


class _GuideConfig(_Part):
    strategy: _GuideStrategy


class _GuideBenchmark(_Part):
    config: _GuideConfig
    metrics: _GuideMetrics


class _GuideMetadata(_Part):
    guidellm_version: str


class _GuideLlm(_Form):
    mark = frozenset({"metadata", "benchmarks"})

    metadata: _GuideMetadata
    config: dict[str, Any] = Field(default={})
    benchmarks: tuple[_GuideBenchmark, ...]

    def runs(self) -> Iterator[ExternalRun]:
        spec = self.config.get("spec") or {}
        seed = (spec.get("seed") or {}).get("value")
        limits = (
            _say_seed(seed),
            "it counts no drafts (its tokens an iteration are those of a streamed chunk, no acceptance length)",
        )
        for each in self.benchmarks:
            figures, counts = each.metrics, each.metrics.request_totals
            latency_s = figures.request_latency.median
            yield ExternalRun(
                tool=f"GuideLLM {self.metadata.guidellm_version}",
                model=str((spec.get("backend") or {}).get("model") or ""),
                load=each.config.strategy.describe(),
                prompt_tokens=figures.prompt_token_count.mean,
                output_tokens=figures.output_token_count.mean,
                requests=counts.successful,
                failures=counts.errored + counts.incomplete,
                ttft_ms=figures.time_to_first_token_ms.median,
                tpot_ms=figures.inter_token_latency_ms.median,
                e2el_ms=None if latency_s is None else latency_s * 1000,
                output_tokens_per_s=figures.output_tokens_per_second.mean,
                limits=limits,
            )


class _Metric(_Part):
    avg: _Number | None = None
    p50: _Number | None = None


_ABSENT = _Metric()
"""A metric that the file leaves out."""


class _Phase(_Part):
    name: str = ""
    concurrency: int | None = None
    rate: float | None = None
    type: str = ""

    def describe(self) -> str:
        if self.rate:
            return f"{self.rate:.3g}/s, {'Poisson' if self.type == 'poisson' else self.type}"
        return at_a_time(self.concurrency)


class _Named(_Part):
    name: str


class _AiPerfModels(_Part):
    items: tuple[_Named, ...] = ()


class _AiPerfInput(_Part):
    models: _AiPerfModels = _AiPerfModels()
    phases: tuple[_Phase, ...] = ()


class _AiPerf(_Form):
    mark = frozenset({"aiperf_version", "request_latency"})

    aiperf_version: str
    request_count: _Metric
    error_request_count: _Metric = _ABSENT
    input_sequence_length: _Metric
    output_sequence_length: _Metric
    time_to_first_token: _Metric = _ABSENT
    inter_token_latency: _Metric = _ABSENT
    request_latency: _Metric
    output_token_throughput: _Metric = _ABSENT
    spec_decode_acceptance_length: _Metric = _ABSENT
    was_cancelled: Literal[False] | None = None
    is_complete: Literal[True] | None = None
    run_info: dict[str, Any] = Field(default={})
    input_config: _AiPerfInput = _AiPerfInput()

    def runs(self) -> Iterator[ExternalRun]:
        phase = next((each for each in self.input_config.phases if each.name == "profiling"), _Phase())
        yield ExternalRun(
            tool=f"AIPerf {self.aiperf_version}",
            model=", ".join(each.name for each in self.input_config.models.items),
            load=phase.describe(),
            prompt_tokens=self.input_sequence_length.avg or 0.0,
            output_tokens=self.output_sequence_length.avg or 0.0,
            requests=round(self.request_count.avg or 0),
            failures=round(self.error_request_count.avg or 0),
            ttft_ms=self.time_to_first_token.p50,
            tpot_ms=self.inter_token_latency.p50,
            e2el_ms=self.request_latency.p50,
            output_tokens_per_s=self.output_token_throughput.avg,
            limits=(
                _say_seed(self.run_info.get("random_seed")),
                _say_acceptance(self.spec_decode_acceptance_length.avg),
            ),
        )


class _VllmBench(_Form):
    mark = frozenset({"endpoint_type", "model_id", "total_input_tokens"})

    model_id: str
    completed: _Count
    num_prompts: _Count
    request_rate: _Number | Literal["inf"]
    burstiness: float = 1.0
    max_concurrency: int | None = None
    total_input_tokens: _Count
    total_output_tokens: _Count
    output_throughput: _Number
    median_ttft_ms: _Number | None = None
    median_tpot_ms: _Number | None = None
    median_e2el_ms: _Number | None = None
    spec_decode_acceptance_length: _Number | None = None

    def runs(self) -> Iterator[ExternalRun]:
        load = at_a_time(self.max_concurrency)
        if self.request_rate != "inf":
            process = "Poisson" if self.burstiness == 1 else f"burstiness {self.burstiness:g}"
            load = f"{self.request_rate:.3g}/s, {process}"
        count = max(1, self.completed)
        yield ExternalRun(
            tool="vllm bench serve",
            model=self.model_id,
            load=load,
            prompt_tokens=self.total_input_tokens / count,
            output_tokens=self.total_output_tokens / count,
            requests=self.completed,
            failures=self.num_prompts - self.completed,
            ttft_ms=self.median_ttft_ms,
            tpot_ms=self.median_tpot_ms,
            e2el_ms=self.median_e2el_ms,
            output_tokens_per_s=self.output_throughput,
            limits=(_say_seed(None), _say_acceptance(self.spec_decode_acceptance_length)),
        )


_FORMS: Mapping[str, type[_Form]] = MappingProxyType(
    {"GuideLLM": _GuideLlm, "AIPerf": _AiPerf, "vllm bench serve": _VllmBench}
)
"""Tool -> the form of its files."""


def at_a_time(limit: int | None) -> str:
    """Put a limit on concurrent requests into words: "4 at a time", or "all at once" for None."""
    return f"{limit} at a time" if limit else "all at once"


def _say_seed(seed: Any) -> str:
    drawn = "by a seed that its file does not state" if seed is None else f"by its own seed {seed}"
    return f"its prompts are others, drawn {drawn}"


def _say_acceptance(length: float | None) -> str:
    if length is None:
        return "its file has no acceptance length"
    return f"its acceptance length of {length:.2f} is of its own prompts"
