"""Rehearsals: vLLM's start-up of a variant on a device, up to its first kernel.

`python -m slimqwen.plan.rehearsal DESCRIPTOR` is a process that sees the device. It reads a request from standard
input, and writes the answer for each variant as a line to the file with that descriptor, all as JSON objects.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel, ConfigDict, ValidationError

from slimqwen import variant as variants
from slimqwen.checkpoint.files import sha256
from slimqwen.errors import SlimqwenError
from slimqwen.identity import changed_names, effects
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


class _Subject(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    variant: str
    lines: dict[str, str]  # all lines of config.env; their values may differ from the file's

    def load(self, root: Path) -> Variant:
        loaded = variants.load(self.variant, root)
        known = {key: setting.value for key, setting in loaded.settings.items()}
        return loaded.with_lines({key: self.lines.get(key, "") for key in changed_names(known, self.lines)})


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Path
    subjects: tuple[_Subject, ...]
    gpu: Gpu | None
    gpus: int  # number of GPUs that share the model


def rehearse_variant(variant: Variant, gpu: Gpu | None, *, log: Path) -> Plan:
    """Make the plan of a variant on a device; if vLLM refuses the variant, `error` of the plan says why.

    Args:
        variant: the variant; its lines in memory count, not those of config.env.
        gpu: GPU to simulate; None to rehearse on the CPU of this host.
        log: file that receives vLLM's output.

    Raises:
        RehearsalError: the process ended without an answer, for instance because the installed torch is built for
            the other kind of device.
    """
    (plan,) = rehearse_variants([variant], gpu, log=log)
    return plan


def rehearse_variants(variants: Sequence[Variant], gpu: Gpu | None, *, log: Path) -> Iterator[Plan]:
    """Make the plans of several variants on a device, one after the other.

    Each variant gets a fork of one process, so vLLM is imported only once. If vLLM refuses a variant, `error` of its
    plan says why, and the next variant follows.

    Args:
        variants: the variants, all to be served by the same number of GPUs; their lines in memory count.
        gpu: GPU to simulate; None to rehearse on the CPU of this host.
        log: file that receives vLLM's output.

    Yields:
        A plan for each variant, in their order.

    Raises:
        RehearsalError: the process ended without an answer to some variant.
    """
    settings = [each.settings for each in variants]
    shared = {lines[SHARED_BY].value if SHARED_BY in lines else "" for lines in settings}
    assert len(shared) == 1, f"the variants are to be shared by the same number of GPUs, not {shared}"
    (number,) = shared
    request = _Request(
        root=variants[0].root,
        subjects=tuple(
            _Subject(variant=each.name, lines={key: line.value for key, line in lines.items()})
            for each, lines in zip(variants, settings, strict=True)
        ),
        gpu=gpu,
        gpus=int(number) if number.isdigit() else 1,  # vLLM itself refuses any other value
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    made = 0
    receiving, sending = os.pipe()
    with log.open("w") as output, os.fdopen(receiving, encoding="utf-8") as answers:
        process = subprocess.Popen(
            [sys.executable, "-m", "slimqwen.plan.rehearsal", str(sending)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[sending],
        )
        os.close(sending)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as requests:
                requests.write(request.model_dump_json())
            for line in answers:
                made += 1
                yield Plan.model_validate_json(line)
        finally:
            process.kill()
            process.wait()
    if made < len(variants):
        raise RehearsalError(
            find_last_cause(log)
            or f"the process that plans ended without a result; read why in its log: {log}"
        )


def decisive_flags(command: ServerCommand) -> dict[str, str]:
    """The flags and environment variables on which the plan of a server depends, by name; values of flags are JSON."""
    return effects.decisive_flags(command.flags) | dict(command.variables)


def digest_inputs(variant: Variant, gpu: Gpu | None) -> dict[str, str]:
    """Digests, by name, of the inputs of a plan that are no flags: "config.json" of the checkpoint and "data sheet".

    The first is left out if the checkpoint is not here, the second for a CPU (`gpu` None).
    """
    config = variant.weights / "config.json"
    inputs = {"config.json": sha256(config)} if config.is_file() else {}
    if gpu is not None:
        # As listed: a plan that was made on the GPU's own host has the memory that the driver states.
        listed = devices.read_gpus(variant.root).get(gpu.name, gpu)
        inputs["data sheet"] = hashlib.sha256(listed.model_dump_json().encode()).hexdigest()
    return inputs


def main() -> None:
    """Read a request from standard input, and write each plan as a JSON line to the descriptor in the argument."""
    request = _Request.model_validate_json(sys.stdin.read())
    try:
        if request.gpu is None:
            simulated_gpu.require_cpu_build()
        else:
            simulated_gpu.simulate_gpu(request.gpu, request.gpus)
    except SlimqwenError as error:
        sys.exit(f"error: {error}")
    # Without this, importing Humming starts two builds in processes that outlive the rehearsal.
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    with (
        os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers,
        tempfile.TemporaryFile("w+") as imported,
    ):
        for number, subject in enumerate(request.subjects):
            if number == 1:
                imported.seek(0)
                _import(imported.read().split())
            if os.fork() == 0:
                answers.write(_rehearse(subject, request).model_dump_json() + "\n")
                imported.write("\n".join(sys.modules) if number == 0 else "")
                for file in (answers, imported, sys.stdout, sys.stderr):
                    file.flush()
                os._exit(0)  # skips vLLM's clean-up, which needs a real GPU
            os.wait()
    os._exit(0)


def _import(modules: Sequence[str]) -> None:
    """Import what the first rehearsal did; what it made itself, such as modules of generated code, it makes again."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def _rehearse(subject: _Subject, request: _Request) -> Plan:
    """Take the variant through vLLM's start-up, up to the first kernel."""
    facts: dict[str, Any] = {
        "variant": subject.variant,
        "gpu": request.gpu.name if request.gpu else CPU,
        "compute_capability": request.gpu.compute_capability if request.gpu else None,
        "planned": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "vllm": importlib.metadata.version("vllm"),
        "checkpoint": "",
    }
    step = "configuration"
    with _blocked_network(), tempfile.TemporaryDirectory(prefix="slimqwen-plan-") as folder:
        try:
            variant = subject.load(request.root)
            facts["inputs"] = digest_inputs(variant, request.gpu)
            variant, facts["checkpoint"] = _with_checkpoint(variant, Path(folder))
            command = ServerCommand.resolve(variant, platform="cpu" if request.gpu is None else "cuda")
            facts["flags"] = decisive_flags(command)
            environment = command.process_environment()
            os.environ.clear()
            os.environ.update(environment, HUMMING_DISABLE_PARALLEL_BUILD="1")
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
            facts["error"] = _describe_refusal(error)[:1000]
            logging.getLogger(__name__).exception("rehearsal of %s", subject.variant)
    return Plan(**facts)


def _describe_refusal(error: Exception) -> str:
    """The error in a line; of a refused field its message alone, without pydantic's frame."""
    message: object = error
    if isinstance(error, ValidationError):
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
    return " ".join(f"{type(error).__name__}: {message}".split())


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
