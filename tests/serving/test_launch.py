import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from slimqwen import variant
from slimqwen.checkpoint import CorruptCheckpointError, MissingCheckpointError
from slimqwen.serving import baked_cache, compile_watch, launch, unsafe_engines
from slimqwen.serving.flags import FlagError

SERVABLE = "VLLM_MODEL=weights/v\nVLLM_HOST=127.0.0.1\nVLLM_PORT=8080\nVLLM_CPU_KVCACHE_SPACE=1\n"


@pytest.fixture
def servable(add_variant, tmp_path):
    """A variant with a copy of the embedded checkpoint, resolved for a CPU."""

    def make(*lines, port=None):
        if not (tmp_path / "experiments/v").exists():
            add_variant("v", SERVABLE + "".join(f"{line}\n" for line in lines))
            shutil.copytree(variant.load("tiny").weights, tmp_path / "weights/v")
        return launch.resolve(variant.load("v", tmp_path), port=port or launch.free_port(), platform="cpu")

    return make


def _reference_words(name, platform):
    return list(launch.resolve(variant.load(name), platform=platform).argv)


def test_the_best_reference_variant_has_the_reference_flags_on_a_gpu():
    words = _reference_words("cyankiwi-seq8-best", None)

    def value(option, count=1):
        at = words.index(option) + 1
        return words[at : at + count]

    assert json.loads(value("--speculative-config")[0]) == {"method": "mtp", "num_speculative_tokens": 4}
    assert value("--max-num-seqs") == ["8"]
    assert value("--cudagraph-capture-sizes", 8) == ["5", "10", "15", "20", "25", "30", "35", "40"]
    assert value("--kv-cache-dtype") == ["fp8"]
    assert value("--max-num-batched-tokens") == ["2048"]
    assert value("--max-model-len") == ["13312"]
    assert value("--dtype") == ["float16"]
    assert {"--enable-chunked-prefill", "--enable-prefix-caching", "--language-model-only"} <= set(words)
    assert "--quantization" not in words
    assert "--enforce-eager" not in words


@pytest.mark.parametrize("name", [name for name in variant.names() if name.startswith("cyankiwi")])
def test_graph_sizes_are_draft_tokens_and_one_times_every_batch(name):
    chosen = launch.resolve(variant.load(name)).flags

    step = chosen["speculative-config"]["num_speculative_tokens"] + 1
    assert chosen["cudagraph-capture-sizes"] == [step * n for n in range(1, chosen["max-num-seqs"] + 1)]


def test_on_a_cpu_gpu_settings_are_left_out_and_said():
    command = launch.resolve(variant.load("cyankiwi-seq8-best"), platform="cpu")

    assert {line.key: line.instead for line in command.left_out} == {
        "VLLM_DTYPE": "bfloat16",
        "VLLM_ENABLE_PREFIX_CACHING": "0",
        "VLLM_CUDAGRAPH_CAPTURE_SIZES": None,
        "VLLM_GPU_MEMORY_UTILIZATION": None,
        "VLLM_COMPILATION_CONFIG": None,
    } | ({} if launch.machine.has_avx512() else {"VLLM_KV_CACHE_DTYPE": None})
    assert command.argv[command.argv.index("--dtype") + 1] == "bfloat16"
    assert "--no-enable-prefix-caching" in command.argv
    assert "--cudagraph-capture-sizes" not in command.argv
    assert command.argv.count("--enforce-eager") == 1


def test_a_variant_that_asks_to_compile_on_a_cpu_is_not_made_eager(servable):
    assert "--no-enforce-eager" in servable("VLLM_ENFORCE_EAGER=0").argv


def test_variants_with_other_flags_never_share_a_compile_cache():
    shallow, deep = (
        launch.resolve(variant.load(name), platform="cuda")
        for name in ("cyankiwi-seq8", "cyankiwi-seq8-best")
    )
    again = launch.resolve(variant.load("cyankiwi-seq8"), platform="cuda", port=9999)

    assert shallow.environment["VLLM_CACHE_ROOT"] != deep.environment["VLLM_CACHE_ROOT"]
    assert shallow.environment["VLLM_CACHE_ROOT"] == again.environment["VLLM_CACHE_ROOT"]


def test_stray_vllm_variables_of_the_shell_do_not_reach_the_server_but_the_key_does(servable, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "nothing")
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    command = servable()

    environment = command.process_environment()

    assert environment["VLLM_PLUGINS"] == command.environment["VLLM_PLUGINS"] != "nothing"
    assert environment["VLLM_API_KEY"] == "sesame"
    assert "sesame" not in command.as_shell()


