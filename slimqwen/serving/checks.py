"""Checks before a start: what vLLM would die of is refused in one line, before vLLM loads anything."""

import contextlib
import os
import shutil
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slimqwen import checkpoint, host
from slimqwen.checkpoint.tensors import list_tensors, weight_files
from slimqwen.checkpoint.weights import has_mtp_head, refuse_without_cpu_kernel
from slimqwen.models.families import unshared_heads
from slimqwen.serving import chat_template, gpu
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.variant import ConfigError, Variant, making_command
from slimqwen.vllm_plugin import registration
from slimqwen.vllm_plugin.api_key import LOOPBACK, is_loopback

_ENGINE_OVERHEAD_BYTES = 1536 * 2**20
"""Memory of vLLM's imports and activations on a CPU, bytes: 1.1 GiB resident were measured, the rest is a margin."""

_SHARED_MEMORY = Path("/dev/shm")
_QUEUE_BYTES = 240 * 2**20
"""Free space of /dev/shm that vLLM wants for the queue of a worker, bytes (shm_broadcast.py: 10 times 24 MiB)."""

_LONGEST_SOCKET_PATH = 107
"""Bytes of the path of a Unix socket (unix(7): sun_path has 108, one of them its end)."""


@dataclass(frozen=True)
class Trouble:
    """Why a start is refused although vLLM would accept the command.

    Attributes:
        description: what happens; the message puts the variant's name before it.
        cure: what to do instead.
        evidence: the record, issue or test that shows it.
    """

    description: str
    cure: str
    evidence: str


def check_command(command: ServerCommand, trouble: Iterable[Trouble] = ()) -> None:
    """Refuse a command that cannot serve.

    Args:
        trouble: known trouble with this start; the first is refused unless ALLOW_UNSAFE=1.

    Raises:
        ServingError: no GPU, known trouble, too long a context, heads that cannot be divided between the GPUs, a chat
            template that does not render, a required compile cache that does not fit, too little memory or shared
            memory, a port or Unix socket that cannot be bound, an API key that protects nothing, no key for an address
            that others reach, a certificate that cannot be read.
        slimqwen.checkpoint.MissingCheckpointError, CorruptCheckpointError: weights are missing, cut short or
            incomplete.
        slimqwen.vllm_plugin.errors.PluginError: vLLM would serve without this package's limits and routes.
        ConfigError: VLLM_CPU_KVCACHE_SPACE is no whole number.
    """
    _check_api_key()
    check_address(command)
    check_remote_code(command)
    check_platform(command.variant, command.platform)
    check_weights(command)
    refuse_trouble(command, trouble)
    _check_requests(command)
    _check_cache(command)
    check_memory(command)
    _check_shared_memory(command)
    _check_tls(command)
    _check_port(command)


def check_platform(variant: Variant, platform: host.Platform | None) -> None:
    """Refuse a platform that this machine does not have. As it needs no flags, it is the first check of a start.

    Args:
        platform: cpu or cuda; None for the variant's PLATFORM, else this machine's.

    Raises:
        ServingError: a GPU is needed and there is none, or the installed vLLM is for GPUs.
    """
    here, is_gpu_build = host.detect(), host.is_gpu_build()
    if here == "cpu" and is_gpu_build:
        raise ServingError(
            "the installed vLLM is for GPUs and sees none; check the driver with `nvidia-smi`, start a container with "
            "`docker run --gpus all`, or on a host without GPU run `make install PLATFORM=cpu`"
        )
    if here == "cpu" and (platform or variant.platform) == "cuda":
        raise ServingError(
            f"{variant.name} is for GPUs, and there is none here; serve it on a GPU host, or on this CPU by `slimqwen "
            f"serve {variant.name} --platform cpu`"
        )
    if here == "cuda" and platform == "cpu" and is_gpu_build:
        raise ServingError(
            "the installed vLLM is for GPUs and serves on no CPU; leave out --platform, or run `make install "
            "PLATFORM=cpu` in another checkout"
        )


