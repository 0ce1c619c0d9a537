"""One variant of a latency measurement: its texts, its server in the present round, and its results so far."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from slimqwen.bench import BenchError
from slimqwen.bench.client import Batch, counters, last_line, send_requests
from slimqwen.bench.load_shapes import SHAPES
from slimqwen.bench.workload import PromptClass, Workload
from slimqwen.host_load import HostLoad, Watch
from slimqwen.progress import Progress
from slimqwen.serving.shared_server import SharedServer, get_response, require_healthy
from slimqwen.text.prompts import PromptCutter, Tokens, documents, read_own_prompts
from slimqwen.variant import Variant

_PREFIX_QUERIES, PREFIX_HITS = (f"vllm:prefix_cache_{name}_total" for name in ("queries", "hits"))


@dataclass
class ClassResults:
    """All results so far of one prompt class on one variant; the counts are differences of the server's counters.

    Attributes:
        prompts: token IDs of the prompts sent, over all rounds.
        rows: a mapping for each request, which becomes an item of the record.
        durations_s: wall time of each round, seconds.
        rate_per_s: rate of the arrivals; None without an arrival process.
        drafts: number of drafts.
        draft_tokens: number of drafted tokens.
        accepted_tokens: number of accepted draft tokens.
        accepted_by_position: number of accepted tokens at each draft position.
        queried_tokens: prompt tokens that were looked up in the prefix cache.
        hit_tokens: prompt tokens that were found there.
    """

    prompts: list[Tokens] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    rate_per_s: float | None = None
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[float] = field(default_factory=list)
    queried_tokens: float = 0
    hit_tokens: float = 0

    def add(
        self,
        c: PromptClass,
        number: int,
        requests: Sequence[tuple[Tokens, int]],
        answers: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Add the results of one round; returns its rows, one for each request.

        Args:
            c: the prompt class.
            number: number of the round, from 0.
            requests: token IDs of each prompt sent, and the wanted length of its response in tokens.
            answers: return value of `client.send_requests` for them.
        """
        self.prompts += [prompt for prompt, _ in requests]
        self.durations_s.append(answers["duration"])
        rows = [_row(c, number, index, request, answers) for index, request in enumerate(requests)]
        self.rows += rows
        drafts = answers.get("spec_decode_num_drafts", 0)
        if drafts:
            rates = answers["spec_decode_per_position_acceptance_rates"]
            before = self.accepted_by_position or [0.0] * len(rates)
            self.drafts += drafts
            self.draft_tokens += answers["spec_decode_draft_tokens"]
            self.accepted_tokens += answers["spec_decode_accepted_tokens"]
            self.accepted_by_position = [a + rate * drafts for a, rate in zip(before, rates, strict=True)]
        return rows


@dataclass
class SharedState:
    """State that all variants of a measurement share.

    Attributes:
        workload: the workload that all variants get.
        max_num_seqs: largest number of sequences that a variant runs at once.
        rounds: number of rounds.
        progress: receives (activity, done, total) after each response.
        saturation: requests a second that the first variant reached, by class; the first round fills it in.
        loads: load of the host in each round so far.
    """

    workload: Workload
    max_num_seqs: int
    rounds: int
    progress: Progress
    saturation: dict[str, float] = field(default_factory=dict)
    loads: list[HostLoad] = field(default_factory=list)


