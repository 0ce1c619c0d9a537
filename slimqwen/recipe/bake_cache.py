"""The stage `bake_cache`: start the variant once as it will be served, and pack what vLLM compiled.

The checkpoint goes through unchanged, with the archive and its manifest beside it. One code path builds the command
here and for `make serve`. The stage ends with a second start from the packed archive, in another folder, that is not
allowed to compile: what does not hit is not published.
"""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import httpx
from pydantic import Field, ValidationInfo, field_validator

from slimqwen import checkpoint, variant
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts, Needs, Parameters, Stage
from slimqwen.serving import baked_cache, compile_watch, launch
from slimqwen.serving.baked_cache import BakedCacheError
from slimqwen.serving.platform import Platform
from slimqwen.variant import Setting, Variant

_ENGINE_BYTES = 4 * 2**30
"""Resident size of a server that compiles, measured at 2.6 GiB for a small model."""

_ARCHIVE_BYTES = 2**30
"""More than any archive seen: 2 MB for the embedded model on a CPU."""

_REQUESTS_AT_ONCE = 16

_DECIDE_NOTHING = frozenset(
    {
        "VLLM_MODEL",
        "VLLM_HOST",
        "VLLM_PORT",
        "VLLM_SERVED_MODEL_NAME",
        "SOURCE",
        "REVISION",
        "REQUIRE_BAKED",
        "REQUIRE_WARMUP",
        "MAX_BODY_BYTES",
        "THINKING_TOKEN_BUDGET",
    }
)


class BakeCacheParameters(Parameters):
    """What a recipe may say of this stage.

    Attributes:
        config: the config.env that the checkpoint will be served with, relative to the recipe.
        prompt_tokens: lengths of the prompts that the start answers before its cache is packed.
    """

    # What the file says enters the content key, not where it lies.
    config: Annotated[Path, Field(exclude=True)] = Path("config.env")
    prompt_tokens: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (
        1,
        64,
        512,
        2048,
    )

    @field_validator("config")
    @classmethod
    def _relative_to_recipe(cls, path: Path, info: ValidationInfo) -> Path:
        if path.name != "config.env":
            raise ValueError("config has to be a variant's config.env")
        return Path((info.context or {}).get("folder", Path())) / path


def run(source: Path, destination: Path, parameters: BakeCacheParameters, progress: Progress) -> Facts:
    """Copy source to destination and put the compile cache of its start beside it.

    Raises:
        BakedCacheError: the variant compiles nothing, vLLM saved nothing, or a start from the archive compiled.
        ServerFailedError: vLLM did not start.
    """
    one = _variant(parameters)
    checkpoint.carry_all(source, destination)
    command = launch.resolve(_serving(one, destination), port=launch.free_port())
    compile_watch.require_registered(command.environment)
    if command.cache is None:
        raise BakedCacheError(
            f"{one.name} compiles nothing, so there is nothing to bake; set VLLM_ENFORCE_EAGER=0 in its config.env or "
            "take bake_cache out of its recipe"
        )
    with tempfile.TemporaryDirectory(prefix=".bake.", dir=destination) as place:
        cold = command.with_cache_root(Path(place))
        compiled, cold_seconds = _start(cold, parameters.prompt_tokens, Path(place) / "vllm.log", progress)
        if not compiled:
            raise BakedCacheError(
                "vLLM's log says of no graph that it was compiled; the stage's log may say why"
            )
        progress("packing", 0, 0)
        baked_cache.pack(
            Path(place),
            destination,
            machine=baked_cache.this_machine(command.platform),
            device=baked_cache.this_device(command.platform),
            flags=baked_cache.decisive(command.flags),
            environment=dict(command.variables),
            graphs={graph.name: graph.seconds for graph in compiled},
        )
    proof = launch.resolve(_serving(one, destination), port=launch.free_port(), require_baked=True)
    with tempfile.TemporaryDirectory(prefix=".proof.", dir=destination) as place:
        loaded, warm_seconds = _start(proof, parameters.prompt_tokens[:1], Path(place) / "vllm.log", progress)
    missed = {graph.name for graph in compiled} ^ {graph.name for graph in loaded if graph.loaded}
    if missed:
        raise BakedCacheError(f"a start from the packed cache did not load {', '.join(sorted(missed))}")
    return {
        "graphs": len(compiled),
        "cold_start_seconds": round(cold_seconds, 1),
        "baked_start_seconds": round(warm_seconds, 1),
        "compile_seconds": round(sum(graph.seconds for graph in compiled), 2),
        "load_seconds": round(sum(graph.seconds for graph in loaded), 2),
        "archive_bytes": (destination / baked_cache.ARCHIVE).stat().st_size,
    }