def check_weights(command: ServerCommand) -> None:
    """Refuse a checkpoint that vLLM cannot serve with the command's flags; reads only headers of weight files.

    Raises:
        ServingError: too long a context, drafts without an MTP head, or heads that cannot be divided between the GPUs.
        slimqwen.checkpoint.UnsupportedFormatError: a CPU without a kernel for the weights.
        slimqwen.checkpoint.MissingCheckpointError, CorruptCheckpointError: weights are missing, cut short or
            incomplete.
    """
    weights = command.variant.weights
    checkpoint.check_folder(weights, cure=making_command(weights, command.variant.root))
    if command.platform == "cpu":
        refuse_without_cpu_kernel(weights)
    _check_drafts(command)
    _check_heads(command)
    _check_context(command)


def _check_heads(command: ServerCommand) -> None:
    gpus = int(command.flags.get("tensor-parallel-size", 1))
    text = checkpoint.text_config(checkpoint.read_config(command.variant.weights))
    if heads := unshared_heads(text, gpus):
        raise ServingError(
            f"{command.variant.name}: {gpus} GPUs cannot share {heads}; set VLLM_TENSOR_PARALLEL_SIZE to a divisor"
        )


def _check_drafts(command: ServerCommand) -> None:
    speculation = command.flags.get("speculative-config") or {}
    weights = command.variant.weights
    if speculation.get("method") != "mtp" or speculation.get("model"):
        return
    if not has_mtp_head(weights):
        raise ServingError(
            f"{command.variant.name} drafts with an MTP head, but {weights} has none; remove VLLM_SPECULATIVE_CONFIG "
            "from its config.env, or use a checkpoint with mtp.* tensors"
        )


def _check_api_key() -> None:
    key = os.environ.get("VLLM_API_KEY")
    # With an empty key vLLM serves without one, and no client sends white space around a key.
    if key is not None and (not key or key != key.strip()):
        raise ServingError(
            "VLLM_API_KEY is empty or has white space around it; change it, or unset it to serve without a key"
        )


def check_address(command: ServerCommand) -> None:
    """Check that a server without an API key listens for this machine only, unless ALLOW_OPEN=1.

    Raises:
        ServingError: other machines would reach it.
    """
    is_own = "uds" in command.flags or is_loopback(command.host)
    if is_own or os.environ.get("VLLM_API_KEY") or command.variant.allow_open:
        return
    setting = command.variant.settings.get("VLLM_HOST")
    location = f"{setting.location}: " if setting and setting.line else ""  # --host has no line
    raise ServingError(
        f"{location}without a key everyone who reaches {command.host} could use {command.variant.name}; set "
        f"VLLM_API_KEY in the shell, or VLLM_HOST={LOOPBACK}, or set ALLOW_OPEN=1 to serve anyway"
    )


def check_remote_code(command: ServerCommand) -> None:
    """Check that code of a checkpoint runs only where a person allows it.

    Raises:
        ServingError: VLLM_TRUST_REMOTE_CODE is set without ALLOW_REMOTE_CODE=1.
    """
    variant = command.variant
    if command.flags.get("trust-remote-code") and "ALLOW_REMOTE_CODE" not in variant.settings:
        setting = variant.settings.get("VLLM_TRUST_REMOTE_CODE")
        location = f"{setting.location}: " if setting else ""
        raise ServingError(
            f"{location}Python code in {variant.weights.name} would run as you; read it, then add ALLOW_REMOTE_CODE=1 "
            f"to the config.env of {variant.name}, or remove VLLM_TRUST_REMOTE_CODE"
        )


def refuse_trouble(command: ServerCommand, trouble: Iterable[Trouble]) -> None:
    """Refuse a start that is known to die or to give wrong tokens, unless ALLOW_UNSAFE=1.

    Raises:
        ServingError: there is known trouble; the message names the first, its evidence and its cure.
    """
    if command.variant.allow_unsafe:
        return
    first = next(iter(trouble), None)
    if first is not None:
        raise ServingError(
            f"{command.variant.name} {first.description}; {first.evidence} shows it; {first.cure}, or set "
            "ALLOW_UNSAFE=1 to serve anyway"
        )


