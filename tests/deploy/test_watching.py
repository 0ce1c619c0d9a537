"""The dashboard, the alert rules and the systemd unit, held against a running server and systemd itself."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "slimqwen.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
UNIT = DEPLOY / "systemd" / "slimqwen@.service"
OF_DRAFTS = "vllm:spec_decode_"
"""Metrics that a server has with drafts alone."""


def metrics_of(queries: list[str]) -> set[str]:
    """The names of metrics in PromQL queries."""
    return {name for query in queries for name in re.findall(r"\b(?:vllm:\w+|http_requests_\w+)", query)}


@pytest.mark.engine
def test_every_metric_of_dashboard_and_rules_exists_on_a_running_server(served_tiny):
    url = served_tiny.server.base_url
    httpx.post(f"{url}/v1/completions", json={"model": "default", "prompt": "A", "max_tokens": 2}, timeout=60)
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    there = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    asked = metrics_of([*QUERIES, *(rule["expr"] for rule in RULES)])
    assert len(asked) >= 12
    assert {name for name in asked - there if not name.startswith(OF_DRAFTS)} == set()


def test_metrics_of_drafts_are_those_that_vllm_registers_and_a_wrong_name_would_be_seen():
    import vllm.v1.spec_decode.metrics as metrics

    source = Path(metrics.__file__).read_text()
    asked = {
        name
        for name in metrics_of([*QUERIES, *(rule["expr"] for rule in RULES)])
        if name.startswith(OF_DRAFTS)
    }
    assert len(asked) == 2
    assert [name for name in asked if name.removesuffix("_total") not in source] == []
    assert "vllm:spec_decode_num_drafted" not in source.split('"')


def test_panels_have_a_title_a_unit_and_a_place_of_their_own():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in DASHBOARD["panels"]})
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in DASHBOARD["panels"])
    assert all("$instance" in query for query in QUERIES)


def test_every_rule_says_what_it_means_and_what_to_do():
    for rule in RULES:
        assert rule["alert"].startswith("Slimqwen")
        assert "$labels.instance" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_the_unit():
    done = subprocess.run(["systemd-analyze", "verify", UNIT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_keeps_the_key_out_of_arguments_and_waits_for_the_drain():
    lines = dict(
        line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#"
    )
    assert lines["LoadCredential"].startswith("api-key:")
    assert "$CREDENTIALS_DIRECTORY" in lines["ExecStart"]
    assert (
        int(lines["TimeoutStopSec"]) >= 120 + 20
    )  # the drain of deploy/README.md, and what vLLM takes after it
    assert lines["DynamicUser"] == lines["NoNewPrivileges"] == "yes"
    # A group that a host lacks, such as render, ends every start.
    assert lines.keys().isdisjoint({"User", "Group", "SupplementaryGroups"})


def test_the_units_command_starts_the_variant_with_the_key_of_the_file(tmp_path):
    (command,) = re.findall(r"^ExecStart=/bin/sh -c '(.*)' serve %i$", UNIT.read_text(), re.MULTILINE)
    (tmp_path / "api-key").write_text("sesame\n")
    program = tmp_path / "slimqwen"
    program.write_text('#!/bin/sh\necho "$VLLM_API_KEY|$*"\n')
    program.chmod(0o755)
    words = ["/bin/sh", "-c", command.replace("/opt/slimqwen/bin/slimqwen", str(program)), "serve", "mine"]
    started, refused = (
        subprocess.run(
            words,
            env={"CREDENTIALS_DIRECTORY": str(folder), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        for folder in (tmp_path, tmp_path / "none")
    )
    assert (started.returncode, started.stdout) == (0, "sesame|serve mine\n")
    assert (refused.returncode, refused.stdout) == (1, "")  # never without a key