class MeasuredVariant:
    """One variant of a measurement, with its texts, its server in the present round, and its results.

    `take_round` is called once for each round. `state` and `resume` carry the results over an interruption.
    """

    def __init__(self, variant: Variant, shared: SharedState) -> None:
        self.variant, self.shared = variant, shared
        workload = shared.workload
        self.own_prompts = own_prompts(workload, variant) if workload.prompts else []
        self.cutter = (
            PromptCutter(iter(()), lambda _: [])
            if workload.prompts
            else PromptCutter.for_checkpoint(variant.weights, workload.documents, workload.seed, variant.root)
        )
        self.results = {c.name: ClassResults() for c in shared.workload.expanded(shared.max_num_seqs)}
        self.served: SharedServer | None = None
        self.block_tokens = 1
        self.logs = variant.root / "logs"
        self.log = self.logs / f"latency-{variant.name}.log"
        self._shape = SHAPES[workload.shape](self.cutter, iter(()))

    @property
    def classes(self) -> list[PromptClass]:
        """The prompt classes with the lengths that are sent to this variant's server; only once a round has begun."""
        assert self.served is not None
        return self.shared.workload.scaled(
            self.served.max_model_len, self.shared.max_num_seqs, self.block_tokens
        )

    def state(self) -> dict[str, Any]:
        """The results so far and the position in the text, as values that JSON can hold; `resume` restores them."""
        results = {name: asdict(result) for name, result in self.results.items()}
        return {"documents_used": self.cutter.documents_used, "sent": results}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned in an interrupted run; later prompts are cut from text that no run has used."""
        self.results = {name: ClassResults(**result) for name, result in state["sent"].items()}
        prompts = (prompt for result in self.results.values() for prompt in result.prompts)
        self.cutter.advance_to(state["documents_used"], prompts)

    def take_round(self, number: int, served: SharedServer, watch: Watch) -> None:
        """Send one round of every class.

        Args:
            number: number of the round, from 0.
            served: the variant's server for this round.
            watch: receives the load of the host while requests are timed.

        Raises:
            ServerLostError: the server died.
            BenchError: the workload does not fit the server, or the prefix cache did not have what the workload
                repeats.
        """
        if self.served is not None and served.max_model_len != self.served.max_model_len:
            raise BenchError(
                f"{self.variant.name}: the server's context has {served.max_model_len} tokens, but had "
                f"{self.served.max_model_len} in the round before; set VLLM_MAX_MODEL_LEN in its config.env and run "
                "again"
            )
        self.served = served
        if self.shared.workload.needs_prefix_cache:
            self.block_tokens = block_tokens(served)
        self._shape = SHAPES[self.shared.workload.shape](self.cutter, self._repeat_text())
        for position, c in enumerate(self.classes):
            self._take_class(c, position, number, served, watch)

    def _take_class(
        self, c: PromptClass, position: int, number: int, served: SharedServer, watch: Watch
    ) -> None:
        shared, result = self.shared, self.results[c.name]
        url = served.server.base_url
        result.rate_per_s = self._rate_per_s(c)
        abandoned: list[tuple[Tokens, int]] = []
        if self.own_prompts:
            requests = self.own_prompts
            # Warm-up sends the prompts in reverse token order: same lengths, but no prefix of a prompt gets cached.
            warm_up = [
                (prompt[::-1], output) for prompt, output in requests[: shared.workload.warmup_requests]
            ]
            self._require_room(requests)
        else:
            # A later turn of a session was warmed up with the first one.
            is_turn = shared.workload.shape == "sessions" and position > 0
            warm_up_count = 0 if is_turn else shared.workload.warmup_requests
            prompts = self.cutter.cut(warm_up_count, c.prompt_tokens)
            warm_up = [(prompt, c.output_tokens) for prompt in prompts]
            seed = (shared.workload.seed, number, position)
            lengths = c.lengths(seed, shared.workload.min_tokens, served.max_model_len)
            more = [c.prompt_tokens] * self._shape.abandoned
            prompts = self._shape.prompts(position, [*(prompt for prompt, _ in lengths), *more])
            requests = list(zip(prompts, (output for _, output in lengths), strict=False))
            abandoned = [(prompt, c.output_tokens) for prompt in prompts[len(requests) :]]
        if warm_up:
            self._send(c, warm_up, 0, lambda: None, Watch())
        activity = f"{self.variant.name}: {c.name} {c.prompt_tokens} -> {c.output_tokens} tokens"
        count = itertools.count(number * c.requests + 1)
        before = counters(url) if shared.workload.needs_prefix_cache else {}

        def answered() -> None:
            shared.progress(activity, next(count), shared.rounds * c.requests)

        answers = self._send(c, requests, number, answered, watch, abandoned)
        if any(row["error"] for row in result.add(c, number, requests, answers)):
            require_healthy(served.server, f"measuring {self.variant.name}: {c.name}")
        self._shape.keep([prompt for prompt, _ in (*requests, *abandoned)], answers["generated_texts"])
        if shared.workload.needs_prefix_cache:
            after = counters(url)
            queried, hit = (
                after.get(name, 0.0) - before.get(name, 0.0) for name in (_PREFIX_QUERIES, PREFIX_HITS)
            )
            self._check_prefixes(c, position, queried, hit)
            result.queried_tokens += queried
            result.hit_tokens += hit
        shared.saturation.setdefault(c.name, answers["completed"] / answers["duration"])

    def _require_room(self, requests: Sequence[tuple[Tokens, int]]) -> None:
        """Check that each prompt fits in the served context with its response."""
        assert self.served is not None
        for number, (prompt, output_tokens) in enumerate(requests, start=1):
            if len(prompt) + output_tokens > self.served.max_model_len:
                raise BenchError(
                    f"{self.shared.workload.prompts}, prompt {number}: {len(prompt)} + {output_tokens} tokens, but "
                    f"{self.variant.name} takes {self.served.max_model_len}; shorten it, or raise VLLM_MAX_MODEL_LEN"
                )

    def _rate_per_s(self, c: PromptClass) -> float | None:
        if c.load is not None:
            return c.load * self.shared.saturation[self.classes[0].name]
        return 1e3 / c.gap_ms if c.gap_ms is not None else None

    def _send(
        self,
        c: PromptClass,
        requests: Sequence[tuple[Tokens, int]],
        number: int,
        answered: Callable[[], None],
        watch: Watch,
        abandoned: Sequence[tuple[Tokens, int]] = (),
    ) -> dict[str, Any]:
        assert self.served is not None
        batch = Batch(
            name=f"{self.variant.name}: {c.name}",
            requests=requests,
            abandoned=abandoned,
            rate_per_s=self.results[c.name].rate_per_s,
            fixed_gap=c.gap_ms is not None,
            concurrency=c.limit,
            sampling=self.shared.workload.sampling,
            seed=self.shared.workload.seed + number,
        )
        return send_requests(self.served.server, batch, log=self.log, answered=answered, watch=watch)

    def _repeat_text(self) -> Iterator[int]:
        """Yield tokens of the workload's text without end, to extend prompts; no cache has them after a new prefix."""
        workload = self.shared.workload
        for text in itertools.cycle(documents(workload.documents, workload.seed, self.variant.root)):
            yield from self.cutter.tokenize(f"{text}\n")

    def _check_prefixes(self, c: PromptClass, place: int, queried: float, hit: float) -> None:
        """Check by the server's counters that its prefix cache had each repeated prefix, and nothing of new prompts."""
        known = self._shape.known_from(place)
        if known is not None and hit < c.requests * self.block_tokens:
            raise BenchError(
                f"{self.variant.name}: the prefix cache had {hit:,.0f} of the {queried:,.0f} tokens of class {c.name}, "
                f"less than a block of {self.block_tokens} for each prompt of {self.classes[known].name}; lower "
                f"`requests` if the KV cache is too small for {c.requests} prompts, or raise VLLM_MAX_MODEL_LEN if the "
                "prompts are too short"
            )
        if known is None and hit:
            raise BenchError(
                f"{self.variant.name}: the prefix cache had {hit:,.0f} tokens of class {c.name} before it was sent; "
                "stop the server that is running, so that a fresh one is started"
            )


