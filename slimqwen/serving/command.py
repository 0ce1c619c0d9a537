"""Server command: the flags and the environment with which vLLM serves a variant.

One code path builds the command for `slimqwen serve`, the evaluations and the image, so that all of them start the
same server. No process stands between a client and vLLM: `slimqwen serve` replaces itself with the command by exec.
"""

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimqwen import host
from slimqwen.checkpoint.tensors import computed_dtype
from slimqwen.host import Platform
from slimqwen.identity import digest_of
from slimqwen.identity.effects import decisive_flags
from slimqwen.serving import baked_cache, checked_lines, cpu_flags, cuda_toolkit
from slimqwen.serving import flags as vllm_flags
from slimqwen.serving.context_length import resolve_context
from slimqwen.serving.errors import ServingError
from slimqwen.variant import Variant
from slimqwen.vllm_plugin import api_server, engine_facts, policy, registration
from slimqwen.vllm_plugin.api_key import LOOPBACK
from slimqwen.vllm_plugin.patches.serving import compile_watch

# Passed to vLLM, but left out of `ServerCommand.flags`, because no compiled graph depends on them.
_OWN_CODE = (
    "--worker-extension-cls",
    f"{engine_facts.__name__}.{engine_facts.EngineFacts.__name__}",
    "--middleware",
    "slimqwen.vllm_plugin.readiness.Readiness",
)
_CPU_KV_CACHE_GIB = 4  # default if config.env sets no VLLM_CPU_KVCACHE_SPACE


@dataclasses.dataclass(frozen=True)
class PlatformChange:
    """A line of a config.env that serving on a CPU leaves out or gives another value.

    Attributes:
        key: key of the line.
        value: value in the config.env.
        replacement: value on a CPU; None if the line is left out.
        why: the reason, for the notice.
    """

    key: str
    value: str
    replacement: str | None
    why: str


@dataclasses.dataclass(frozen=True)
class CompileCache:
    """Compile cache of a server that compiles graphs.

    Attributes:
        root: cache folder, one per set of flags or per baked archive.
        baked: manifest of the archive beside the checkpoint; None without an archive.
        differences: reasons why the archive is not loaded: it does not fit this machine or these flags, or is not
            trusted.
        required: whether the server must not start unless the archive fits.
    """

    root: Path
    baked: baked_cache.BakedCache | None
    differences: tuple[str, ...]
    required: bool

    @property
    def usable(self) -> baked_cache.BakedCache | None:
        """The manifest of the archive, if a server may load it: it is trusted and fits machine and flags. Else None."""
        return None if self.differences else self.baked


