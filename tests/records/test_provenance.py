import json
import os
import shlex
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimqwen.errors import SlimqwenError
from slimqwen.records import provenance

ROOT = Path("/home/someone/slimqwen")


def server(root, weights=None, flags=MappingProxyType({}), environment=MappingProxyType({})):
    """What provenance reads of a server's command."""
    variant = SimpleNamespace(root=root, weights=weights)
    return SimpleNamespace(variant=variant, flags=flags, environment=environment)


@pytest.mark.parametrize(
    ("value", "portable"),
    [
        (f"{ROOT}/weights/tiny", "weights/tiny"),
        (ROOT / "weights" / "tiny", "weights/tiny"),
        ("/opt/weights/tiny", ".../tiny"),
        ({"model": f"{ROOT}/weights/tiny", "max-num-seqs": 8}, {"model": "weights/tiny", "max-num-seqs": 8}),
        ("--limit", "--limit"),
        (str(ROOT), "."),
        ([f"{ROOT}/a", "/tmp/b c", 1], ["a", ".../b c", 1]),
    ],
)
def test_paths_become_relative_to_the_repository(value, portable):
    assert provenance.portable(value, ROOT) == portable


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "HF_TOKEN", "aws_secret_access_key", "DB_PASSWORD"])
def test_secrets_are_redacted(name):
    assert "hunter2" not in str(provenance.redacted({name: "hunter2", "OMP_NUM_THREADS": "2"}))
    assert provenance.redacted({"OMP_NUM_THREADS": "2"}) == {"OMP_NUM_THREADS": "2"}


def test_secrets_are_redacted_in_flags_and_addresses_and_counts_of_tokens_are_not():
    flags = {
        "api-key": "hunter2",
        "hf-token": "hunter2",
        "max-num-batched-tokens": 2048,
        "ssl-keyfile": "a.pem",
    }
    block = provenance.of_server(
        server(ROOT, flags=flags, environment={"HTTPS_PROXY": "http://me:hunter2@proxy.example.org:3128"})
    )
    assert "hunter2" not in json.dumps(block)
    assert (block["flags"]["max-num-batched-tokens"], block["flags"]["ssl-keyfile"]) == (2048, "a.pem")
    assert block["environment"]["HTTPS_PROXY"].endswith("@proxy.example.org:3128")


def test_secrets_are_redacted_in_commands():
    words = ["scripts/serve.py", "--api-key", "hunter2", "HF_TOKEN=hunter2", "http://me:hunter2@host/x"]
    assert "hunter2" not in provenance.shell_command(words, ROOT)