def own_prompts(workload: Workload, variant: Variant) -> list[tuple[Tokens, int]]:
    """Read the prompts of the file that a workload names in its field `prompts`; the workload must have one.

    Returns:
        Token IDs of each prompt by the variant's tokenizer, and the number of tokens to generate.

    Raises:
        CorpusError: the file cannot be read, or a prompt cannot be used.
    """
    assert workload.prompts is not None
    assert workload.output_tokens is not None
    prompts = read_own_prompts(variant.root / workload.prompts, variant.weights)
    return [(prompt, output or workload.output_tokens) for prompt, output in prompts]


def block_tokens(served: SharedServer) -> int:
    """Block size of a server's prefix cache, tokens; hundreds for models with Gated DeltaNet layers.

    Raises:
        BenchError: the server has no prefix cache.
    """
    config = read_cache_labels(served)
    block = config.get("effective_attention_block_size", "None")
    if config.get("enable_prefix_caching") != "True" or not block.isdigit():
        raise BenchError(
            f"{served.variant.name}: vLLM does no prefix caching for this model on this platform, which the workload "
            "times; choose another one, such as --workload classes"
        )
    return int(block)


def read_cache_labels(served: SharedServer) -> Mapping[str, str]:
    """Read a server's cache settings from its metrics, by name; empty if the metrics do not state them."""
    families = text_string_to_metric_families(get_response(f"{served.server.base_url}/metrics").text)
    samples = itertools.chain.from_iterable(family.samples for family in families)
    return next((sample.labels for sample in samples if sample.name == "vllm:cache_config_info"), {})


def _row(
    c: PromptClass, number: int, index: int, request: tuple[Tokens, int], answers: Mapping[str, Any]
) -> dict[str, Any]:
    prompt, expected_tokens = request
    tokens, ttft_s, latency_s = (answers[key][index] for key in ("output_lens", "ttfts", "latencies"))
    error = answers["errors"][index].strip()
    if not error and tokens != expected_tokens:
        # If the engine dies, a stream may end without an error; then only the number of tokens shows it.
        error = f"the stream ended after {tokens} of {expected_tokens} tokens"
    return {
        "class": c.name,
        "round": number,
        "index": index,
        "prompt_tokens": len(prompt),
        "output_tokens": tokens,
        "ttft_ms": ttft_s * 1e3,
        "tpot_ms": (latency_s - ttft_s) / max(1, tokens - 1) * 1e3,
        "e2el_ms": latency_s * 1e3,
        "itl_ms": [round(gap_s * 1e3, 3) for gap_s in answers["itls"][index]],
        "error": last_line(error) if error else None,
    }