def _check_context(command: ServerCommand) -> None:
    try:
        command.max_model_len  # noqa: B018  (the property raises what vLLM would refuse)
    except ServingError as error:
        settings = command.variant.settings
        setting = settings.get("VLLM_MAX_MODEL_LEN") or settings.get("VLLM_HF_OVERRIDES")
        raise ServingError(f"{setting.location if setting else command.variant.name}: {error}") from None


def _check_requests(command: ServerCommand) -> None:
    """Check the plugins, the thinking budget and the chat template that every request goes through."""
    variant, flags = command.variant, command.flags
    registration.require_plugins(command.environment)
    budget = variant.settings.get("THINKING_TOKEN_BUDGET")
    if budget is not None and not {"reasoning-parser", "reasoning-config"} & flags.keys():
        raise ServingError(
            f"{budget.location}: THINKING_TOKEN_BUDGET={budget.value}, but without a reasoning parser vLLM cannot tell "
            "thoughts from text; add VLLM_REASONING_PARSER=qwen3"
        )
    # A checkpoint without a template can serve completions, but no chats.
    if templates := chat_template.served_templates(variant, flags):
        arguments = flags.get("default-chat-template-kwargs", {})
        form = str(flags.get("chat-template-content-format", "auto"))
        chat_template.check_templates(templates, variant.weights, arguments, form)


def _check_cache(command: ServerCommand) -> None:
    cache = command.cache
    if cache is None or not cache.required:
        return
    if cache.baked is None:
        reason = f"{command.variant.weights} has no baked compile cache"
    elif cache.differences:
        reason = f"the baked compile cache cannot be loaded here: {'; '.join(cache.differences)}"
    else:
        return
    raise ServingError(
        f"REQUIRE_BAKED=1, but {reason}; end the recipe with the stage bake_cache and run "
        f"`slimqwen recipe run --variant {command.variant.name}` on this machine"
    )


def check_memory(command: ServerCommand) -> None:
    """Check that weights and KV cache fit into this machine's free memory.

    On a GPU that is the share that --gpu-memory-utilization requests. If too little is free there, it waits until free
    memory stops growing, because memory of ended processes is freed late.

    Raises:
        ServingError: they do not fit.
    """
    weights = sum(file.stat().st_size for file in weight_files(command.variant.weights))
    if command.platform == "cpu":
        weights += widening_bytes(command.variant.weights)
        kv_cache = _kv_cache_gib(command) * 2**30
        needed = weights + kv_cache + _ENGINE_OVERHEAD_BYTES
        available, total = host.available_memory(), host.total_memory()
        parts = f"weights {_gib(weights)}, KV cache {_gib(kv_cache)}, engine {_gib(_ENGINE_OVERHEAD_BYTES)}"
        cure = "free some memory or lower VLLM_CPU_KVCACHE_SPACE"
    else:
        available, total = gpu.free_and_total_memory()
        share = float(command.flags.get("gpu-memory-utilization", 0.92))
        for flag in ("tensor-parallel-size", "pipeline-parallel-size"):
            weights //= int(command.flags.get(flag, 1))
        needed = max(weights, int(share * total))
        parts = f"weights {_gib(weights)}, {share:.0%} of the GPU's {_gib(total)} requested"
        cure = "end other programs that use the GPU or lower VLLM_GPU_MEMORY_UTILIZATION"
        if weights > share * total:
            needed, cure = weights, "serve a smaller variant or use a larger GPU"
            available = int(share * total)
        elif needed > available:
            available = gpu.await_free_memory(needed)
    if needed > available:
        raise ServingError(
            f"{command.variant.name} needs {_gib(needed)} ({parts}), but only {_gib(available)} of "
            f"{_gib(total)} is free; {cure}"
        )