def test_missing_weights_name_the_command_that_makes_them(add_variant, tmp_path):
    config = add_variant("v", SERVABLE)
    (config.parent / "recipe.yaml").write_text("description: …\n")
    command = launch.resolve(variant.load("v", tmp_path), platform="cpu")

    with pytest.raises(MissingCheckpointError, match="make recipe VARIANT=v"):
        launch.check(command)
    (tmp_path / "weights/v").mkdir(parents=True)
    with pytest.raises(MissingCheckpointError, match="make recipe VARIANT=v"):
        launch.check(command)


def test_a_truncated_checkpoint_is_refused_before_vllm_starts(servable, tmp_path):
    command = servable()
    launch.check(command)
    tensors = tmp_path / "weights/v/model.safetensors"
    os.truncate(tensors, tensors.stat().st_size - 1000)

    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        launch.check(command)


def test_a_port_in_use_is_refused(servable):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = servable(port=taken.getsockname()[1])

        with pytest.raises(launch.PortInUseError, match=rf"127\.0\.0\.1:{command.port}.*PORT=8081"):
            launch.check(command)


def test_an_impossible_port_is_refused(servable):
    with pytest.raises(launch.PortInUseError, match="99999"):
        launch.check(servable(port=99999))


def test_too_little_memory_is_refused_with_what_is_needed(servable):
    command = servable()
    greedy = dataclasses.replace(
        command, environment=dict(command.environment) | {"VLLM_CPU_KVCACHE_SPACE": "10000"}
    )

    with pytest.raises(launch.MemoryShortError, match=r"needs 1000\d\.\d GiB .*lower VLLM_CPU_KVCACHE_SPACE"):
        launch.check(greedy)


