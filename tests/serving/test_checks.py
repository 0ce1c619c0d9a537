import dataclasses
import os
import socket
import types

import pytest

from slimqwen import host, variant
from slimqwen.checkpoint import CorruptCheckpointError, MissingCheckpointError
from slimqwen.serving import chat_template, checks, gpu
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.server import free_port
from slimqwen.variant import ConfigError
from tests.serving.certificates import write_certificate
from tests.serving.conftest import SERVABLE


def test_missing_weights_name_the_command_that_makes_them(add_variant, tmp_path):
    config = add_variant("v", SERVABLE)
    (config.parent / "recipe.yaml").write_text("description: …\n")
    command = ServerCommand.resolve(variant.load("v", tmp_path), platform="cpu")

    with pytest.raises(MissingCheckpointError, match="slimqwen recipe run v"):
        checks.check_command(command)
    (tmp_path / "weights/v").mkdir(parents=True)
    with pytest.raises(MissingCheckpointError, match="slimqwen recipe run v"):
        checks.check_command(command)


def test_a_truncated_checkpoint_is_refused_before_vllm_starts(servable, tmp_path):
    command = servable()
    checks.check_command(command)
    tensors = tmp_path / "weights/v/model.safetensors"
    os.truncate(tensors, tensors.stat().st_size - 1000)

    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        checks.check_command(command)


def test_a_port_in_use_is_refused(servable):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = servable(port=taken.getsockname()[1])

        with pytest.raises(
            ServingError, match=rf"127\.0\.0\.1:{command.port}.*another port with --port or with VLLM_PORT"
        ):
            checks.check_command(command)


def test_an_impossible_port_is_refused(servable):
    with pytest.raises(ServingError, match="99999"):
        checks.check_command(servable(port=99999))


def test_a_socket_that_cannot_be_bound_is_refused_with_its_line(servable, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o500)
    servable()
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(tmp_path / "taken.sock"))
        taken.listen()
        for path, said in (
            ("x" * 108, "at most 107 bytes, this one 108; choose a shorter one"),
            ("missing/own.sock", "its folder is missing or not writable"),
            ("file", "something else has that name"),
            ("taken.sock", "a server listens there"),
            *([("closed/own.sock", "missing or not writable")] if os.geteuid() else []),
        ):
            (tmp_path / "experiments/v/config.env").write_text(f"{SERVABLE}VLLM_UDS={path}\n")
            with pytest.raises(ServingError, match=rf"config\.env:5: VLLM_UDS={path}: .*{said}"):
                checks.check_command(servable())


def test_a_socket_that_an_ended_server_left_is_removed(servable, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(tmp_path / "own.sock"))
    checks.check_command(servable("VLLM_UDS=own.sock"))
    assert not (tmp_path / "own.sock").exists()


@pytest.mark.parametrize(
    ("platform", "ranks", "free_mib", "refused"),
    [
        ("cpu", 1, 64, True),
        ("cpu", 1, 240, False),
        ("cuda", 1, 64, False),
        ("cuda", 2, 64, True),
        ("cuda", 2, 2048, False),
    ],
)
def test_the_shared_memory_of_a_small_container_is_refused_where_vllm_has_workers(
    servable, monkeypatch, platform, ranks, free_mib, refused
):
    command = servable()
    flags = {**command.flags, "tensor-parallel-size": ranks}
    command = dataclasses.replace(command, platform=platform, flags=flags)
    usage = types.SimpleNamespace(free=free_mib * 2**20)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: usage)
    if not refused:
        return checks._check_shared_memory(command)
    said = "v needs 240 MiB of /dev/shm, and 64 MiB are free; start the container with `docker run --shm-size 1g`"
    with pytest.raises(ServingError, match=f"^{said}, or .*`mount -o remount,size=1g /dev/shm`$"):
        checks._check_shared_memory(command)


def test_too_little_memory_is_refused_with_what_is_needed(servable):
    command = servable()
    greedy = dataclasses.replace(
        command, environment=dict(command.environment) | {"VLLM_CPU_KVCACHE_SPACE": "10000"}
    )

    with pytest.raises(ServingError, match=r"needs 1000\d\.\d GiB .*lower VLLM_CPU_KVCACHE_SPACE"):
        checks.check_command(greedy)


