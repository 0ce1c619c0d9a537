"""Every client of a measured server reaches it: past a proxy, over TLS with any certificate, below a root path."""

import os
import urllib.request
from pathlib import Path

import pytest
import requests

from slimqwen import variant
from slimqwen.bench import client
from slimqwen.evals import token_distributions
from slimqwen.evals.suites import lm_eval_run
from slimqwen.evals.suites.suite import Suite, SuiteTask
from slimqwen.host_load import Watch
from slimqwen.recipe.stages import bake_cache
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.http_client import bypass_proxy
from slimqwen.serving.server import find_running, free_port, run_server
from slimqwen.serving.shared_server import SharedServer, max_model_len
from tests.serving.certificates import write_certificate

PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@pytest.fixture
def dead_proxy(monkeypatch):
    """A proxy of the shell that nobody answers at."""
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("dead_proxy")
@pytest.mark.parametrize("excepted", [{}, {"NO_PROXY": "example.org"}, {"no_proxy": "example.org"}])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.7"])
def test_a_host_is_reached_without_the_proxy_and_others_as_before(monkeypatch, excepted, host):
    for name, value in excepted.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        bypass_proxy(host)
    assert urllib.request.proxy_bypass(host)
    assert requests.utils.should_bypass_proxies(f"http://{f'[{host}]' if ':' in host else host}:80", None)
    assert bool(urllib.request.proxy_bypass("example.org")) is bool(excepted)
    assert not urllib.request.proxy_bypass("example.com")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == ",".join([*excepted.values(), host])


@pytest.mark.engine
@pytest.mark.usefixtures("dead_proxy", "servers_are_no_forks")
def test_every_client_reaches_a_server_with_tls_behind_a_proxy(add_variant, tmp_path):
    tiny = variant.load("tiny")
    write_certificate(tmp_path)
    for folder in ("weights", "eval"):
        (tmp_path / folder).symlink_to(tiny.root / folder)
    lines = (tiny.folder / "config.env").read_text()
    tls = "VLLM_SSL_CERTFILE=cert.pem\nVLLM_SSL_KEYFILE=key.pem\nVLLM_ROOT_PATH=/models\n"
    add_variant("v", lines + tls)
    command = ServerCommand.resolve(variant.load("v", tmp_path), port=free_port(), platform="cpu")
    assert command.url.startswith("https://")
    log = tmp_path / "client.log"
    with run_server(command, log=tmp_path / "vllm.log") as server:
        assert find_running(command).pid == server.pid
        shared = SharedServer(command.variant, server, False, max_model_len(server.base_url))
        batch = client.Batch(name="a load", requests=[([5, 6, 7], 4)], sampling={"temperature": 0})
        sent = client.send_requests(server, batch, log=log, answered=lambda: None, watch=Watch())
        assert (sent["completed"], sent["output_lens"]) == (1, [4])
        assert len(token_distributions._top_log_probabilities(shared, [5, 6, 7])) == 2
        bake_cache.drive(server, [8])
        suite = Suite(
            name="small",
            tasks_folder=Path("eval/tasks/tinyworld"),
            chat_template=False,
            sample="first",
            tasks=(SuiteTask(task="tinyworld_facts", measure="exact_match", non_inferiority_margin=0.05),),
        )
        runs, _ = lm_eval_run.run_suite(suite, shared, limit=2, log=log)
        assert len(runs[0].items) == 2