@pytest.mark.parametrize(
    ("given", "own", "threads"),
    [({"OMP_NUM_THREADS": "3"}, "2", 3), ({}, "2", 2), ({}, None, None), ({}, "many", None), ({}, "0", None)],
)
def test_threads_are_the_engine_s_or_else_this_process_s(monkeypatch, given, own, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    assert provenance.of_server(server(ROOT, environment=given))["threads"] == threads


@given(st.lists(st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"])), max_size=4))
def test_a_command_is_what_a_shell_takes(words):
    line = provenance.shell_command([f"{ROOT}/scripts/x.py", *words], ROOT)
    assert shlex.split(line) == ["python", "scripts/x.py", *words]
    assert provenance.shell_command(["slimqwen", "report", "--check"], ROOT) == "slimqwen report --check"


def test_versions_and_hardware_of_this_machine_are_found():
    assert {"python", "vllm", "torch", "lm_eval", "transformers"} <= set(provenance.package_versions())
    hardware = provenance.hardware()
    assert hardware.cpu_count >= 1
    assert hardware.memory_bytes > 2**30
    assert hardware.cpu_model


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Makes a driver: its tool, and what torch sees (name, bytes)."""

    def make(tool, seen=(), version=None):
        if tool is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{tool}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        if version:
            (tmp_path / "version").write_text(
                f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue\n"
            )
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(provenance, "_DRIVER", tmp_path / "version")
        visible = [SimpleNamespace(name=name, total_memory=size) for name, size in seen]
        monkeypatch.setattr(
            provenance, "all_gpus", lambda: [SimpleNamespace(index=n) for n in range(len(seen))]
        )
        monkeypatch.setattr("torch.cuda.get_device_properties", visible.__getitem__)
        monkeypatch.setattr(provenance, "total_memory", lambda: 128 * 2**30)
        return [(gpu.name, gpu.memory_bytes >> 30, gpu.driver) for gpu in provenance._gpus()]

    return make


@pytest.mark.parametrize(
    ("lines", "gpus"),
    [
        ("NVIDIA A40, 46068, 570.1", [("NVIDIA A40", 44, "570.1")]),
        (
            "NVIDIA A40, 46068, 570.1\nGPU, Tesla, 1024, 570.1",
            [("NVIDIA A40", 44, "570.1"), ("GPU, Tesla", 1, "570.1")],
        ),
        ("NVIDIA GB10, [N/A], 580.95.05", [("NVIDIA GB10", 128, "580.95.05")]),
        ("Orin (nvgpu), [Not Supported], [N/A]", [("Orin (nvgpu)", 128, "[N/A]")]),
        (
            "NVIDIA A40, 46068, 570.1\nWARNING: infoROM is corrupted at gpu 0000:1A:00.0",
            [("NVIDIA A40", 44, "570.1")],
        ),
        ("", []),
    ],
)
def test_gpus_are_read_whatever_their_driver_does_not_say(driver, lines, gpus):
    assert driver(f"printf '{lines}'") == gpus


def test_a_driver_that_fails_or_is_missing_has_no_gpus(driver):
    assert driver(None) == []
    assert driver("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18") == []


def test_a_container_without_the_drivers_tool_has_the_gpus_that_torch_sees(driver):
    found = driver(None, seen=[("NVIDIA H100 80GB HBM3", 79 << 30)], version="570.133.20")
    assert found == [("NVIDIA H100 80GB HBM3", 79, "570.133.20")]


def test_a_slice_of_a_gpu_is_not_the_whole_gpu(driver):
    tool = """case $1 in
    -L) echo 'GPU 0: NVIDIA A100 (UUID: GPU-1)'; echo '  MIG 1g.5gb Device 0: (UUID: MIG-2)';;
    *) echo 'NVIDIA A100, 40960, 570.1';; esac"""
    assert driver(tool, seen=[("NVIDIA A100 MIG 1g.5gb", 5 << 30)]) == [
        ("NVIDIA A100 MIG 1g.5gb", 5, "570.1")
    ]


def test_a_driver_that_hangs_is_named(driver, monkeypatch):
    monkeypatch.setattr(provenance, "_DRIVER_TIMEOUT_S", 0.2)
    with pytest.raises(SlimqwenError, match=r"nvidia-smi did not end in 0\.2 s.*restart"):
        driver("exec sleep 60")


def describe(root, weights, datasets):
    flags = {"model": str(weights), "max-num-seqs": 8}
    environment = {"VLLM_CACHE_ROOT": str(root / ".cache" / "vllm"), "HF_TOKEN": "hunter2"}
    command = [str(root / "scripts" / "eval_quality.py"), "--variant", "tiny"]
    return provenance.describe(
        server(root, weights, flags, environment),
        command,
        provenance.utc_now(),
        datasets=datasets,
        seeds={"lm_eval": 1234},
    )


def test_a_thread_that_may_use_fewer_cpus_has_other_hardware():
    every = os.sched_getaffinity(0)
    try:
        counts = []
        for cpus in (every, {min(every)}, every):
            os.sched_setaffinity(0, cpus)
            counts.append(provenance.hardware().cpu_count)
    finally:
        os.sched_setaffinity(0, every)
    assert counts == [len(every), 1, len(every)]


def test_a_described_run_can_be_repeated_elsewhere(repository):
    weights = repository / "weights" / "tiny"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    items = repository / "eval" / "items.jsonl"
    items.parent.mkdir()
    items.write_text("{}\n")
    described = describe(repository, weights, [items]).as_json()
    assert described["command"] == "python scripts/eval_quality.py --variant tiny"
    assert described["schema"] == "provenance/3"
    assert described["checkpoint"]["path"] == described["flags"]["model"] == "weights/tiny"
    assert described["checkpoint"]["size_bytes"] == 2
    assert list(described["datasets"]) == ["eval/items.jsonl"]
    assert str(repository) not in json.dumps(described)
    assert "hunter2" not in json.dumps(described)


def test_a_data_file_that_is_gone_is_named(repository):
    weights = repository / "weights"
    weights.mkdir()
    with pytest.raises(SlimqwenError, match=r"gone\.jsonl"):
        describe(repository, weights, [repository / "gone.jsonl"])


def test_files_and_checkpoints_that_flags_name_are_inputs(tmp_path):
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    flags = {
        "model": str(tmp_path),
        "chat-template": "chat.jinja",
        "speculative-config": {"model": str(drafter), "num_speculative_tokens": 2},
        "served-model-name": "x" * 5000,
    }
    command = server(tmp_path, flags=flags)
    before = provenance.named_files(command)
    assert set(before) == {"chat-template", "speculative-config.model"}
    (tmp_path / "chat.jinja").write_text("{{ messages[0] }}")
    (drafter / "config.json").write_text("{ }")
    after = provenance.named_files(command)
    assert all(after[name] != digest for name, digest in before.items())