def test_space_for_the_kv_cache_is_whole_gib_and_never_what_vllm_would_take_of_the_machine(servable):
    command = servable()
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    for text in ("1GiB", "0.5", ""):
        said = dict(command.environment) | {"VLLM_CPU_KVCACHE_SPACE": text}
        with pytest.raises(ConfigError, match=rf"config\.env:4: VLLM_CPU_KVCACHE_SPACE={text}: .*whole GiB"):
            checks.check_command(dataclasses.replace(command, environment=said))
    unsaid = ServerCommand.resolve(variant.load("qwen3.5-4b"), platform="cpu")
    assert unsaid.environment["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_a_gpu_whose_memory_stays_in_use_is_refused_after_a_wait(servable, monkeypatch):
    total = 2**40
    monkeypatch.setattr(gpu, "free_and_total_memory", lambda: (total // 2, total))
    waited = []
    monkeypatch.setattr(gpu, "await_free_memory", lambda needed: waited.append(needed) or total // 2)
    with pytest.raises(ServingError, match="end other programs that use the GPU"):
        checks.check_memory(dataclasses.replace(servable(), platform="cuda"))
    assert waited == [int(0.92 * total)]


def test_weights_are_shared_among_the_gpus_that_split_them(servable, monkeypatch):
    monkeypatch.setattr(gpu, "free_and_total_memory", lambda: (10**6, 10**6))
    one = dataclasses.replace(servable(), platform="cuda")
    with pytest.raises(ServingError, match="serve a smaller variant or use a larger GPU"):
        checks.check_memory(one)
    size = sum(file.stat().st_size for file in one.variant.weights.glob("*.safetensors"))
    half = {"tensor-parallel-size": 4, "pipeline-parallel-size": -(-size // 10**6)}
    checks.check_memory(dataclasses.replace(one, flags={**one.flags, **half}))


@pytest.mark.parametrize("key", ["", " ", "a\n"])
def test_a_key_that_would_protect_nothing_is_refused(servable, monkeypatch, key):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ServingError, match="VLLM_API_KEY is empty or has white space around it"):
        checks.check_command(servable())
    monkeypatch.setenv("VLLM_API_KEY", "a")
    checks.check_command(servable())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["VLLM_MAX_MODEL_LEN=1000000"], r"config.env:5: VLLM_MAX_MODEL_LEN=1000000.*set at most"),
        (["THINKING_TOKEN_BUDGET=8"], r"config\.env:5: .*VLLM_REASONING_PARSER=qwen3"),
        (["REQUIRE_BAKED=1"], "REQUIRE_BAKED=1, but v runs without compiled graphs"),
        (
            ["VLLM_ENFORCE_EAGER=0", "REQUIRE_BAKED=1"],
            r"has no baked compile cache; .*recipe run --variant v",
        ),
    ],
)
def test_lines_that_cannot_be_served_are_refused_with_the_cure(servable, lines, said):
    with pytest.raises(ServingError, match=said):
        checks.check_command(servable(*lines))


def test_a_variant_for_a_gpu_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr(host, "detect", lambda: "cpu")

    with pytest.raises(ServingError, match=r"for GPUs, and there is none here; .* --platform cpu`"):
        checks.check_command(ServerCommand.resolve(variant.load("cyankiwi")))
    checks.check_platform(variant.load("cyankiwi"), "cpu")  # the cure


def test_a_vllm_for_gpus_that_sees_none_serves_nothing(servable, monkeypatch):
    monkeypatch.setattr(host, "is_gpu_build", lambda: True)
    with pytest.raises(ServingError, match=r"is for GPUs and sees none; .*docker run --gpus all"):
        checks.check_command(servable())


@pytest.mark.parametrize(("gpus", "said"), [(1, None), (2, None), (3, r"v: 3 GPUs cannot share 2 heads")])
def test_gpus_that_cannot_share_the_heads_are_refused(servable, gpus, said):
    command = servable(f"VLLM_TENSOR_PARALLEL_SIZE={gpus}")
    if said is None:
        checks.check_weights(command)
    else:
        with pytest.raises(ServingError, match=said):
            checks.check_weights(command)


TROUBLE = checks.Trouble("would die on x: no compiler", "take another backend", "a log")


def test_known_trouble_is_refused_with_its_evidence_and_cure(servable):
    with pytest.raises(
        ServingError,
        match=r"v would die on x: no compiler; a log shows it; take another backend, .*ALLOW_UNSAFE=1",
    ):
        checks.check_command(servable(), [TROUBLE])


def test_known_trouble_is_served_where_that_is_allowed(servable):
    checks.check_command(servable("ALLOW_UNSAFE=1"), [TROUBLE])
    one = servable().variant.with_lines({"ALLOW_UNSAFE": "1"})
    checks.check_command(ServerCommand.resolve(one, port=free_port(), platform="cpu"), [TROUBLE])


def on_address(one, lines):
    return ServerCommand.resolve(one.with_lines(lines), port=free_port(), platform="cpu")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_an_address_that_others_reach_needs_the_key_or_a_line_that_allows_it(servable, monkeypatch, host):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    one = servable().variant
    refusal = f"everyone who reaches {host} could use v; set VLLM_API_KEY .* ALLOW_OPEN=1 to serve anyway"
    with pytest.raises(ServingError, match=refusal):
        checks.check_command(on_address(one, {"VLLM_HOST": host}))
    checks.check_address(on_address(one, {"VLLM_HOST": host, "ALLOW_OPEN": "1"}))
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    checks.check_address(on_address(one, {"VLLM_HOST": host}))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost", ""])
def test_this_machine_alone_needs_no_key_and_is_where_a_server_without_a_line_listens(
    servable, monkeypatch, host
):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    command = on_address(servable().variant, {"VLLM_HOST": host})
    checks.check_address(command)
    assert command.argv[command.argv.index("--host") + 1] == (host or "127.0.0.1") == command.host


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["VLLM_SSL_KEYFILE=key.pem"], "No such file"),
        (["VLLM_SSL_CERTFILE=cert.pem", "VLLM_SSL_KEYFILE=none.pem"], "No such file"),
        (["VLLM_SSL_CERTFILE=cert.pem", "VLLM_SSL_KEYFILE=locked.pem"], ""),
        (["VLLM_SSL_CERTFILE=cert.pem", "VLLM_SSL_KEYFILE=other.pem"], "mismatch"),
        (["VLLM_SSL_CERTFILE=cert.pem", "VLLM_SSL_KEYFILE=key.pem", "VLLM_SSL_CA_CERTS=key.pem"], ""),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    servable, tmp_path, lines, said
):
    write_certificate(tmp_path)
    (tmp_path / "cert.pem").rename(tmp_path / "kept.pem")
    (tmp_path / "key.pem").rename(tmp_path / "other.pem")
    write_certificate(tmp_path, password=b"secret")
    (tmp_path / "key.pem").rename(tmp_path / "locked.pem")
    write_certificate(tmp_path)
    with pytest.raises(ServingError, match=rf"v cannot serve TLS .*{said}.*; correct VLLM_SSL_CERTFILE"):
        checks.check_command(servable(*lines))


