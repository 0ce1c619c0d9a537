"""The workload agent for as long as is asked: the server responds afterwards as before, and its memory is flat.

SLIMQWEN_TEST_VARIANT=tiny-best SLIMQWEN_SOAK_MINUTES=20 pytest -s -m soak tests/bench/latency/test_sessions.py
"""

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from slimqwen import variant
from slimqwen.bench.client import counters
from slimqwen.bench.latency.measured_variant import MeasuredVariant, SharedState
from slimqwen.bench.load_shapes import Sessions
from slimqwen.bench.workload import Workload
from slimqwen.evals.engine import compare_tokens
from slimqwen.evals.engine_process import Response
from slimqwen.host_load import Watch
from slimqwen.progress import silent
from slimqwen.serving.http_client import open_client
from slimqwen.serving.server import RunningServer, free_port
from slimqwen.serving.shared_server import SharedServer, share_server
from slimqwen.text.prompts import PromptCutter, documents
from tests.serving.real_server import PATIENCE_S, SERVED

MINUTES = float(os.environ.get("SLIMQWEN_SOAK_MINUTES") or 20)

NEAR_TIE_NATS = 0.4
"""Three times the largest shift of a gap that rereading shows on the embedded model (eval/gates/tinyworld.yaml)."""

GROWTH_BYTES = 32 << 20
"""Allowance for what the processes of a server may grow over the whole load, by the slope after its first quarter."""

AGENT = Workload.load("agent", variant.repository_root())


