"""A variant -> the command that serves it, the checks before it, and a vLLM server that lives for a `with` block.

One code path builds the command for `make serve`, for the evaluations and for the image, so that all of them
serve the same thing. Nothing stands between a client and vLLM: `scripts/serve.py` execs the command.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from slimqwen import checkpoint
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent
from slimqwen.serving import (
    baked_cache,
    chat_template,
    compile_watch,
    endpoints,
    guard,
    policy,
    unsafe_engines,
)
from slimqwen.serving import flags as vllm_flags
from slimqwen.serving import platform as machine
from slimqwen.variant import Variant, making_command

VARIANT_VARIABLE = "SLIMQWEN_VARIANT"
"""Names, in a server's environment, the variant that it serves."""

_ENTRY = ("-m", "vllm.entrypoints.launchers.api_server.entry")
# No compiled graph depends on it, so it is not among the command's flags.
_MIDDLEWARE = ("--middleware", "slimqwen.serving.readiness.Readiness")
_PLUGINS = ("slimqwen_engine_fixes", "slimqwen_compile_watch", endpoints.PLUGIN)
_CPU_KV_CACHE_GIB = 4  # where config.env names none
_ENGINE_OVERHEAD_BYTES = int(1.5 * 2**30)  # imports and activations of vLLM on a CPU, seen: 1.1 GiB resident


class PlatformError(SlimqwenError):
    """The variant asks for a device that this machine lacks."""


class PortInUseError(SlimqwenError):
    """Another process listens where the server should."""


class MemoryShortError(SlimqwenError):
    """The weights and the KV cache do not fit."""


class ContextTooLongError(SlimqwenError):
    """--max-model-len exceeds what the checkpoint was trained for."""


class ApiKeyError(SlimqwenError):
    """VLLM_API_KEY is set to what protects nothing, or to what no client will send."""


class ThinkingBudgetError(SlimqwenError):
    """vLLM is not told what thinking looks like, and could not end it."""


class ServerFailedError(SlimqwenError):
    """vLLM ended, or did not become ready in time; names the log."""


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A line of a config.env that a CPU leaves out (instead is None) or replaces."""

    key: str
    value: str
    instead: str | None
    why: str


@dataclasses.dataclass(frozen=True)
class CompileCache:
    """Where a server that compiles keeps what it compiled.

    Attributes:
        root: the folder, one for each set of flags or each baked archive.
        baked: the manifest of the archive beside the checkpoint, None where there is none.
        differences: what forbids that archive here, in words.
        required: refuse to start without it.
    """

    root: Path
    baked: baked_cache.BakedCache | None
    differences: tuple[str, ...]
    required: bool

    @property
    def usable(self) -> baked_cache.BakedCache | None:
        """The manifest, where the archive is for this machine and these flags."""
        return None if self.differences else self.baked


@dataclasses.dataclass(frozen=True)
class ServerCommand:
    """What runs for a variant on a platform.

    Attributes:
        argv: the whole command line, the Python interpreter first.
        environment: the variables added to the caller's environment.
        flags: values by flag name, after the platform's table.
        left_out: what the platform's table took away.
        variables: the part of environment that graphs may depend on: what the config.env gives, and vLLM's plugins.
        cache: of compiled graphs, None where nothing is compiled.
        allow_unsafe: serve even in engine modes that were found unsafe.
    """

    variant: Variant
    platform: machine.Platform
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    flags: Mapping[str, Any]
    left_out: tuple[LeftOut, ...]
    variables: Mapping[str, str]
    cache: CompileCache | None
    allow_unsafe: bool

    @property
    def host(self) -> str:
        """The address to listen on; vLLM's own default is every interface."""
        return str(self.flags.get("host", "0.0.0.0"))

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.flags["port"])

    @property
    def max_model_len(self) -> int:
        """Tokens that it is served with, prompt and output together: the flag's, else the checkpoint's positions."""
        config = checkpoint.text_config(checkpoint.read_config(self.variant.weights))
        positions = int(config["max_position_embeddings"])
        asked = self.flags.get("max-model-len")
        return min(asked, positions) if isinstance(asked, int) and asked > 0 else positions

    def as_shell(self) -> str:
        """The command as a person would type it: one variable, flag or word with its value per line."""
        lines = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.environment.items())]
        words = list(self.argv)
        head = " ".join(shlex.quote(word) for word in words[:3])
        lines.append(head)
        for word in words[3:]:
            if word.startswith("--"):
                lines.append("    " + word)
            else:
                lines[-1] += " " + shlex.quote(word)
        return " \\\n".join(lines)

    def process_environment(self) -> dict[str, str]:
        """The environment of the vLLM process.

        Stray VLLM_* variables of the calling shell would change what is measured (VLLM_PLUGINS even drops the
        engine fixes), so only the API key passes.
        """
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("VLLM_") or key == "VLLM_API_KEY"
        }
        return inherited | dict(self.environment) | {VARIANT_VARIABLE: self.variant.name}

    def with_cache_root(self, root: Path) -> "ServerCommand":
        """The same command with an unbaked compile cache in another place: for baking, and to time a cold start."""
        assert self.cache is not None
        cache = CompileCache(root, None, (), required=False)
        return dataclasses.replace(
            self,
            cache=cache,
            environment=MappingProxyType({**self.environment, **_cache_environment(cache)}),
        )

    def without_middleware(self) -> "ServerCommand":
        """The same command for bare vLLM, ready while cold: to time what is added to it."""
        plugins = self.environment["VLLM_PLUGINS"].split(",")
        left = ",".join(name for name in plugins if name != endpoints.PLUGIN)
        return dataclasses.replace(
            self,
            argv=self.argv[: -len(_MIDDLEWARE)],
            environment=MappingProxyType({**self.environment, "VLLM_PLUGINS": left}),
        )