def test_a_usable_certificate_is_accepted(servable, tmp_path):
    write_certificate(tmp_path)
    checks.check_command(
        servable("VLLM_SSL_CERTFILE=cert.pem", "VLLM_SSL_KEYFILE=key.pem", "VLLM_SSL_CA_CERTS=cert.pem")
    )


def test_tools_that_the_template_takes_name_the_two_lines_that_read_their_calls(servable, tmp_path):
    command = servable()
    file = tmp_path / "tools.jinja"
    file.write_text("{% if tools %}<function=name>{% endif %}")
    flags = {**command.flags, "chat-template": str(file)}
    lines = chat_template.suggest_tool_choice(command.variant, flags)
    assert lines == "VLLM_ENABLE_AUTO_TOOL_CHOICE=1 and VLLM_TOOL_CALL_PARSER=qwen3_coder"
    assert (
        chat_template.suggest_tool_choice(command.variant, {**flags, "enable-auto-tool-choice": True}) is None
    )
    file.write_text("{{ messages }}")
    assert chat_template.suggest_tool_choice(command.variant, flags) is None


def test_a_thinking_budget_with_a_parser_is_taken(servable):
    checks.check_command(servable("THINKING_TOKEN_BUDGET=8", "VLLM_REASONING_PARSER=qwen3"))


def test_a_broken_chat_template_is_refused_before_vllm_starts(servable, tmp_path):
    command = servable("VLLM_CHAT_TEMPLATE=experiments/v/chat.jinja")
    (tmp_path / "experiments/v/chat.jinja").write_text("{{ messages")
    with pytest.raises(ServingError, match=r"chat\.jinja, line 1"):
        checks.check_command(command)