@dataclass
class Load:
    """What was sent, and what became of it."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    abandoned: int = 0
    abandoned_tokens: int = 0
    queried_tokens: float = 0
    hit_tokens: float = 0
    memory_bytes: list[int] = field(default_factory=list)

    @property
    def growth_bytes(self) -> float:
        """By the slope over the rounds after the first quarter."""
        settled = self.memory_bytes[len(self.memory_bytes) // 4 :]
        slope = np.polyfit(range(len(settled)), settled, 1)[0] if len(settled) > 1 else 0.0
        return float(slope * len(self.memory_bytes))

    def __str__(self) -> str:
        first, last = (self.memory_bytes[end] / 2**20 for end in (0, -1))
        return (
            f"{len(self.memory_bytes)} rounds, {len(self.rows)} turns with a response, {self.abandoned} abandoned, "
            f"{self.hit_tokens:,.0f} of {self.queried_tokens:,.0f} prompt tokens found in the cache; memory "
            f"{first:.0f} MiB after the first round, {last:.0f} MiB after the last, "
            f"slope {self.growth_bytes / 2**20:+.1f} MiB over all\n"
        )


def send_sessions(served: SharedServer, workload: Workload, minutes: float) -> Load:
    """Send rounds of sessions until the time is over, two at least; counters are checked as in a measurement."""
    side = MeasuredVariant(served.variant, SharedState(workload, 1, 10**6, silent))
    side.cutter = PromptCutter(number_texts(workload), side.cutter.tokenize)
    process, load, deadline = psutil.Process(served.server.pid), Load(), time.monotonic() + 60 * minutes
    while len(load.memory_bytes) < 2 or time.monotonic() < deadline:
        side.take_round(len(load.memory_bytes), served, Watch())
        for result in side.results.values():
            load.rows += result.rows
            load.queried_tokens += result.queried_tokens
            load.hit_tokens += result.hit_tokens
        load.abandoned += sum(Sessions.abandoned for _ in side.classes)
        load.abandoned_tokens += sum(Sessions.abandoned * c.output_tokens for c in side.classes)
        side.results = {name: type(result)() for name, result in side.results.items()}
        processes = [process, *process.children(recursive=True)]
        load.memory_bytes.append(sum(each.memory_info().rss for each in processes))
    return load


def number_texts(workload: Workload) -> Iterator[str]:
    """The documents of a workload over and over, each time with another number before them: new for a prefix cache."""
    for number in itertools.count():
        for text in documents(workload.documents, workload.seed, variant.repository_root()):
            yield f"{number} {text}"


def request_responses(server: RunningServer, prompts: Sequence[Sequence[int]]) -> list[Response]:
    """Greedy responses with log-probabilities, one prompt after the other."""
    fields = {"model": server.model, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "logprobs": 5}
    fields |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    responses = []
    with open_client(PATIENCE_S, server.base_url) as client:
        for prompt in prompts:
            choice = client.post("/v1/completions", json={**fields, "prompt": prompt}).json()["choices"][0]
            likeliest = [
                {int(name.removeprefix("token_id:")): value for name, value in position.items()}
                for position in choice["logprobs"]["top_logprobs"]
            ]
            responses.append(Response(tuple(choice["token_ids"]), tuple(likeliest)))
    return responses


def count_tokens(server: RunningServer) -> float:
    """Tokens that a server has generated."""
    return counters(server.base_url)["vllm:generation_tokens_total"]


def assert_unharmed(served: SharedServer, workload: Workload, minutes: float) -> Load:
    """Put a server under load; it gives every response, and those of before again."""
    text = MeasuredVariant(served.variant, SharedState(workload, 1, 1, silent))._repeat_text()
    prompts = [list(itertools.islice(text, length)) for length in (1, 24, 300, 600, 1100, 2100)]
    before, tokens_before = request_responses(served.server, prompts), count_tokens(served.server)
    load = send_sessions(served, workload, minutes)
    unread_tokens = (
        count_tokens(served.server) - tokens_before - sum(row["output_tokens"] for row in load.rows)
    )
    sys.stdout.write(str(load))
    assert [row["error"] for row in load.rows if row["error"]] == []
    last = max(row["prompt_tokens"] + row["output_tokens"] for row in load.rows)
    assert last == served.max_model_len
    # What nobody waits for is not generated.
    assert 0 <= unread_tokens < load.abandoned_tokens / 2
    # The second time from the prefix cache, if there is one.
    for after in (request_responses(served.server, prompts), request_responses(served.server, prompts)):
        compared = [
            compare_tokens(expected, response.tokens, NEAR_TIE_NATS)
            for expected, response in zip(before, after, strict=True)
        ]
        assert [each for each in compared if each.differs and not each.near_tie] == []
    now = counters(served.server.base_url)
    assert [now[f"vllm:{name}"] for name in ("num_requests_running", "num_requests_waiting")] == [0, 0]
    assert now["vllm:kv_cache_usage_perc"] == 0
    return load


@pytest.mark.engine
def test_sessions_and_clients_that_leave_harm_no_server(served_tiny: SharedServer) -> None:
    """Few and short: the session's server has neither prefix cache nor drafts."""
    first, *_, end = AGENT.classes
    few = {"requests": 2, "output_tokens": 1024}
    classes = (
        first.model_copy(update={**few, "prompt_tokens": 4096}),
        end.model_copy(update=few),
    )
    load = assert_unharmed(
        served_tiny, AGENT.model_copy(update={"classes": classes, "config": {}}), minutes=0
    )
    assert (len(load.rows), load.abandoned) == (2 * 2 * 2, 2 * 2 * 2)


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 1800)
def test_a_server_with_drafts_and_prefix_cache_serves_after_long_as_before(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "soak" not in request.config.option.markexpr:
        pytest.skip("20 minutes: asked for by -m soak, not by any -m in the place of that of pyproject.toml")
    served_as = {**AGENT.config, "VLLM_MAX_NUM_SEQS": "4"}
    with share_server(
        variant.load(SERVED).with_lines(served_as), port=free_port(), log=tmp_path / "vllm.log"
    ) as served:
        before = counters(served.server.base_url)
        load = assert_unharmed(served, AGENT, MINUTES)
        after = counters(served.server.base_url)
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    assert after[accepted] > before[accepted]
    assert load.growth_bytes < GROWTH_BYTES
    assert load.hit_tokens > load.queried_tokens / 4
