"""Latency of served stand-ins on a small workload."""

import contextlib

import pytest
import yaml

from slimqwen.bench import latency
from slimqwen.bench.latency import rounds
from slimqwen.bench.workload import Workload
from slimqwen.variant import Variant

WORKLOAD = """\
documents: book.txt
seed: 1
reference_context_tokens: 256
min_tokens: 4
concurrency: 3
warmup_requests: 1
rounds: 2
sampling: {temperature: 0}
classes:
  short: {prompt_tokens: 8, output_tokens: 10, requests: 3}
  long: {prompt_tokens: 200, output_tokens: 40, requests: 2}
"""


@pytest.fixture
def write_workload(tmp_path):
    """Write eval/workloads/mine.yaml, its classes and fields over those above, and the text that it cuts."""

    def write(classes=None, **fields):
        file = tmp_path / "eval" / "workloads" / "mine.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "eval" / "known_trouble.yaml").write_text("[]")
        content = {**yaml.safe_load(WORKLOAD), **fields}
        file.write_text(
            yaml.safe_dump({**content, "classes": classes or content["classes"]}, sort_keys=False)
        )
        words = [f"{n % 200} {n // 200}" for n in range(2000)]
        (tmp_path / "book.txt").write_text(
            "\n\n".join(" ".join(words[n : n + 10]) for n in range(0, 2000, 10))
        )
        return Workload.load("mine", tmp_path)

    return write


@pytest.fixture
def measure(monkeypatch, write_workload):
    """Measure served stand-ins; returns the records' paths and the order in which servers were used."""

    def run(*served_variants, workload=None, **arguments):
        by_name = {one.variant.name: one for one in served_variants}
        order = []

        @contextlib.contextmanager
        def serve(variant, **_):
            order.append(variant.name)
            yield by_name[variant.name]

        monkeypatch.setattr(rounds, "share_server", serve)
        monkeypatch.setattr(rounds, "find_bandwidth", lambda platform, root: 5e9)
        monkeypatch.setattr(Variant, "require_weights", lambda _: None)  # a stand-in has a tokenizer alone
        variants = [one.variant for one in served_variants]
        chosen = workload or write_workload()
        return latency.measure_latency(
            variants, chosen, command=["slimqwen bench latency"], **arguments
        ), order

    return run


def prompts_of(server):
    return [tuple(request["prompt"]) for request in server.requests]
