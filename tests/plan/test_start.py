"""The plan of a start: which record counts, what it refuses, what it warns of."""

import dataclasses
import os
import shutil
import subprocess
import sys
from types import MappingProxyType

import pytest

from slimqwen import host, variant
from slimqwen.cli import serve
from slimqwen.cli.console import warn
from slimqwen.plan import devices, rehearsal, start, trouble
from slimqwen.plan.record import list_recorded_plans
from slimqwen.plan.start import MissingPlanError
from slimqwen.records import store
from slimqwen.serving import baked_cache, checks, cuda_toolkit, gpu
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.server import free_port
from slimqwen.vllm_plugin import engine_facts
from tests.plan import example

ROOT = variant.repository_root()
A10G = gpu.CudaDevice(0, "NVIDIA A10G", "8.6", 22.49)


@pytest.fixture
def resolve(add_variant, tmp_path, monkeypatch):
    """The command of a variant for an A10G, with more lines in its config.env."""
    for name in (trouble.FILE, devices.FILE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    shutil.copytree(variant.load("tiny").weights, tmp_path / "weights/v")
    config = add_variant("v", "PLATFORM=cuda\nVLLM_MODEL=weights/v\n")
    monkeypatch.setattr(gpu, "all_gpus", lambda: [A10G])
    monkeypatch.setattr(cuda_toolkit, "missing", lambda environment: ())
    first = config.read_text()

    def command(*lines, kv_cache_dtype="fp8"):
        lines = (f"VLLM_KV_CACHE_DTYPE={kv_cache_dtype}", *lines)
        config.write_text(first + "".join(f"{line}\n" for line in lines))
        return ServerCommand.resolve(variant.load("v", tmp_path))

    return command


@pytest.fixture
def record(resolve, tmp_path):
    """Write a record of a plan of some kind that was made for a command, or with changed fields."""

    def write(command, second=0, changes=MappingProxyType({}), **kind):
        fields = {"flags": rehearsal.decisive_flags(command), **changes}
        plan = example.plan(**kind).model_copy(update=fields)
        others = [each for each in list_recorded_plans(tmp_path, "v") if each.gpu != plan.gpu]
        made = example.record(tmp_path, *others, plan, ended=f"2026-11-22T20:00:0{second}Z")
        text = store.serialise(made, "plan")
        store.publish(tmp_path / "experiments" / "v" / f"plan_2026-11-22T20000{second}Z.json", text.encode())
        return plan

    return write


def test_the_newest_plan_that_fits_the_start_counts(resolve, record):
    command = resolve()
    record(command, 0, {"checkpoint": "first"})
    record(command, 1, {"checkpoint": "second"})
    record(command, 2, {"checkpoint": "third"}, gpu="l4")
    assert start.name_gpu_here(command) == "a10g"
    assert start.find_plan(command, "a10g").checkpoint == "second"
    assert start.find_plan(command, "l4").checkpoint == "third"


def test_without_a_plan_the_command_that_makes_one_is_named(resolve):
    command = resolve()
    with pytest.raises(MissingPlanError, match="; run `slimqwen plan --variant v --gpu a10g --record`"):
        start.find_plan(command, "a10g")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vllm": "0.31.0"}, "the recorded one is for vLLM 0.31.0, "),
        ({"flags": {}}, "the recorded one has other values of VLLM_PLUGINS, kv-cache-dtype"),
    ],
)
def test_a_plan_for_another_start_does_not_count(resolve, record, changes, reason):
    command = resolve()
    record(command, changes=changes)
    with pytest.raises(MissingPlanError, match=rf"on a10g that fits: {reason}"):
        start.find_plan(command, "a10g")


def test_a_line_written_into_the_config_env_takes_the_plan_away(resolve, record):
    record(resolve(), backend="FLASHINFER", kv_cache_dtype="fp8")
    cured = resolve(kv_cache_dtype="auto")
    with pytest.raises(MissingPlanError, match="the recorded one has other values of kv-cache-dtype;"):
        start.find_plan(cured, "a10g")


