"""The deployment examples, held against what they talk about: schemas, the server's routes, the variants, the image."""

import asyncio
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from slimqwen import variant
from slimqwen.serving import flags
from tests.vllm_plugin.test_readiness import started

ROOT = variant.repository_root()
DEPLOY = ROOT / "deploy"
MANIFESTS = [
    manifest
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(file.read_text())
]
GUIDE = (DEPLOY / "README.md").read_text()
SERVICE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]
SNIPPETS = re.findall(r"^```env\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
COLD_START_S = 697
"""Of the reference: a GPU that compiles everything."""

ENDING_S = 20
"""What vLLM takes to end after its drain; seen: under 5 s on two cores."""


def kind(name):
    (result,) = (manifest for manifest in MANIFESTS if manifest["kind"] == name)
    return result


POD = kind("Deployment")["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


def probe(name):
    return CONTAINER[f"{name}Probe"]


def asked(name):
    """Path that a probe asks: kubelet from its node, or a program in the container."""
    if "httpGet" in probe(name):
        return probe(name)["httpGet"]["path"]
    return re.search(r"http://127\.0\.0\.1:\d+(/\w+)", probe(name)["exec"]["command"][-1])[1]


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)([sm])", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


@pytest.fixture(scope="module")
def example():
    """The variant that the examples serve."""
    return variant.load(CONTAINER["image"].removeprefix("slimqwen:"))


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_the_manifests_are_what_kubernetes_takes(version):
    for manifest in MANIFESTS:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_compose_file_follows_the_specification():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run([*command, DEPLOY / "compose.yaml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_the_probes_ask_routes_that_the_server_has():
    from vllm.entrypoints.launchers.app import build_app

    routes = {route.path for route in build_app(flags._parser().parse_args([]), ("generate",)).routes}
    for name in ("startup", "readiness", "liveness"):
        assert asked(name) in routes
    assert "/ping" in SERVICE["healthcheck"]["test"][-1]
    assert "/ping" in routes


def test_only_readiness_fails_while_the_server_warms_up_or_drains():
    async def answers():
        stays = asyncio.Event()

        async def warm(app):
            await stays.wait()

        paths = [asked(name) for name in ("readiness", "liveness", "startup")]
        async with started(warm) as server:
            warming = [await server.status(path) for path in paths]
            stays.set()
            await asyncio.sleep(0.1)
            ready = [await server.status(path) for path in paths]
            server.app.state.engine_client.shutdown(timeout=1)
            return warming, ready, [await server.status(path) for path in paths]

    assert asyncio.run(answers()) == ([503, 200, 200], [200, 200, 200], [503, 200, 200])


def test_a_start_has_time_to_compile():
    startup = probe("startup")
    assert startup["periodSeconds"] * startup["failureThreshold"] > 1.5 * COLD_START_S
    assert seconds(SERVICE["healthcheck"]["start_period"]) > 1.5 * COLD_START_S


def test_the_time_to_end_is_longer_than_the_drain(example):
    sleep = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    drains = {
        name: flags.resolve(variant.load(name)).flags["shutdown-timeout"].value
        for name in variant.names()
        if variant.load(name).platform == "cuda"
    }
    assert drains[example.name] > 0
    for drain in drains.values():
        assert POD["spec"]["terminationGracePeriodSeconds"] >= sleep + drain + ENDING_S
        assert seconds(SERVICE["stop_grace_period"]) >= drain + ENDING_S


def test_both_examples_serve_the_image_that_is_built_on_its_port_and_as_its_user(example):
    dockerfile = (ROOT / "Dockerfile").read_text()
    user, group = re.search(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE).groups()
    assert (SERVICE["user"], SERVICE["healthcheck"]["test"][1]) == (f"{user}:{group}", "python")
    security = POD["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))
    assert security["runAsNonRoot"]
    assert not CONTAINER["securityContext"]["allowPrivilegeEscalation"]
    assert SERVICE["image"] == f"slimqwen:${{VARIANT:-{example.name}}}"
    port = int(example.settings["VLLM_PORT"].value)
    assert SERVICE["ports"] == [f"${{BIND:-127.0.0.1}}:8080:{port}"]
    assert f"127.0.0.1:{port}/ping" in SERVICE["healthcheck"]["test"][-1]
    (named,) = CONTAINER["ports"]
    assert named["containerPort"] == port
    assert probe("readiness")["httpGet"]["port"] == named["name"]
    for name in ("startup", "liveness"):  # what wants the key from elsewhere is asked from within
        assert f"http://127.0.0.1:{port}/metrics" in probe(name)["exec"]["command"][-1]
    assert [one["targetPort"] for one in kind("Service")["spec"]["ports"]] == [named["name"]]


def test_the_key_comes_from_outside_and_no_server_starts_without_it():
    (variable,) = CONTAINER["env"]
    reference = variable["valueFrom"]["secretKeyRef"]
    assert variable["name"] == "VLLM_API_KEY"
    assert f"generic {reference['name']} --from-file={reference['key']}=" in GUIDE
    assert not reference.get("optional", False)
    # Applied with the folder, a Secret without the key would take the key away again.
    assert not [one for one in MANIFESTS if one["kind"] == "Secret"]
    assert SERVICE["env_file"] == [{"path": "api-key.env", "required": True}]
    assert "api-key.env" in (DEPLOY / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.split()[1].partition("=")[0])
def test_every_config_of_the_guide_is_one_that_vllm_takes(snippet, tmp_path):
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments", ignore=shutil.ignore_patterns("*_20*"))
    base = re.match(r"BASE=(\S+)", snippet)[1]
    folder = shutil.copytree(tmp_path / "experiments" / base, tmp_path / "experiments/mine")
    (folder / "config.env").write_text(snippet)
    result = flags.resolve(variant.load("mine", tmp_path))
    said = {line.partition("=")[0] for line in snippet.splitlines()} - {"BASE"}
    assert said <= {flag.setting.key for flag in result.flags.values()} | result.environment.keys()


def test_the_metrics_to_watch_are_those_of_vllm():
    package = importlib.util.find_spec("vllm")
    assert package
    assert package.origin
    sources = (Path(package.origin).parent / "v1").rglob("*.py")
    known = {
        name for file in sources for name in re.findall(r'"(vllm:[a-z_]+)"', file.read_text(encoding="utf-8"))
    }
    named = set(re.findall(r"vllm:[a-z_]+", GUIDE))
    assert len(named) > 8
    # Prometheus' client adds these endings to counters and histograms.
    assert {name.removesuffix("_total").removesuffix("_bucket") for name in named} <= known