@dataclasses.dataclass(frozen=True)
class RunningServer:
    """A vLLM server that answered /health.

    Attributes:
        base_url: `http://127.0.0.1:<port>`, without a trailing slash.
        model: the served model name.
        weights: the checkpoint folder it serves.
        pid: the API server's process.
        log: where its output goes, None for a server that somebody else started.
    """

    command: ServerCommand
    base_url: str
    model: str
    weights: Path
    pid: int
    log: Path | None


def resolve(
    variant: Variant,
    *,
    port: int | None = None,
    platform: machine.Platform | None = None,
    require_baked: bool = False,
    allow_unsafe: bool = False,
) -> ServerCommand:
    """Build the command that serves a variant.

    Args:
        port: overrides VLLM_PORT.
        platform: what to resolve for; by default what the variant's PLATFORM says, else this machine's.
        require_baked: refuse to serve without its baked compile cache, as REQUIRE_BAKED=1 does.
        allow_unsafe: serve even in engine modes that were found unsafe, as ALLOW_UNSAFE=1 does.

    Raises:
        slimqwen.serving.flags.FlagError: a line that vLLM would not take.
        slimqwen.serving.baked_cache.BakedCacheError: the manifest of a baked cache is unreadable.
    """
    platform = platform or variant.platform or machine.detect()
    resolved = vllm_flags.resolve(variant)
    chosen = {name: flag.value for name, flag in resolved.flags.items()}
    argv = {name: flag.argv for name, flag in resolved.flags.items()}
    left_out: list[LeftOut] = []
    if platform == "cpu":
        left_out = _fit_to_cpu(resolved.flags, chosen, argv)
        if "enforce-eager" not in chosen:
            chosen["enforce-eager"], argv["enforce-eager"] = True, ("--enforce-eager",)
    chosen["model"], argv["model"] = str(variant.weights), ("--model", str(variant.weights))
    chosen["port"] = port if port is not None else chosen.get("port", 8000)
    argv["port"] = ("--port", str(chosen["port"]))
    # Unset, vLLM loads no plugin that adds routes; set, its compile key holds the list.
    variables = {"VLLM_PLUGINS": ",".join(_PLUGINS), **resolved.environment}
    required = require_baked or variant.require_baked
    cache = None
    if not chosen.get("enforce-eager"):
        cache = _compile_cache(variant, platform, chosen, variables, required)
    elif required:
        raise baked_cache.BakedCacheError(
            f"{variant.name} compiles nothing and a baked compile cache is required; set VLLM_ENFORCE_EAGER=0 in its "
            "config.env, or do without REQUIRE_BAKED"
        )
    environment = _environment(variant, platform, cache) | variables
    return ServerCommand(
        variant=variant,
        platform=platform,
        argv=(sys.executable, *_ENTRY, *(word for words in argv.values() for word in words), *_MIDDLEWARE),
        environment=MappingProxyType(environment),
        flags=MappingProxyType(chosen),
        left_out=tuple(left_out),
        variables=MappingProxyType(variables),
        cache=cache,
        allow_unsafe=allow_unsafe or variant.allow_unsafe,
    )