def test_a_gpu_that_is_not_listed_has_no_plan(resolve, monkeypatch):
    monkeypatch.setattr(gpu, "all_gpus", lambda: [dataclasses.replace(A10G, name="NVIDIA T4")])
    with pytest.raises(MissingPlanError, match=r"no plan for NVIDIA T4: eval/devices\.yaml"):
        start.name_gpu_here(resolve())


def test_without_a_plan_the_capability_of_this_host_s_card_counts(resolve, monkeypatch):
    assert start.match_flag_trouble(resolve("VLLM_DTYPE=float16")).dies == ()
    t4 = dataclasses.replace(A10G, name="Tesla T4", capability="7.5")
    monkeypatch.setattr(gpu, "all_gpus", lambda: [t4])
    (death,) = start.match_flag_trouble(resolve("VLLM_DTYPE=float16")).dies
    assert death.description.startswith("would die on Tesla T4: Below compute capability 8.0 ")


@pytest.mark.parametrize("line", ["", "ALLOW_UNSAFE=1"])
def test_a_plan_that_dies_is_refused_in_one_line_with_the_cure(resolve, record, line):
    command = resolve(line)
    plan = record(command, backend="FLASHINFER", kv_cache_dtype="fp8")
    dies = start.match_start_trouble(plan, command, compiles=False).dies
    if command.variant.allow_unsafe:
        checks.refuse_trouble(command, dies)
        return
    with pytest.raises(
        ServingError,
        match=r"v would die on a10g: FlashInfer .*VLLM_KV_CACHE_DTYPE=auto.*ALLOW_UNSAFE=1 to serve anyway$",
    ):
        checks.refuse_trouble(command, dies)


@pytest.mark.parametrize("missing", [(), ("nvcc",), ("a C++ compiler",)])
@pytest.mark.parametrize("planned", [True, False])
def test_a_start_that_cannot_compile_for_flashinfer_dies_wherever_it_was_planned(
    resolve, record, monkeypatch, missing, planned
):
    command = resolve()
    record(command, backend="FLASHINFER", compiler=planned)
    monkeypatch.setattr(cuda_toolkit, "missing", lambda environment: missing)
    _, dies = start.find_recorded_plan(command, warn)
    assert [death.description.partition(" was ")[0] for death in dies] == (
        ["would die on a10g: FlashInfer"] if missing else []
    )


def test_what_a_start_costs_is_one_line_each_with_the_cure(resolve, record, capfd):
    command = resolve()
    record(command, backend="FLASHINFER", kv_cache_dtype="fp8", full=())
    plan, dies = start.find_recorded_plan(command, warn)
    assert (plan.gpu, list(dies)) == ("a10g", [])
    said = " ".join(capfd.readouterr().err.split())
    assert "Known trouble: a10g: FP8 KV on this GPU means FlashInfer" in said
    assert "VLLM_KV_CACHE_DTYPE=auto." in said


def test_a_required_plan_that_is_missing_refuses_the_start(resolve):
    with pytest.raises(ServingError, match=r"REQUIRE_PLAN=1, but no plan of v on a10g"):
        start.find_recorded_plan(resolve("REQUIRE_PLAN=1"), warn)


def test_what_a_gpu_start_measures_may_differ_by_the_overhead_that_its_plan_assumes(resolve, record):
    plan = record(resolve())
    expected = start.expect_facts(plan, required=False)
    assert expected.facts["captured_graphs"] == plan.graphs.captured
    assert expected.facts["kv_tokens"] == plan.kv_cache.tokens
    assert set(expected.tolerances) == {"kv_blocks", "kv_tokens", "sequences_at_max_model_len"}
    assert expected.tolerances["kv_tokens"] == pytest.approx(1.5 * 2**30 / plan.kv_cache.available_bytes)
    pinned = plan.model_copy(update={"flags": {**plan.flags, "kv-cache-memory-bytes": "1"}})
    assert not start.expect_facts(pinned, required=False).tolerances