def _check_shared_memory(command: ServerCommand) -> None:
    """Refuse a /dev/shm that is too small for vLLM's worker processes, as the 64 MB of a container are."""
    flags = command.flags
    ranks = int(flags.get("tensor-parallel-size", 1)) * int(flags.get("pipeline-parallel-size", 1))
    # One GPU is served by the engine's own process, a CPU never is.
    if (command.platform == "cuda" and ranks == 1) or not _SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < _QUEUE_BYTES:
        raise ServingError(
            f"{command.variant.name} needs {_QUEUE_BYTES >> 20} MiB of {_SHARED_MEMORY}, and {free >> 20} MiB are "
            "free; start the container with `docker run --shm-size 1g`, or enlarge it as root: "
            f"`mount -o remount,size=1g {_SHARED_MEMORY}`"
        )


def widening_bytes(folder: Path) -> int:
    """Bytes that a CPU needs for 16-bit matrices beyond their size on disk: the patch `widened_linears` widens them."""
    import torch

    from slimqwen.vllm_plugin.patches.cpu.widened_linears import weight_bytes

    stored = list_tensors(folder).values()
    added = weight_bytes(torch.bfloat16) - torch.bfloat16.itemsize
    return sum(
        added * info.elements for info in stored if info.dtype in ("BF16", "F16") and len(info.shape) == 2
    )


def _kv_cache_gib(command: ServerCommand) -> int:
    variable = "VLLM_CPU_KVCACHE_SPACE"
    text = command.environment[variable]
    try:
        return int(text)
    except ValueError:
        location = command.variant.settings[variable].location
        raise ConfigError(f"{location}: {variable}={text}: vLLM takes whole GiB; write 4 for 4 GiB") from None


def _check_tls(command: ServerCommand) -> None:
    """Read certificate and key now, because vLLM reads them only after it has loaded the model."""
    root, flags = command.variant.root, command.flags
    certificate, key = (
        root / flags[flag] if flags.get(flag) else None for flag in ("ssl-certfile", "ssl-keyfile")
    )
    if certificate is key is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without this password OpenSSL would ask on the terminal for that of an encrypted key.
        context.load_cert_chain(certificate or "", key, password=lambda: "")
        if flags.get("ssl-ca-certs"):
            context.load_verify_locations(root / flags["ssl-ca-certs"])
    except OSError as error:
        raise ServingError(
            f"{command.variant.name} cannot serve TLS with the files of its config.env ({error}); correct "
            "VLLM_SSL_CERTFILE, VLLM_SSL_KEYFILE and VLLM_SSL_CA_CERTS"
        ) from error


def _check_port(command: ServerCommand) -> None:
    if "uds" in command.flags:  # vLLM then listens on no port
        _check_socket(command)
        return
    family = socket.AF_INET6 if ":" in command.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((command.host, command.port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ServingError(
                f"cannot listen on {command.host}:{command.port} ({reason}); end the program that listens there, or "
                f"choose another port with --port or with VLLM_PORT in the config.env of {command.variant.name}"
            ) from None


def _check_socket(command: ServerCommand) -> None:
    """Refuse a Unix socket that vLLM cannot bind, and remove one that an ended server left, as vLLM leaves each."""
    path, setting = str(command.flags["uds"]), command.variant.settings["VLLM_UDS"]
    fault = ""
    with contextlib.chdir(command.variant.root), socket.socket(socket.AF_UNIX) as probe:  # vLLM's folder, too
        file = Path(path)
        if (length := len(os.fsencode(path))) > _LONGEST_SOCKET_PATH:
            fault = f"a socket's path has at most {_LONGEST_SOCKET_PATH} bytes, this one {length}; choose a shorter one"
        elif not os.access(file.parent, os.W_OK | os.X_OK):
            fault = "its folder is missing or not writable; make it, or choose another"
        elif file.exists() and not file.is_socket():
            fault = "something else has that name; choose another"
        elif file.exists():
            try:
                probe.connect(path)
                fault = "a server listens there; end it, or choose another path"
            except ConnectionRefusedError:
                file.unlink()
            except OSError as error:  # another user's, or of another type
                fault = f"{error.strerror}; choose another path"
    if fault:
        raise ServingError(f"{setting.location}: VLLM_UDS={path}: {fault}")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