def check(command: ServerCommand) -> None:
    """Refuse what vLLM would die of, in one line and before it starts.

    Raises:
        PlatformError: no GPU for a command that needs one.
        slimqwen.checkpoint.MissingCheckpointError, CorruptCheckpointError: no weights, or cut short or incomplete.
        ContextTooLongError: more context than the checkpoint has positions for.
        MemoryShortError: weights and KV cache do not fit.
        PortInUseError: the port is taken.
        slimqwen.serving.baked_cache.BakedCacheError: a baked compile cache is required and not usable.
        slimqwen.serving.unsafe_engines.UnsafeEngineError: these engine modes were found unsafe on this platform.
        slimqwen.serving.endpoints.MissingPluginError: vLLM would serve without this package's limits and routes.
        slimqwen.serving.chat_template.ChatTemplateError: the chat template does not render.
        ThinkingBudgetError: a budget without a parser for thoughts.
        ApiKeyError: VLLM_API_KEY is empty, or has white space around it.
        slimqwen.serving.flags.FlagError: VLLM_CPU_KVCACHE_SPACE is no whole number.
    """
    _check_key()
    variant = command.variant
    if command.platform == "cuda" and machine.detect() == "cpu":
        raise PlatformError(
            f"{variant.name} needs a GPU and there is none here; serve it on a GPU host, or try PLATFORM=cpu"
        )
    checkpoint.check(variant.weights, cure=making_command(variant.weights, variant.root))
    _check_modes(command)
    _check_context(command)
    _check_requests(command)
    _check_cache(command)
    _check_memory(command)
    _check_port(command)


def prepare(command: ServerCommand) -> None:
    """Check, and put the baked compile cache where vLLM looks for it.

    Raises:
        The errors of `check`.
        slimqwen.serving.baked_cache.BakedCacheError: the archive is damaged.
    """
    check(command)
    if command.cache is not None and command.cache.usable:
        baked_cache.restore(command.variant.weights, command.cache.usable, command.cache.root)


@contextlib.contextmanager
def serving(
    command: ServerCommand, *, log: Path, timeout_s: float = 900, progress: Progress = silent
) -> Iterator[RunningServer]:
    """Run a variant's server for the length of a `with` block.

    Args:
        log: the file that receives everything vLLM prints.
        timeout_s: how long it may take until /health answers 200.
        progress: told the seconds since the start; the total is not known.

    Raises:
        ServerFailedError: vLLM ended or was not ready in time; the message quotes its log's last error.
        The errors of `prepare`.
    """
    prepare(command)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = command.process_environment()
    with (
        log.open("wb") as output,
        guard.guarded(
            command.argv, environment=environment, folder=command.variant.root, output=output
        ) as server,
    ):
        _wait_until_ready(server, command, log, timeout_s, progress)
        yield _described(command, server.pid, log)


def find_running(command: ServerCommand) -> RunningServer | None:
    """Find a server on the command's port that runs exactly this command, environment included, and is ready.

    Returns None where the port is free, or taken by anything else, a server that warms up or drains included.
    """
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr[1:2] != (command.port,):
            continue
        with contextlib.suppress(psutil.Error, httpx.HTTPError):
            process = psutil.Process(connection.pid)
            running = process.environ()
            # Whether it was required changes nothing of how a graph was come by.
            wanted = {
                key: value for key, value in command.environment.items() if key != compile_watch.VARIABLE
            }
            if process.cmdline()[1:] == list(command.argv[1:]) and all(
                running.get(key) == value for key, value in wanted.items()
            ):
                ready = httpx.get(f"{_url(command)}/health", timeout=5, trust_env=False)
                return _described(command, process.pid, None) if ready.status_code == httpx.codes.OK else None
    return None