def test_serve_hands_the_plan_of_the_start_to_vllm(resolve, record, tmp_path, monkeypatch):
    resolve("VLLM_CPU_KVCACHE_SPACE=1", "VLLM_HOST=127.0.0.1", kv_cache_dtype="auto")
    one = variant.load("v", tmp_path)
    plan = record(ServerCommand.resolve(one, platform="cpu"), gpu="cpu")
    started = []
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    monkeypatch.setattr(start, "find_plan", lambda command, name: plan)

    serve.serve(one, port=free_port(), platform="cpu", require_plan="1")

    ((_, argv, environment),) = started
    expected = engine_facts.PlanExpectation.model_validate_json(environment[engine_facts.VARIABLE])
    kept = f"{one.root}/{engine_facts.COMPARISONS}/{one.name}.json"
    assert expected == start.expect_facts(plan, required=True).model_copy(update={"result_file": kept})
    assert "slimqwen.vllm_plugin.engine_facts.EngineFacts" in argv


def test_require_plan_is_refused_before_anything_starts(resolve, tmp_path):
    """As `docker run -e REQUIRE_PLAN=1`: the variable of the shell, and no plan."""
    code = (
        "import sys; from pathlib import Path; from slimqwen import variant;"
        f"variant.repository_root = lambda: Path({str(tmp_path)!r}); load = variant.load;"
        f"variant.load = lambda name, root=None: load(name, Path({str(tmp_path)!r}));"
        "import typer; from slimqwen.cli import console, serve;"
        "app = typer.Typer(add_completion=False); app.command()(serve.serve);"
        "sys.argv = ['serve.py', '--variant', 'v', '--platform', 'cpu']; console.run_command_line(app, 'serve.py')"
    )
    resolve()
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "REQUIRE_PLAN": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.strip().splitlines()[-1].startswith("error: REQUIRE_PLAN=1, but no plan of v on cpu")


def test_a_start_from_a_baked_cache_needs_no_compiler(resolve, record):
    command = resolve()
    plan = record(command, backend="FLASHINFER")
    (death,) = start.match_start_trouble(plan, command, compiles=False).dies
    assert "FlashInfer" in death.description
    baked = baked_cache.BakedCache(
        machine={}, flags={}, environment={}, graphs={}, files={}, archive_sha256="ab" * 32
    )
    for differences, refused in (((), False), (("torch was 1",), True)):
        cache = dataclasses.replace(command.cache, baked=baked, differences=differences)
        with_cache = dataclasses.replace(command, cache=cache)
        assert bool(start.match_start_trouble(plan, with_cache, compiles=False).dies) is refused


def test_a_start_without_a_plan_is_refused_by_its_flags_alone(resolve, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "has_avx512", lambda: True)
    resolve("VLLM_CPU_KVCACHE_SPACE=1", "VLLM_ENFORCE_EAGER=1", kv_cache_dtype="fp8")
    command = ServerCommand.resolve(variant.load("v", tmp_path), platform="cpu")
    plan, (trouble_met,) = start.find_recorded_plan(command, warn)
    assert plan is None
    assert trouble_met.description.startswith("would give other tokens on cpu: An FP8 KV cache")


@pytest.mark.parametrize(("platform", "said"), [("cuda", "no plan of v on a10g"), ("cpu", "")])
def test_a_start_without_a_plan_is_said_on_a_gpu_alone(resolve, tmp_path, capfd, platform, said):
    resolve("VLLM_CPU_KVCACHE_SPACE=1", kv_cache_dtype="auto")
    command = ServerCommand.resolve(variant.load("v", tmp_path), platform=platform)
    assert start.find_recorded_plan(command, warn) == (None, ())
    printed = " ".join(capfd.readouterr().err.split())
    assert said in printed
    assert bool(printed) is bool(said)
