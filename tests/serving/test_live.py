"""The figures of a real server's `/metrics`: of text that one gave, and of one that runs."""

import dataclasses
import socket
import time
from pathlib import Path

import httpx
import pytest

from slimqwen import variant
from slimqwen.serving import launch, live
from slimqwen.serving.live import History, Scrape, Server

REAL = (Path(__file__).parent / "data" / "metrics.txt").read_text(encoding="utf-8")
"""What vLLM 0.32 said, with MTP at K=4, after six requests; families that nothing here reads left out."""


@pytest.fixture
def real():
    return live.read(REAL, 100.0)


def later(scrape: Scrape, seconds: float, **gains: float) -> Scrape:
    """A scrape with counters that have grown, named without their prefix and suffix, and gauges."""
    values = dict(scrape.values)
    for name, gain in gains.items():
        values[f"vllm:{name}_total"] += gain
    return dataclasses.replace(scrape, taken=scrape.taken + seconds, values=values)


def test_counters_and_gauges_are_read_from_the_real_text(real):
    assert real.values["vllm:prompt_tokens_total"] == 40
    assert real.values["vllm:generation_tokens_total"] == 407
    assert real.values["vllm:num_requests_waiting"] == 0
    assert real.buckets["vllm:time_to_first_token_seconds_bucket"][0.25] == 6


def test_one_scrape_gives_all_but_rates(real):
    figures = History().add(real)

    assert figures.acceptance_length == pytest.approx(1 + 317 / 95)
    assert figures.acceptance_rate == pytest.approx(317 / 380)
    assert figures.ttft_s == pytest.approx(0.06)
    assert figures.itl_s == pytest.approx(0.05 + 0.025 * 1.5 / 37)
    assert (figures.running, figures.waiting, figures.kv_cache, figures.preemptions) == (0, 0, 0, 0)
    assert figures.prompt_tokens_per_s is None
    assert figures.generation_tokens_per_s is None
    assert figures.prefix_hits is None  # it has no prefix cache


def test_rates_are_what_the_counters_gained_between_two_scrapes(real):
    history = History()
    history.add(real)
    figures = history.add(later(real, 2, prompt_tokens=100, generation_tokens=30))

    assert figures.prompt_tokens_per_s == 50
    assert figures.generation_tokens_per_s == 15


def test_rates_are_of_the_last_seconds_and_shares_of_the_last_minute(real):
    history, scrape = History(), real
    for _ in range(20):
        scrape = later(scrape, 2, generation_tokens=20, spec_decode_num_drafts=10, prefix_cache_queries=100)
        history.add(scrape)
    scrape = later(
        scrape,
        2,
        spec_decode_num_drafts=10,
        spec_decode_num_accepted_tokens=40,
        prefix_cache_queries=100,
        prefix_cache_hits=50,
    )
    figures = history.add(scrape)

    assert figures.generation_tokens_per_s == 5  # 20 of the last 4 seconds; 10 a second before
    assert figures.acceptance_length == 1 + 40 / 200
    assert figures.prefix_hits == 50 / 2000


def test_a_minute_without_drafts_falls_back_on_all_since_the_start(real):
    history = History()
    history.add(real)

    assert history.add(later(real, 2)).acceptance_length == pytest.approx(1 + 317 / 95)


def test_what_lies_more_than_a_minute_back_does_not_count(real):
    history = History()
    history.add(real)
    history.add(later(real, 50, spec_decode_num_drafts=5))
    figures = history.add(later(real, 100, spec_decode_num_drafts=15, spec_decode_num_accepted_tokens=20))
    assert figures.acceptance_length == 1 + 20 / 10


def test_after_a_silence_rates_are_of_the_time_since_the_last_answer(real):
    history = History()
    history.add(real)

    assert history.add(later(real, 40, generation_tokens=80)).generation_tokens_per_s == 2


def test_medians_are_of_the_last_minute_where_requests_came_in_it(real):
    name = "vllm:time_to_first_token_seconds_bucket"
    slower = {bound: count + (4 if bound >= 1.0 else 0) for bound, count in real.buckets[name].items()}
    history = History()
    history.add(real)
    figures = history.add(dataclasses.replace(real, taken=102.0, buckets={**real.buckets, name: slower}))

    assert figures.ttft_s == pytest.approx(0.75 + 0.25 / 2)


