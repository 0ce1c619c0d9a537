"""Rehearsals: vLLM's start-up of a variant on a device, up to its first kernel.

`python -m slimqwen.plan.rehearsal FILE` is a process that sees the device. It reads a request from standard input and
writes its answer to the file, both as JSON objects.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel, ConfigDict

from slimqwen import variant as variants
from slimqwen.checkpoint.files import sha256
from slimqwen.errors import SlimqwenError
from slimqwen.identity import effects
from slimqwen.plan import devices, jit_modules, resolution, shapes, simulated_gpu
from slimqwen.plan.devices import CPU, Gpu
from slimqwen.plan.facts import EngineConfig, Plan
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server_log import find_last_cause
from slimqwen.variant import Variant
from slimqwen.vllm_plugin import engine_facts
from slimqwen.workspace import locate

SHARED_BY = "VLLM_TENSOR_PARALLEL_SIZE"
"""Key of config.env: the number of GPUs that share the model."""


class RehearsalError(SlimqwenError):
    """A rehearsal ended without an answer."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Path
    variant: str
    lines: dict[str, str]  # lines of config.env whose values may differ from the file's
    gpu: Gpu | None
    gpus: int  # number of GPUs that share the model


def rehearse_variant(variant: Variant, gpu: Gpu | None, *, log: Path) -> Plan:
    """Rehearse a variant on a device; if vLLM refuses the variant, `error` of the plan says why.

    Args:
        gpu: GPU to simulate; None to rehearse on the CPU of this host.
        log: file that receives vLLM's output.

    Raises:
        RehearsalError: the process ended without an answer, for instance because the installed torch is built for
            the other kind of device.
    """
    lines = {key: variant.settings[key].value for key in ("VLLM_MODEL", SHARED_BY) if key in variant.settings}
    shared = lines.get(SHARED_BY, "")
    gpus = int(shared) if shared.isdigit() else 1  # vLLM itself refuses any other value
    request = _Request(root=variant.root, variant=variant.name, lines=lines, gpu=gpu, gpus=gpus)
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("r", prefix="slimqwen-plan-") as answer, log.open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "slimqwen.plan.rehearsal", answer.name],
            input=request.model_dump_json(),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        text = answer.read()
    if not text:
        raise RehearsalError(
            find_last_cause(log) or f"the rehearsal ended without a result; {log} has its output"
        )
    return Plan.model_validate_json(text)


def decisive_flags(command: ServerCommand) -> dict[str, str]:
    """The flags (values as JSON) and environment variables of a server on which its plan depends, by name."""
    return effects.decisive_flags(command.flags) | dict(command.variables)


def digest_inputs(variant: Variant, gpu: Gpu | None) -> dict[str, str]:
    """Digests of what a plan is made of beside flags: config.json, where it is here, and the GPU's data sheet."""
    config = variant.weights / "config.json"
    inputs = {"config.json": sha256(config)} if config.is_file() else {}
    if gpu is not None:
        # As listed: a plan that was made on the GPU's own host has the memory that the driver states.
        listed = devices.read_gpus(variant.root).get(gpu.name, gpu)
        inputs["data sheet"] = hashlib.sha256(listed.model_dump_json().encode()).hexdigest()
    return inputs


def main() -> None:
    """Read a request from standard input, and write the answer to the file that the command's argument names."""
    request = _Request.model_validate_json(sys.stdin.read())
    try:
        if request.gpu is None:
            simulated_gpu.require_cpu_build()
        else:
            simulated_gpu.simulate_gpu(request.gpu, request.gpus)
    except SlimqwenError as error:
        sys.exit(f"error: {error}")
    Path(sys.argv[1]).write_text(_rehearse(request).model_dump_json())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips vLLM's clean-up, which needs a real GPU


def _rehearse(request: _Request) -> Plan:
    """Take the variant through vLLM's start-up, up to the first kernel."""
    facts: dict[str, Any] = {
        "variant": request.variant,
        "gpu": request.gpu.name if request.gpu else CPU,
        "compute_capability": request.gpu.compute_capability if request.gpu else None,
        "planned": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "vllm": importlib.metadata.version("vllm"),
        "checkpoint": "",
    }
    step = "configuration"
    with _blocked_network(), tempfile.TemporaryDirectory(prefix="slimqwen-plan-") as folder:
        try:
            variant = variants.load(request.variant, request.root).with_lines(request.lines)
            facts["inputs"] = digest_inputs(variant, request.gpu)
            variant, facts["checkpoint"] = _with_checkpoint(variant, Path(folder))
            command = ServerCommand.resolve(variant, platform="cpu" if request.gpu is None else "cuda")
            facts["flags"] = decisive_flags(command)
            environment = command.process_environment()
            os.environ.clear()
            os.environ.update(environment)
            # Without this, importing Humming starts two builds in processes that outlive the rehearsal.
            os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
            config = resolution.make_engine_config(command.argv[3:])
            facts["engine"] = EngineConfig(**engine_facts.config_facts(config))
            step = "model"
            target, draft = resolution.build_models(config)
            facts["attention"] = engine_facts.attention_layers(config)
            facts["linears"] = resolution.list_linear_kernels(target, draft)
            facts["weight_bytes"] = resolution.count_weight_bytes(config, target, draft)
            facts["jit"] = jit_modules.list_modules(facts["attention"], facts["linears"])
            step = "block size"
            resolution.align_blocks(config)
            step = "KV cache"
            device_bytes = request.gpu.cuda_memory_bytes if request.gpu else None
            parameter_bytes = sum(facts["weight_bytes"].values())
            facts["kv_cache"], layout = resolution.lay_out_kv_cache(config, parameter_bytes, device_bytes)
            step = "CUDA graphs"
            facts["graphs"] = resolution.resolve_graphs(config, layout)
            step = "weights"
            resolution.load_names(config, target, draft)
            step = "libraries of FlashInfer"
            if jit_modules.ATTENTION in {module.module for module in facts["jit"]}:
                jit_modules.check_attention(config, layout)
        except Exception as error:  # any refusal by vLLM is an answer
            facts["failed_at"] = step
            facts["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            logging.getLogger(__name__).exception("rehearsal of %s", request.variant)
    return Plan(**facts)


def _with_checkpoint(variant: Variant, folder: Path) -> tuple[Variant, str]:
    """The variant with a checkpoint that vLLM can read, and where its dimensions come from.

    If the variant's own checkpoint is not here, one of the same dimensions without weights is written below `folder`.
    """
    if (variant.weights / "config.json").is_file():
        return variant, f"weights/{variant.weights.name}"
    shape = shapes.variant_shape(variant)
    # vLLM infers the speculative method from words in the path, so the folder has the checkpoint's own name.
    weights = folder / variant.weights.name
    shapes.write_shape(shape, weights, locate("weights/tiny", variant.root))
    return variant.with_lines({"VLLM_MODEL": str(weights)}), shape.source


@contextlib.contextmanager
def _blocked_network() -> Iterator[None]:
    """Make every look-up of a remote host fail, as without a network, so that a plan does not depend on a hub."""
    look_up = socket.getaddrinfo

    def refuse(host: Any, *arguments: Any, **keywords: Any) -> Any:
        if host in (None, "", "localhost", socket.gethostname()) or str(host)[:1].isdigit():
            return look_up(host, *arguments, **keywords)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with patch.object(socket, "getaddrinfo", refuse):
        yield


if __name__ == "__main__":
    main()