def authorization() -> dict[str, str]:
    """The header that a server started under VLLM_API_KEY asks for; empty without one."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fit_to_cpu(
    given: Mapping[str, vllm_flags.Flag], chosen: dict[str, Any], argv: dict[str, tuple[str, ...]]
) -> list[LeftOut]:
    left_out = []
    for row in machine.GPU_ONLY:
        if row.flag not in given or not row.applies(given[row.flag].value, chosen):
            continue
        setting = given[row.flag].setting
        left_out.append(LeftOut(setting.key, setting.value, row.instead, row.why))
        del chosen[row.flag], argv[row.flag]
        if row.instead is not None:
            flag = vllm_flags.parse(dataclasses.replace(setting, value=row.instead))
            chosen[row.flag], argv[row.flag] = flag.value, flag.argv
    return left_out


def _compile_cache(
    variant: Variant,
    platform: machine.Platform,
    chosen: Mapping[str, Any],
    environment: Mapping[str, str],
    required: bool,
) -> CompileCache:
    baked = baked_cache.read(variant.weights)
    different: tuple[str, ...] = ()
    # vLLM's own cache key has left flags out before (the draft depth), so each set of flags has its own root.
    what = {"model": str(variant.weights), **baked_cache.decisive(chosen)}
    name = f"{variant.name}-{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]}"
    if baked is not None:
        facts = baked_cache.this_machine(platform)
        different = tuple(baked_cache.differences(baked, facts, chosen, environment))
        if not different:
            name = f"baked-{baked.archive_sha256[:16]}"
    return CompileCache(variant.root / ".cache" / name, baked, different, required)


def _environment(variant: Variant, platform: machine.Platform, cache: CompileCache | None) -> dict[str, str]:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(variant.root / ".cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(variant.root / ".cache" / "inductor"),
        policy.VARIABLE: policy.of(variant).model_dump_json(),
    }
    if cache is not None:
        environment |= _cache_environment(cache)
    if platform == "cpu":
        environment["OMP_NUM_THREADS"] = str(machine.physical_cores())
        # Without it vLLM takes 0.92 of the machine's memory.
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(_CPU_KV_CACHE_GIB)
    return environment


def _cache_environment(cache: CompileCache) -> dict[str, str]:
    wanted = compile_watch.Wanted(required=cache.required)
    baked = cache.usable
    if baked is not None and baked.device and baked.device != baked_cache.this_device("cuda"):
        capability = baked.machine["compute capability"]
        wanted = wanted.model_copy(update={"device": baked.device, "capability": capability})
    return {
        "VLLM_CACHE_ROOT": str(cache.root / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache.root / "inductor"),
        compile_watch.VARIABLE: wanted.model_dump_json(),
    }


def _check_key() -> None:
    key = os.environ.get("VLLM_API_KEY")
    if key is None:
        return
    if not key.strip():
        # vLLM would ask nobody for it.
        raise ApiKeyError(
            "VLLM_API_KEY is set and empty; give it a value, or unset it to serve without a key"
        )
    if key != key.strip():
        raise ApiKeyError("VLLM_API_KEY has white space around it, which no client sends; take it away")


def _check_modes(command: ServerCommand) -> None:
    if command.allow_unsafe:
        return
    variant = command.variant
    found = unsafe_engines.find(variant.root, variant.weights, command.flags, command.platform)
    if found is not None:
        raise unsafe_engines.UnsafeEngineError(
            f"{variant.name} would run in modes found unsafe ({found.modes}; {found.build}): {found.reason}; "
            f"{found.record} shows it; change one of these modes in its config.env, look again by "
            f"`make check-engine VARIANT={variant.name}`, or serve all the same with ALLOW_UNSAFE=1"
        )


def _check_cache(command: ServerCommand) -> None:
    cache = command.cache
    if cache is None or not cache.required:
        return
    compile_watch.require_registered(command.environment)
    if cache.usable:
        return
    name = command.variant.name
    if cache.baked is None:
        raise baked_cache.BakedCacheError(
            f"REQUIRE_BAKED=1 and {command.variant.weights} has no baked compile cache; end its recipe with the stage "
            f"bake_cache and run `make recipe VARIANT={name}`"
        )
    raise baked_cache.BakedCacheError(
        f"REQUIRE_BAKED=1 and the compile cache of {name} is for something else: {'; '.join(cache.differences)}; "
        f"`make recipe VARIANT={name}` bakes it for this"
    )


def _check_context(command: ServerCommand) -> None:
    config = json.loads((command.variant.weights / "config.json").read_text(encoding="utf-8"))
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    length = command.flags.get("max-model-len")
    if isinstance(positions, int) and isinstance(length, int) and length > positions:
        raise ContextTooLongError(
            f"{command.variant.settings['VLLM_MAX_MODEL_LEN'].place}: VLLM_MAX_MODEL_LEN={length}, "
            f"but the checkpoint has {positions} positions; set at most {positions}"
        )


def _check_requests(command: ServerCommand) -> None:
    """What requests go through before the model sees them."""
    variant, flags = command.variant, command.flags
    if command.argv[-len(_MIDDLEWARE) :] == _MIDDLEWARE:
        endpoints.require_registered(command.environment)
    budget = variant.settings.get("THINKING_TOKEN_BUDGET")
    if budget is not None and not {"reasoning-parser", "reasoning-config"} & flags.keys():
        raise ThinkingBudgetError(
            f"{budget.place}: THINKING_TOKEN_BUDGET={budget.value}, and vLLM does not know what thinking looks like; "
            "add VLLM_REASONING_PARSER=qwen3"
        )
    own = variant.weights / "chat_template.jinja"
    file = variant.root / flags["chat-template"] if "chat-template" in flags else own
    # A checkpoint without one serves completions alone.
    if file != own or own.is_file():
        chat_template.check(file, variant.weights, flags.get("default-chat-template-kwargs", {}))


def _check_memory(command: ServerCommand) -> None:
    weights = sum(file.stat().st_size for file in command.variant.weights.glob("*.safetensors"))
    if command.platform == "cpu":
        kv_cache = _whole_gib(command, "VLLM_CPU_KVCACHE_SPACE") * 2**30
        needed = weights + kv_cache + _ENGINE_OVERHEAD_BYTES
        available = psutil.virtual_memory().available
        parts = f"weights {_gib(weights)}, KV cache {_gib(kv_cache)}, engine {_gib(_ENGINE_OVERHEAD_BYTES)}"
        cure = "free some memory or lower VLLM_CPU_KVCACHE_SPACE"
    else:
        import torch

        available, total = torch.cuda.mem_get_info()
        share = float(command.flags.get("gpu-memory-utilization", 0.92))
        for flag in ("tensor-parallel-size", "pipeline-parallel-size"):
            weights //= int(command.flags.get(flag, 1))
        needed = max(weights, int(share * total))
        parts = f"weights {_gib(weights)}, {share:.0%} of the GPU's {_gib(total)} asked for"
        cure = "end what else uses the GPU or lower VLLM_GPU_MEMORY_UTILIZATION"
        if weights > share * total:
            needed, cure = weights, "take a smaller variant or a larger GPU"
            available = int(share * total)
    if needed > available:
        raise MemoryShortError(
            f"{command.variant.name} needs {_gib(needed)} ({parts}) and {_gib(available)} is free; {cure}"
        )


def _whole_gib(command: ServerCommand, variable: str) -> int:
    text = command.environment[variable]
    try:
        return int(text)
    except ValueError:
        place = command.variant.settings[variable].place
        raise vllm_flags.FlagError(
            f"{place}: {variable}={text}: vLLM takes whole GiB; write 4 for 4 GiB"
        ) from None


def _check_port(command: ServerCommand) -> None:
    family = socket.AF_INET6 if ":" in command.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((command.host, command.port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise PortInUseError(
                f"cannot listen on {command.host}:{command.port} ({reason}); end what listens there, "
                f"or choose another port: make serve VARIANT={command.variant.name} PORT=8081"
            ) from None


def _wait_until_ready(
    process: guard.Server, command: ServerCommand, log: Path, timeout_s: float, progress: Progress
) -> None:
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < timeout_s:
        progress(f"start {command.variant.name}", elapsed, 0)
        if process.poll() is not None:
            raise ServerFailedError(
                f"vLLM ended with exit code {process.returncode} before it was ready: {_last_error(log)}; log: {log}"
            )
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{_url(command)}/health", timeout=2, trust_env=False).status_code == httpx.codes.OK:
                progress(f"start {command.variant.name}", elapsed, elapsed)
                return
        time.sleep(0.25)
    raise ServerFailedError(f"vLLM was not ready after {timeout_s:.0f} s: {_last_error(log)}; log: {log}")


def _described(command: ServerCommand, pid: int, log: Path | None) -> RunningServer:
    names = command.flags.get("served-model-name") or [str(command.variant.weights)]
    return RunningServer(command, _url(command), names[0], command.variant.weights, pid, log)


def _url(command: ServerCommand) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(command.host, command.host)
    return f"http://{host}:{command.port}"


def _last_error(log: Path) -> str:
    """The last line of the log that names an exception: what a person would scroll up for."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    # What was under way when the event loop ended says nothing of why it did.
    telling = [line for line in lines if re.search(r"(?<!Cancelled)Error", line) and "raise " not in line]
    return (telling or lines or ["it printed nothing"])[-1].rpartition("] ")[2].strip()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