def test_a_median_beyond_the_last_bound_is_that_bound(real):
    text = '{0}{{le="0.1"}} 1\n{0}{{le="+Inf"}} 9\n'.format("vllm:time_to_first_token_seconds_bucket")
    assert History().add(live.read(text, 0.0)).ttft_s == 0.1


def test_counters_that_went_backwards_start_the_rates_anew(real):
    history = History()
    history.add(later(real, 0, generation_tokens=1000))
    restarted = history.add(later(real, 2))

    assert restarted.generation_tokens_per_s is None
    assert restarted.acceptance_length == pytest.approx(1 + 317 / 95)
    assert history.add(later(real, 4, generation_tokens=20)).generation_tokens_per_s == 10


def test_engines_are_added_up_but_for_the_cache_of_which_the_fullest_counts():
    text = "\n".join(
        f'{name}{{engine="{engine}"}} {value}'
        for name, values in {
            "vllm:num_requests_running": (3, 5),
            "vllm:kv_cache_usage_perc": (0.25, 0.75),
            "vllm:generation_tokens_total": (10, 20),
        }.items()
        for engine, value in enumerate(values)
    )
    scrape = live.read(text + "\n", 0.0)
    figures = History().add(scrape)

    assert (figures.running, figures.kv_cache) == (8, 0.75)
    assert scrape.values["vllm:generation_tokens_total"] == 30


def test_a_server_without_drafts_requests_or_statistics_shows_none_of_them():
    figures = History().add(live.read("", 0.0))
    assert set(dataclasses.asdict(figures).values()) == {None}


def at(port: int) -> Server:
    return Server(pid=1, started=0.0, variant=None, model="/w/tiny", port=port)


def test_a_port_where_nothing_listens_refuses():
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ConnectError):
        live.scrape(at(launch.free_port()), client)


def test_a_server_that_hangs_is_given_up_soon():
    with socket.create_server(("127.0.0.1", 0)) as deaf, httpx.Client(trust_env=False) as client:
        started = time.monotonic()
        with pytest.raises(httpx.ReadTimeout):
            live.scrape(at(deaf.getsockname()[1]), client)
    assert time.monotonic() - started < 5 * live.TIMEOUT_S


@pytest.mark.parametrize("text", ["<html>a page</html>", "vllm:num_requests_running{", "no metric at all"])
def test_what_is_no_metrics_is_told_apart(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the parser says no more
        live.read(text, 0.0)


def test_a_server_that_names_no_variant_goes_by_its_checkpoint():
    assert Server(pid=1, started=0.0, variant=None, model="/w/weights/tiny", port=1).name == "weights/tiny"
    assert (
        Server(pid=1, started=0.0, variant="tiny-seq8", model="/w/weights/tiny", port=1).name == "tiny-seq8"
    )


def test_servers_of_another_checkout_are_not_this_one_s(tmp_path):
    assert live.find(tmp_path) == []


@pytest.mark.engine
def test_the_figures_of_a_running_server_move_with_its_requests(tiny_server):
    [server] = [one for one in live.find(variant.repository_root()) if one.pid == tiny_server.pid]
    assert (server.variant, server.port) == ("tiny", tiny_server.command.port)
    assert server.started < time.time()

    history = History()
    with httpx.Client(trust_env=False) as client:
        before = history.add(live.scrape(server, client))
        answer = client.post(
            f"{tiny_server.base_url}/v1/completions",
            headers=launch.authorization(),
            json={"model": tiny_server.model, "prompt": "The town of", "max_tokens": 32, "ignore_eos": True},
            timeout=120,
        ).raise_for_status()
        deadline = time.monotonic() + 10
        while True:  # the engine's figures reach the API server a moment after the answer
            figures = history.add(live.scrape(server, client))
            if figures.generation_tokens_per_s or time.monotonic() > deadline:
                break
            time.sleep(0.2)

    assert answer.json()["usage"]["completion_tokens"] == 32
    assert before.generation_tokens_per_s is None
    assert figures.generation_tokens_per_s > 0
    assert figures.prompt_tokens_per_s > 0
    assert figures.ttft_s > 0
    assert figures.itl_s > 0
    assert (figures.running, figures.waiting, figures.preemptions) == (0, 0, 0)
