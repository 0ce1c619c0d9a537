"""Variants of the embedded checkpoint that can be served."""

import shutil

import pytest

from slimqwen import variant
from slimqwen.identity.effects import decisive_flags
from slimqwen.serving import baked_cache
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port

SERVABLE = "VLLM_MODEL=weights/v\nVLLM_HOST=127.0.0.1\nVLLM_PORT=8080\nVLLM_CPU_KVCACHE_SPACE=1\n"


@pytest.fixture
def servable(add_variant, tmp_path):
    """A variant with a copy of the embedded checkpoint, resolved for a CPU."""

    def make(*lines, port=None):
        if not (tmp_path / "experiments/v").exists():
            add_variant("v", SERVABLE + "".join(f"{line}\n" for line in lines))
            shutil.copytree(variant.load("tiny").weights, tmp_path / "weights/v")
        return ServerCommand.resolve(variant.load("v", tmp_path), port=port or free_port(), platform="cpu")

    return make


@pytest.fixture
def baked_for(monkeypatch, servable, tmp_path):
    """The variant with a manifest beside its weights that says it was baked for this machine, or another."""

    def make(machine=None, flags=None, *, trusted=True):
        command = servable("VLLM_ENFORCE_EAGER=0")
        manifest = baked_cache.BakedCache(
            machine=baked_cache.describe_machine("cpu") | (machine or {}),
            flags=decisive_flags({**command.flags, **(flags or {})}),
            environment=dict(command.variables),
            graphs={"backbone": 1.0},
            files={},
            archive_sha256="ab" * 32,
        )
        (tmp_path / "weights/v" / baked_cache.MANIFEST).write_text(manifest.model_dump_json())
        if trusted:
            baked_cache.trust(tmp_path, manifest.archive_sha256, "baked here")
        return servable()

    return make