def test_space_for_the_kv_cache_is_whole_gib_and_never_what_vllm_would_take_of_the_machine(servable):
    command = servable()
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    for text in ("1GiB", "0.5", ""):
        said = dict(command.environment) | {"VLLM_CPU_KVCACHE_SPACE": text}
        with pytest.raises(FlagError, match=rf"config\.env:4: VLLM_CPU_KVCACHE_SPACE={text}: .*whole GiB"):
            launch.check(dataclasses.replace(command, environment=said))
    unsaid = launch.resolve(variant.load("qwen3.5-4b"), platform="cpu")
    assert unsaid.environment["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_weights_are_shared_among_the_gpus_that_split_them(servable, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**6, 10**6))
    one = dataclasses.replace(servable(), platform="cuda")
    with pytest.raises(launch.MemoryShortError, match="take a smaller variant or a larger GPU"):
        launch._check_memory(one)
    size = sum(file.stat().st_size for file in one.variant.weights.glob("*.safetensors"))
    half = {"tensor-parallel-size": 4, "pipeline-parallel-size": -(-size // 10**6)}
    launch._check_memory(dataclasses.replace(one, flags={**one.flags, **half}))


@pytest.mark.parametrize(
    ("key", "said"), [("", "set and empty"), (" ", "set and empty"), ("a\n", "white space")]
)
def test_a_key_that_would_protect_nothing_is_refused(servable, monkeypatch, key, said):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(launch.ApiKeyError, match=said):
        launch.check(servable())
    monkeypatch.setenv("VLLM_API_KEY", "a")
    launch.check(servable())


def test_more_context_than_the_checkpoint_has_is_refused(servable, tmp_path):
    command = servable("VLLM_MAX_MODEL_LEN=1000000")

    with pytest.raises(
        launch.ContextTooLongError, match=r"config.env:5: VLLM_MAX_MODEL_LEN=1000000.*set at most"
    ):
        launch.check(command)


def test_a_variant_for_a_gpu_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr(launch.machine, "detect", lambda: "cpu")

    with pytest.raises(launch.PlatformError, match="needs a GPU and there is none here"):
        launch.check(launch.resolve(variant.load("cyankiwi")))


def test_a_server_that_dies_at_start_is_an_error_that_quotes_its_log(servable, tmp_path, monkeypatch):
    command = servable()
    monkeypatch.setattr(launch, "check", lambda command: None)
    (tmp_path / "weights/v/config.json").write_text("{}")
    log = tmp_path / "vllm.log"

    with (
        pytest.raises(launch.ServerFailedError, match=r"before it was ready: .*Error.*vllm\.log"),
        launch.serving(command, log=log, timeout_s=120),
    ):
        pytest.fail("it served")


ORPHAN = """
import dataclasses, sys
from pathlib import Path
from slimqwen import variant
from slimqwen.serving import baked_cache, compile_watch, launch, unsafe_engines

command = launch.resolve(variant.load("tiny"), port=launch.free_port(), platform="cpu")
asleep = (sys.executable, "-c", "import time; time.sleep(300)")
with launch.serving(dataclasses.replace(command, argv=asleep), log=Path(sys.argv[1])):
    pass
"""


def test_a_server_ends_with_the_process_that_started_it_however_that_dies(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path / "log")])
    try:
        deadline = time.monotonic() + 120
        while True:
            children = psutil.Process(parent.pid).children(recursive=True)
            with contextlib.suppress(psutil.Error):
                if any("time.sleep" in " ".join(child.cmdline()) for child in children):
                    break
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def baked_for(monkeypatch, servable, tmp_path):
    """The variant with a manifest beside its weights that says it was baked for this machine, or another."""

    def make(machine=None, device="", flags=None):
        command = servable("VLLM_ENFORCE_EAGER=0")
        manifest = baked_cache.BakedCache(
            machine=baked_cache.this_machine("cpu") | (machine or {}),
            device=device,
            flags=baked_cache.decisive({**command.flags, **(flags or {})}),
            environment=dict(command.variables),
            graphs={"backbone": 1.0},
            files={},
            archive_sha256="ab" * 32,
        )
        (tmp_path / "weights/v" / baked_cache.MANIFEST).write_text(manifest.model_dump_json())
        return servable()

    return make


def test_a_baked_cache_that_fits_is_where_vllm_looks(baked_for, tmp_path):
    command = baked_for()
    assert command.cache.usable
    assert command.environment["VLLM_CACHE_ROOT"] == str(
        tmp_path / ".cache" / "baked-abababababababab" / "vllm"
    )


def test_a_baked_cache_for_something_else_is_not_used_and_refused_where_required(baked_for, tmp_path):
    assert baked_for().environment["VLLM_CACHE_ROOT"].count("baked-") == 1
    command = baked_for(machine={"torch": "1.0"}, flags={"max-num-seqs": 99})
    assert not command.cache.usable
    assert "torch was 1.0 and is" in command.cache.differences[0]
    assert "--max-num-seqs was 99 and is not set" in command.cache.differences
    assert "baked-" not in command.environment["VLLM_CACHE_ROOT"]
    launch.check(command)
    required = launch.resolve(command.variant, port=launch.free_port(), platform="cpu", require_baked=True)
    with pytest.raises(
        baked_cache.BakedCacheError, match=r"compile cache of v is for something else: torch was"
    ):
        launch.check(required)


def test_a_cache_baked_with_other_plugins_does_not_fit_because_vllms_own_key_holds_them(baked_for, tmp_path):
    command = baked_for()
    file = tmp_path / "weights/v" / baked_cache.MANIFEST
    file.write_text(file.read_text().replace("slimqwen_endpoints", "another"))
    again = launch.resolve(command.variant, port=launch.free_port(), platform="cpu")
    assert [said.partition(" ")[0] for said in again.cache.differences] == ["VLLM_PLUGINS"]


def test_a_required_cache_that_was_never_baked_is_told_with_the_command_that_bakes_it(servable):
    command = servable("VLLM_ENFORCE_EAGER=0", "REQUIRE_BAKED=1")
    with pytest.raises(
        baked_cache.BakedCacheError, match=r"has no baked compile cache; .*make recipe VARIANT=v"
    ):
        launch.check(command)


def test_a_required_cache_of_a_variant_that_compiles_nothing_is_refused(servable):
    with pytest.raises(
        baked_cache.BakedCacheError, match="compiles nothing and a baked compile cache is required"
    ):
        servable("REQUIRE_BAKED=1")


@pytest.mark.parametrize(("here", "alias"), [("NVIDIA A10G", "NVIDIA A40"), ("NVIDIA A40", "")])
def test_a_gpu_of_another_name_and_the_same_capability_is_told_to_vllm(baked_for, monkeypatch, here, alias):
    monkeypatch.setattr(baked_cache, "this_device", lambda platform: here)
    command = baked_for(device="NVIDIA A40", machine={"compute capability": "8.6"})
    facts = baked_cache.this_machine("cpu") | {"compute capability": "8.6"}
    monkeypatch.setattr(baked_cache, "this_machine", lambda platform: facts)
    command = launch.resolve(command.variant, port=launch.free_port(), platform="cpu")
    assert command.cache.differences == ()
    wanted = compile_watch.Wanted.model_validate_json(command.environment[compile_watch.VARIABLE])
    assert (wanted.device, wanted.capability) == (alias, "8.6" if alias else "")


def test_another_compute_capability_is_a_difference(baked_for):
    command = baked_for(device="NVIDIA L4", machine={"compute capability": "8.9"})
    assert "compute capability was 8.9 and is not set" in command.cache.differences
    wanted = compile_watch.Wanted.model_validate_json(command.environment[compile_watch.VARIABLE])
    assert wanted.device == ""


@pytest.fixture
def found_unsafe(servable, tmp_path):
    """The variant, its own engine modes found unsafe on this machine's platform or on another."""

    def make(*lines, platform="cpu"):
        command = servable("VLLM_MAX_NUM_SEQS=1", "VLLM_ENABLE_CHUNKED_PREFILL=1", *lines)
        build = unsafe_engines.build(command.variant.weights, "cpu").model_copy(update={"platform": platform})
        modes = unsafe_engines.Modes(
            draft_tokens=0,
            prefix_caching=False,
            kv_cache_dtype="auto",
            chunked_prefill=True,
            concurrency=1,
            graphs="eager",
        )
        record = "experiments/v/engine_2026-01-01T000000Z.json"
        finding = unsafe_engines.Finding(build=build, modes=modes, reason="2 answers differ", record=record)
        unsafe_engines.update(tmp_path, build, unsafe=[finding], fine=[])
        return command

    return make


def test_modes_that_were_found_unsafe_are_refused_with_the_record_and_the_cure(found_unsafe):
    with pytest.raises(
        unsafe_engines.UnsafeEngineError,
        match=r"no MTP, no prefix caching, .*2 answers differ; experiments/v/engine_2026.*ALLOW_UNSAFE=1",
    ) as refused:
        launch.check(found_unsafe())
    assert "\n" not in str(refused.value)


def test_modes_that_were_found_unsafe_are_served_where_that_is_allowed(found_unsafe):
    launch.check(found_unsafe("ALLOW_UNSAFE=1"))


def test_unsafe_modes_can_be_allowed_for_one_start(found_unsafe):
    one = found_unsafe().variant
    launch.check(launch.resolve(one, port=launch.free_port(), platform="cpu", allow_unsafe=True))


def test_what_a_gpu_was_found_to_do_does_not_stop_a_cpu(found_unsafe):
    launch.check(found_unsafe(platform="cuda"))


def test_unsafe_modes_are_allowed_by_a_1_only(servable):
    with pytest.raises(variant.ConfigError, match="ALLOW_UNSAFE=yes: write ALLOW_UNSAFE=1"):
        servable("ALLOW_UNSAFE=yes")


@pytest.mark.engine
def test_a_served_variant_answers_every_endpoint_a_client_uses(tiny_server):
    chat = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with httpx.Client(base_url=tiny_server.base_url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        (card,) = client.get("/v1/models").json()["data"]
        assert card["id"] == "default"
        assert card["root"] == str(tiny_server.weights)
        completion = client.post(
            "/v1/completions", json={"model": "default", "prompt": "The", "max_tokens": 4}
        )
        assert completion.json()["usage"]["completion_tokens"] > 0
        answered = client.post("/v1/chat/completions", json=chat).json()
        assert answered["choices"][0]["message"]["content"] is not None
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"model": "default", "prompt": "The"}),
        ):
            with client.stream("POST", path, json=body | {"stream": True, "max_tokens": 4}) as response:
                lines = [line for line in response.iter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            assert all("choices" in json.loads(line.removeprefix("data: ")) for line in lines[:-1])


@pytest.mark.engine
def test_a_running_server_is_found_by_its_exact_command_only(tiny_server):
    found = launch.find_running(tiny_server.command)
    assert found is not None
    assert found.pid == tiny_server.pid

    other = launch.resolve(variant.load("tiny-seq8"), port=tiny_server.command.port, platform="cpu")
    assert launch.find_running(other) is None
    nobody = launch.resolve(variant.load("tiny"), port=launch.free_port(), platform="cpu")
    assert launch.find_running(nobody) is None


@pytest.mark.engine
def test_serve_becomes_vllm_and_ends_within_five_seconds_of_either_signal(tmp_path):
    """The process that scripts/serve.py was is the server; SIGTERM and Ctrl-C end it with all its children."""
    for end in (signal.SIGTERM, signal.SIGINT):
        port = launch.free_port()
        script = variant.repository_root() / "scripts/serve.py"
        with (tmp_path / f"{end.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, script, "--variant", "tiny", "--port", str(port)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            _wait_for_health(port, process)
            family = psutil.Process(process.pid).children(recursive=True)
            assert "vllm.entrypoints" in " ".join(psutil.Process(process.pid).cmdline())
            asked = time.monotonic()
            process.send_signal(end)
            process.wait(timeout=30)
            took_s = time.monotonic() - asked
            _, alive = psutil.wait_procs(family, timeout=1)
            # An ended process stays listed as a zombie until whoever adopted it collects its exit code.
            assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
            assert took_s < 5
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_for_health(port, process):
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended before it was ready"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.25)
    pytest.fail("the server was not ready in time")