def needs(source: Path, parameters: BakeCacheParameters) -> Needs:
    """A copy of the checkpoint and the cache, packed and not; a server with its weights."""
    size = checkpoint.bytes_on_disk(source)
    return Needs(disk_bytes=size + 2 * _ARCHIVE_BYTES, memory_bytes=_ENGINE_BYTES + size)


def data(parameters: BakeCacheParameters) -> dict[str, str]:
    """The lines of the config.env that decide what is compiled, and the machine that it is compiled for.

    Raises:
        ConfigError: the config.env is missing or malformed.
    """
    settings = _variant(parameters).settings
    lines = {f"config.{key}": settings[key].value for key in sorted(settings.keys() - _DECIDE_NOTHING)}
    # Cheap, where asking torch takes seconds: a recipe with nothing to do asks this.
    platform: Platform = "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    return lines | {f"machine.{name}": fact for name, fact in baked_cache.this_machine(platform).items()}


def _variant(parameters: BakeCacheParameters) -> Variant:
    folder = parameters.config.resolve().parent
    return variant.load(folder.name, folder.parent.parent)


def _serving(one: Variant, weights: Path) -> Variant:
    """The variant with this checkpoint, its weights not being linked yet."""
    model = Setting("VLLM_MODEL", str(weights), one.folder / "config.env", 0)
    return dataclasses.replace(one, settings={**one.settings, "VLLM_MODEL": model})


def _start(
    command: launch.ServerCommand, prompt_tokens: Sequence[int], log: Path, progress: Progress
) -> tuple[list[baked_cache.Graph], float]:
    """Start, answer prompts, end; how each graph was come by and the seconds until the server was ready."""
    started = time.monotonic()
    try:
        with launch.serving(command, log=log, progress=progress) as server:
            seconds = time.monotonic() - started
            progress("answering", 0, 0)
            drive(server, prompt_tokens)
    finally:
        if log.is_file():
            # Standard output is the stage's own log, which outlives the folder.
            sys.stdout.write(log.read_text(encoding="utf-8", errors="replace"))
    return baked_cache.graphs(log.read_text(encoding="utf-8", errors="replace")), seconds


def drive(server: launch.RunningServer, prompt_tokens: Sequence[int]) -> None:
    """Have a server answer prompts of these lengths one by one, then as many at once as --max-num-seqs says.

    Lengths beyond its context are cut to it. Where the flag is not set, 16 are sent at once.

    Raises:
        BakedCacheError: it did not answer one.
    """
    vocabulary = int(checkpoint.text_config(checkpoint.read_config(server.weights))["vocab_size"])
    context = server.command.max_model_len
    tokens = 16
    longest = context - tokens - 1
    if longest < 1:
        raise BakedCacheError(f"a context of {context} tokens is too short to answer in; serve with more")
    lengths = sorted({min(length, longest) for length in prompt_tokens})
    at_once = int(server.command.flags.get("max-num-seqs") or _REQUESTS_AT_ONCE)

    def ask(wanted: int) -> None:
        length = min(wanted, longest)
        # Any text will do for a shape, if no two share a prefix.
        prompt = [(length * 31 + place * 7) % vocabulary for place in range(length)]
        body = {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        # trust_env: a proxy of the shell must not stand between.
        url = f"{server.base_url}/v1/completions"
        answer = httpx.post(url, json=body, headers=launch.authorization(), timeout=600, trust_env=False)
        if answer.status_code != httpx.codes.OK:
            raise BakedCacheError(
                f"the server did not answer a prompt of {length} tokens ({json.dumps(answer.text)[:200]}); "
                "lower prompt_tokens, or mend what its log says"
            )

    for length in lengths:
        ask(length)
    with ThreadPoolExecutor(at_once) as clients:
        list(clients.map(ask, range(lengths[0] + 1, lengths[0] + 1 + at_once)))


STAGE = Stage(
    name="bake_cache",
    parameters=BakeCacheParameters,
    run=run,
    needs=needs,
    data=data,
    last=True,
    code=("slimqwen.serving.baked_cache", "slimqwen.serving.launch", "slimqwen.serving.compile_watch"),
    packages=("vllm", "torch"),
)