@dataclasses.dataclass(frozen=True)
class ServerCommand:
    """The vLLM process that serves a variant on a platform.

    Attributes:
        variant: the variant that is served.
        platform: cpu or cuda.
        argv: whole command line, the Python interpreter first.
        environment: variables added to the caller's environment.
        flags: values by flag name, with `platform_changes` applied.
        platform_changes: lines of the config.env that a CPU leaves out or replaces.
        variables: the part of `environment` that compiled graphs may depend on: variables of the config.env, and the
            list of vLLM's plugins.
        cache: compile cache; None if nothing is compiled.
    """

    variant: Variant
    platform: Platform
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    flags: Mapping[str, Any]
    platform_changes: tuple[PlatformChange, ...]
    variables: Mapping[str, str]
    cache: CompileCache | None

    @classmethod
    def resolve(
        cls, variant: Variant, *, port: int | None = None, platform: Platform | None = None
    ) -> "ServerCommand":
        """Build the command that serves a variant.

        Args:
            port: TCP port instead of VLLM_PORT.
            platform: cpu or cuda; by default the variant's PLATFORM, else this machine's.

        Raises:
            ConfigError: vLLM would refuse a line.
            ServingError: the manifest of the baked cache is unreadable, or a baked cache is required although nothing
                is compiled.
        """
        platform = platform or variant.platform or host.detect()
        resolved = checked_lines.resolve(variant)
        flags = {name: flag.value for name, flag in resolved.flags.items()}
        argv = {name: flag.argv for name, flag in resolved.flags.items()}
        platform_changes: list[PlatformChange] = []
        if platform == "cpu":
            platform_changes = _fit_to_cpu(resolved.flags, flags, argv)
            if line := _bfloat16_of_float16(variant.weights, flags, argv):
                platform_changes.append(line)
            if "enforce-eager" not in flags:
                flags["enforce-eager"], argv["enforce-eager"] = True, ("--enforce-eager",)
        flags["model"], argv["model"] = str(variant.weights), ("--model", str(variant.weights))
        flags["port"] = port if port is not None else flags.get("port", 8000)
        argv["port"] = ("--port", str(flags["port"]))
        if not {"host", "uds"} & flags.keys():
            flags["host"], argv["host"] = LOOPBACK, ("--host", LOOPBACK)
        # Without VLLM_PLUGINS vLLM loads no plugin that adds routes; its compile key contains the list.
        variables = {"VLLM_PLUGINS": ",".join(registration.PLUGINS), **resolved.environment}
        cache = None
        if not flags.get("enforce-eager"):
            cache = _compile_cache(variant, platform, flags, variables)
        elif variant.require_baked:
            raise ServingError(
                f"REQUIRE_BAKED=1, but {variant.name} runs without compiled graphs; set VLLM_ENFORCE_EAGER=0 in its "
                "config.env, or remove REQUIRE_BAKED"
            )
        words = (word for of_flag in argv.values() for word in of_flag)
        return cls(
            variant=variant,
            platform=platform,
            argv=(sys.executable, "-m", api_server.__name__, *words, *_OWN_CODE),
            environment=MappingProxyType(_environment(variant, platform, cache, variables)),
            flags=MappingProxyType(flags),
            platform_changes=tuple(platform_changes),
            variables=MappingProxyType(variables),
            cache=cache,
        )

    @property
    def host(self) -> str:
        """Address that the server listens on."""
        return str(self.flags.get("host", LOOPBACK))

    @property
    def port(self) -> int:
        """TCP port."""
        return int(self.flags["port"])

    @property
    def client_host(self) -> str:
        """Address at which a client on this machine reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        """URL for a client on this host, without a trailing slash."""
        scheme = "https" if {"ssl-certfile", "ssl-keyfile"} & self.flags.keys() else "http"
        host = f"[{self.client_host}]" if ":" in self.client_host else self.client_host
        return f"{scheme}://{host}:{self.port}"

    @property
    def served_model_name(self) -> str:
        """Name of the model in requests: the first of --served-model-name, else the checkpoint's path."""
        names = self.flags.get("served-model-name") or [str(self.variant.weights)]
        return str(names[0])

    @property
    def max_model_len(self) -> int:
        """Context length in tokens, prompt and output together.

        Raises:
            ServingError: vLLM would refuse the context length.
        """
        return resolve_context(self.variant.weights, self.flags, self.variables)

    def as_shell(self) -> str:
        """The command as shell text, with one variable, or one flag and its value, per line."""
        lines = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.environment.items())]
        lines.append(shlex.join(self.argv[:3]))
        for word in self.argv[3:]:
            if word.startswith("--"):
                lines.append("    " + word)
            else:
                lines[-1] += " " + shlex.quote(word)
        return " \\\n".join(lines)

    def process_environment(self) -> dict[str, str]:
        """The whole environment of the vLLM process.

        Of the caller's VLLM_* and TORCHINDUCTOR_* variables only VLLM_API_KEY is passed on, because the others would
        change what is measured: VLLM_PLUGINS would even drop the patches, and an engine in this process sets some for
        its own compiler. On CUDA a host without nvcc gets the CUDA toolkit of this Python environment. On a CPU
        torch's OpenMP library is preloaded. A user without a home or a name gets both.

        Raises:
            ServingError: the CUDA toolkit cannot be composed.
        """
        inherited = {key: value for key, value in os.environ.items() if not host.is_stray(key)}
        if self.platform == "cpu":
            inherited |= host.preloaded_libraries(inherited)
        else:
            inherited |= cuda_toolkit.variables(self.variant.root / ".cache", inherited)
        inherited |= host.user_variables(inherited, self.variant.root)
        return inherited | dict(self.environment)

    def with_cache_root(self, root: Path) -> "ServerCommand":
        """The same command with a new compile cache in the folder `root`, to bake it or to time a cold start.

        Only for a command that compiles graphs, whose `cache` is not None.
        """
        assert self.cache is not None
        cache = CompileCache(root, None, (), required=False)
        environment = {**self.environment, **_cache_environment(cache, self.platform)}
        if self.platform == "cuda":
            # FlashInfer's own folder, below the home of the user, would have libraries of other starts.
            environment["FLASHINFER_WORKSPACE_BASE"] = str(root)
        return dataclasses.replace(self, environment=MappingProxyType(environment), cache=cache)

    def on_port(self) -> "ServerCommand":
        """The same command, listening on its TCP port instead of the Unix socket that config.env may name (VLLM_UDS).

        The clients of measurements, such as vLLM's own load generator, can only use ports. Unless config.env names a
        host, only this machine reaches the port.
        """
        if "uds" not in self.flags:
            return self
        flags = {"host": LOOPBACK, **self.flags}
        del flags["uds"]
        at = self.argv.index("--uds")
        host = () if "host" in self.flags else ("--host", LOOPBACK)
        argv = (*self.argv[:at], *host, *self.argv[at + 2 :])
        return dataclasses.replace(self, argv=argv, flags=MappingProxyType(flags))

    def compared_with_plan(self, expected: engine_facts.PlanExpectation) -> "ServerCommand":
        """The same command, for a server that compares its engine with the plan `expected` when it starts."""
        kept = self.variant.root / engine_facts.COMPARISONS / f"{self.variant.name}.json"
        expected = expected.model_copy(update={"result_file": str(kept)})
        plan = {engine_facts.VARIABLE: expected.model_dump_json()}
        return dataclasses.replace(self, environment=MappingProxyType({**self.environment, **plan}))


