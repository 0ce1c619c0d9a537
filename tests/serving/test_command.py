import dataclasses
import json
import os
import shutil

import pytest
import torch

from slimqwen import host, variant
from slimqwen.checkpoint.config import read_config, write_config
from slimqwen.cli import serve
from slimqwen.serving import baked_cache, checks, cuda_toolkit
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.server import free_port
from slimqwen.vllm_plugin import engine_facts
from slimqwen.vllm_plugin.patches.serving import compile_watch
from tests.checkpoints import edited_tensors


def _reference_words(name, platform):
    return list(ServerCommand.resolve(variant.load(name), platform=platform).argv)


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
    chosen = ServerCommand.resolve(variant.load(name)).flags

    step = chosen["speculative-config"]["num_speculative_tokens"] + 1
    assert chosen["cudagraph-capture-sizes"] == [step * n for n in range(1, chosen["max-num-seqs"] + 1)]


def test_on_a_cpu_gpu_settings_are_left_out_and_said():
    command = ServerCommand.resolve(variant.load("cyankiwi-seq8-best"), platform="cpu")

    assert {line.key: line.replacement for line in command.platform_changes} == {
        "VLLM_DTYPE": "bfloat16",
        "VLLM_CUDAGRAPH_CAPTURE_SIZES": None,
        "VLLM_GPU_MEMORY_UTILIZATION": None,
        "VLLM_COMPILATION_CONFIG": None,
    } | ({} if host.has_avx512() else {"VLLM_KV_CACHE_DTYPE": None})
    assert command.argv[command.argv.index("--dtype") + 1] == "bfloat16"
    assert "--enable-prefix-caching" in command.argv
    assert "--cudagraph-capture-sizes" not in command.argv
    assert command.argv.count("--enforce-eager") == 1


@pytest.mark.parametrize(
    ("written", "stored", "line", "dtype"),
    [
        ({"dtype": "float16"}, None, (), "bfloat16"),
        ({"torch_dtype": "float16", "dtype": None}, None, ("VLLM_DTYPE=auto",), "bfloat16"),
        ({"dtype": None}, torch.float16, (), "bfloat16"),
        ({"dtype": None}, torch.bfloat16, (), None),
        ({"dtype": "float16"}, None, ("VLLM_DTYPE=bfloat16",), "bfloat16"),
        ({"dtype": "float32"}, None, (), None),
        ({"dtype": "bfloat16"}, None, (), None),
    ],
)
def test_a_float16_checkpoint_is_served_in_bfloat16_on_a_cpu_and_that_is_said(
    servable, tmp_path, written, stored, line, dtype
):
    servable(*line)
    weights = tmp_path / "weights/v"
    config = {key: value for key, value in (read_config(weights) | written).items() if value is not None}
    write_config(weights, config)
    if stored:
        with edited_tensors(weights) as tensors:
            tensors.update({name: each.to(stored) for name, each in tensors.items()})
    command = servable()
    assert command.flags.get("dtype") == dtype
    assert ("--dtype" in command.argv) == (dtype is not None)
    changes = [change for change in command.platform_changes if change.key == "VLLM_DTYPE"]
    assert bool(changes) == (dtype is not None and line != ("VLLM_DTYPE=bfloat16",))


def test_a_variant_that_asks_to_compile_on_a_cpu_is_not_made_eager(servable):
    assert "--no-enforce-eager" in servable("VLLM_ENFORCE_EAGER=0").argv


def test_variants_with_other_flags_never_share_a_compile_cache():
    shallow, deep = (
        ServerCommand.resolve(variant.load(name), platform="cuda")
        for name in ("cyankiwi-seq8", "cyankiwi-seq8-best")
    )
    again = ServerCommand.resolve(variant.load("cyankiwi-seq8"), platform="cuda", port=9999)

    assert shallow.environment["VLLM_CACHE_ROOT"] != deep.environment["VLLM_CACHE_ROOT"]
    assert shallow.environment["VLLM_CACHE_ROOT"] == again.environment["VLLM_CACHE_ROOT"]


def test_stray_vllm_variables_of_the_shell_do_not_reach_the_server_but_the_key_does(servable, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "nothing")
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    command = servable()

    environment = command.process_environment()

    assert environment["VLLM_PLUGINS"] == command.environment["VLLM_PLUGINS"] != "nothing"
    assert "TORCHINDUCTOR_FREEZING" not in environment
    assert environment["VLLM_API_KEY"] == "sesame"
    assert "sesame" not in command.as_shell()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000"),
    ],
)
def test_a_client_asks_where_the_server_listens(servable, host, url):
    command = servable()
    elsewhere = dataclasses.replace(command, flags={**command.flags, "host": host, "port": 8000})
    assert elsewhere.url == url
    encrypted = dataclasses.replace(elsewhere, flags={**elsewhere.flags, "ssl-certfile": "certificate.pem"})
    assert encrypted.url == url.replace("http:", "https:")


@pytest.mark.parametrize(("line", "host"), [("", "127.0.0.1"), ("::1", "::1")])
def test_a_measurement_asks_a_server_of_a_unix_socket_on_its_port(servable, line, host):
    served = resolved_again(servable("VLLM_UDS=/run/own.sock"), VLLM_HOST=line)
    measured = served.on_port()
    assert (served.flags["uds"], "uds" in measured.flags) == ("/run/own.sock", False)
    assert (measured.host, "--uds" in measured.argv, "/run/own.sock" in measured.argv) == (host, False, False)
    assert measured.argv[measured.argv.index("--host") + 1] == host
    assert measured.on_port() == measured


def resolved_again(command, **lines):
    return ServerCommand.resolve(command.variant.with_lines(lines), port=free_port(), platform="cpu")