def _fit_to_cpu(
    resolved_flags: Mapping[str, vllm_flags.Flag], flags: dict[str, Any], argv: dict[str, tuple[str, ...]]
) -> list[PlatformChange]:
    platform_changes = []
    for row in cpu_flags.GPU_ONLY:
        if row.flag not in resolved_flags or not row.applies(resolved_flags[row.flag].value):
            continue
        setting = resolved_flags[row.flag].setting
        platform_changes.append(PlatformChange(setting.key, setting.value, row.instead, row.why))
        del flags[row.flag], argv[row.flag]
        if row.instead is not None:
            flag = vllm_flags.parse(dataclasses.replace(setting, value=row.instead))
            flags[row.flag], argv[row.flag] = flag.value, flag.argv
    return platform_changes


def _bfloat16_of_float16(
    weights: Path, flags: dict[str, Any], argv: dict[str, tuple[str, ...]]
) -> PlatformChange | None:
    """Set --dtype where vLLM would compute in the float16 of a checkpoint, of which Gated DeltaNet on a CPU dies."""
    if flags.get("dtype", "auto") != "auto" or not (weights / "config.json").is_file():
        return None
    if computed_dtype(weights) != "float16":
        return None
    flags["dtype"], argv["dtype"] = "bfloat16", ("--dtype", "bfloat16")
    return PlatformChange("VLLM_DTYPE", "auto, float16 of the checkpoint", "bfloat16", cpu_flags.NO_FLOAT16)


def _compile_cache(
    variant: Variant, platform: Platform, flags: Mapping[str, Any], variables: Mapping[str, str]
) -> CompileCache:
    baked = baked_cache.read_manifest(variant.weights)
    differences: tuple[str, ...] = ()
    # vLLM's own cache key has left out flags (num_speculative_tokens), so each set of flags has its own root.
    name = f"{variant.name}-{digest_of({'model': str(variant.weights), **decisive_flags(flags)})[:16]}"
    if baked is not None:
        facts = baked_cache.describe_machine(platform)
        differences = tuple(baked_cache.list_differences(baked, facts, flags, variables))
        if baked_cache.find_origin(variant.root, baked) is None:
            why = (
                "it is code that this workspace neither baked nor imported "
                f"(`slimqwen serve --variant {variant.name} --trust-cache {baked.archive_sha256}` imports it)"
            )
            differences = (why, *differences)
        if not differences:
            name = f"baked-{baked.archive_sha256[:16]}"
    return CompileCache(variant.root / ".cache" / name, baked, differences, variant.require_baked)


def _environment(
    variant: Variant, platform: Platform, cache: CompileCache | None, variables: Mapping[str, str]
) -> dict[str, str]:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(variant.root / ".cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(variant.root / ".cache" / "inductor"),
        policy.VARIABLE: policy.variant_policy(variant).model_dump_json(),
    }
    if cache is not None:
        environment |= _cache_environment(cache, platform)
    if platform == "cpu":
        environment["OMP_NUM_THREADS"] = str(host.physical_cores())
        # Kernels read the number of threads at run time, so that one compile cache fits any number of CPUs.
        environment["TORCHINDUCTOR_CPP_DYNAMIC_THREADS"] = "1"
        # Without this variable vLLM takes 0.92 of the machine's memory.
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(_CPU_KV_CACHE_GIB)
    return environment | dict(variables)


def _cache_environment(cache: CompileCache, platform: Platform) -> dict[str, str]:
    kernels = {"TRITON_CACHE_DIR": str(cache.root / baked_cache.KERNELS)} if platform == "cuda" else {}
    cache_policy = compile_watch.CachePolicy(
        required=cache.required,
        libraries=str(cache.root / baked_cache.LIBRARIES),
        kernels=kernels.get("TRITON_CACHE_DIR", ""),
    )
    return {
        "VLLM_CACHE_ROOT": str(cache.root / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache.root / "inductor"),
        compile_watch.VARIABLE: cache_policy.model_dump_json(),
        **kernels,
    }