def cache_policy(command):
    return compile_watch.CachePolicy.model_validate_json(command.environment[compile_watch.VARIABLE])


def test_a_baked_cache_that_fits_is_where_vllm_looks(baked_for, tmp_path):
    command = baked_for()
    assert command.cache.usable
    assert command.environment["VLLM_CACHE_ROOT"] == str(
        tmp_path / ".cache" / "baked-abababababababab" / "vllm"
    )


def test_a_baked_cache_for_something_else_is_not_used_and_refused_where_required(baked_for):
    command = baked_for(machine={"torch": "1.0"}, flags={"max-num-seqs": 99})
    assert not command.cache.usable
    assert "torch was 1.0 and is" in command.cache.differences[0]
    assert "--max-num-seqs was 99 and is not set" in command.cache.differences
    assert "baked-" not in command.environment["VLLM_CACHE_ROOT"]
    checks.check_command(command)
    required = resolved_again(command, REQUIRE_BAKED="1")
    with pytest.raises(ServingError, match=r"compile cache cannot be loaded here: torch was"):
        checks.check_command(required)


def test_code_that_came_with_a_checkpoint_is_not_loaded_until_its_hash_is_given(baked_for, tmp_path):
    command = baked_for(trusted=False)
    assert not command.cache.usable
    assert "baked-" not in command.environment["VLLM_CACHE_ROOT"]
    checks.check_command(command)
    with pytest.raises(
        ServingError, match=f"neither baked nor imported .*--trust-cache {'ab' * 32}` imports it"
    ):
        checks.check_command(resolved_again(command, REQUIRE_BAKED="1"))
    baked_cache.trust(tmp_path, "ab" * 32, "imported by its hash")
    assert resolved_again(command).cache.usable
    # The checkpoint alone brings its trust nowhere; a copy of all weights does.
    for copied, usable in (("v", False), ("", True)):
        elsewhere = tmp_path / f"elsewhere{copied}"
        for folder in ("experiments", f"weights/{copied}"):
            shutil.copytree(tmp_path / folder, elsewhere / folder)
        again = ServerCommand.resolve(variant.load("v", elsewhere), platform="cpu")
        names = [said.partition(" ")[0] for said in again.cache.differences]
        assert ("it" not in names) is usable


def test_serve_goes_on_without_such_code_in_one_line_until_its_hash_is_given(
    baked_for, tmp_path, monkeypatch, capfd
):
    one = baked_for(trusted=False).variant
    archive, manifest = (
        tmp_path / "weights/v" / name for name in (baked_cache.ARCHIVE, baked_cache.MANIFEST)
    )
    archive.write_bytes(b"anything")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "known_trouble.yaml").write_text("[]")
    digest = baked_cache.sha256(archive)
    manifest.write_text(manifest.read_text().replace("ab" * 32, digest))
    started = []
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words[2]["VLLM_CACHE_ROOT"]))
    serve.serve(one, port=free_port(), platform="cpu")
    said = " ".join(capfd.readouterr().err.split())
    assert "Compile cache of unknown origin: not used, so vLLM compiles: it is code" in said
    with pytest.raises(ServingError, match=f"has the SHA-256 {digest}, not {'0' * 64}"):
        serve.serve(one, port=free_port(), platform="cpu", trust_cache="0" * 64)
    serve.serve(one, port=free_port(), platform="cpu", trust_cache=digest)
    assert [f"baked-{digest[:16]}" in place for place in started] == [False, True]
    assert "Compile cache imported by its hash: fits this machine" in " ".join(capfd.readouterr().err.split())


def test_a_cache_baked_with_other_plugins_does_not_fit_because_vllms_own_key_holds_them(baked_for, tmp_path):
    command = baked_for()
    file = tmp_path / "weights/v" / baked_cache.MANIFEST
    file.write_text(file.read_text().replace("slimqwen_endpoints", "another"))
    again = resolved_again(command)
    assert [said.partition(" ")[0] for said in again.cache.differences] == ["VLLM_PLUGINS"]


@pytest.mark.parametrize(("fact", "other"), [("compute capability", "8.9"), ("GPU", "NVIDIA L4")])
def test_another_gpu_is_a_difference(baked_for, fact, other):
    assert f"{fact} was {other} and is not set" in baked_for(machine={fact: other}).cache.differences


def test_a_cuda_server_gets_the_toolkit_of_the_environment_and_a_cpu_server_none(monkeypatch):
    added = {"CUDA_HOME": "/cache/cuda-toolkit-1", "PATH": "/usr/bin:/venv/bin"}
    monkeypatch.setattr(cuda_toolkit, "variables", lambda cache, environment: added)
    on_gpu = ServerCommand.resolve(variant.load("cyankiwi"), platform="cuda").process_environment()
    assert {name: on_gpu[name] for name in added} == added
    on_cpu = ServerCommand.resolve(variant.load("tiny"), platform="cpu").process_environment()
    assert on_cpu.get("CUDA_HOME") != added["CUDA_HOME"]


def test_a_plan_that_a_start_is_compared_with_changes_no_word_of_the_command():
    command = ServerCommand.resolve(variant.load("tiny"), platform="cpu")
    held = command.compared_with_plan(
        engine_facts.PlanExpectation(plan="p", facts={"block_size": 128}, required=True)
    )
    assert held.argv == command.argv
    assert held.environment.items() - command.environment.items() == {
        (engine_facts.VARIABLE, held.environment[engine_facts.VARIABLE])
    }


def test_every_variant_is_behind_the_gate():
    for name in variant.names():
        argv = ServerCommand.resolve(variant.load(name), platform="cpu").argv
        assert argv[-2:] == ("--middleware", "slimqwen.vllm_plugin.readiness.Readiness")
