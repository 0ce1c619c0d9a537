"""The stage `bake_cache`: starts the variant once as it will be served, and packs what that start compiled.

That is graphs of torch.compile and, on a GPU, Triton kernels and FlashInfer's libraries. It takes a host like the one
that will serve: nothing is compiled for a GPU that is not there.

The checkpoint passes through unchanged, with the archive and its manifest beside it. The server's command is built by
the same code as for `slimqwen serve`. At its end the stage starts a server from the packed archive, in another folder;
if that start compiles anything, the archive is not published.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import httpx
from pydantic import Field, field_validator

from slimqwen import checkpoint, host
from slimqwen import variant as variants
from slimqwen.checkpoint.files import carry_all
from slimqwen.errors import SlimqwenError
from slimqwen.host import Platform
from slimqwen.identity.effects import Effect, decisive_flags, may_affect
from slimqwen.models.outline import Outline
from slimqwen.processes import spawner
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts, Fault, Needs, Parameters, Stage
from slimqwen.serving import baked_cache, gpu
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.http_client import open_client
from slimqwen.serving.server import RunningServer, free_port, run_server
from slimqwen.text.corpus import RecipePath
from slimqwen.variant import Variant

_ENGINE_BYTES = 4 * 2**30
"""Resident memory of a server that compiles, bytes, without weights; measured: 2.6 GiB for a small model."""

_ARCHIVE_BYTES = 2**30
"""Upper bound of an archive's size, bytes; measured: 2 MB for the embedded model on a CPU."""

_DEFAULT_CONCURRENCY = 16


class BakeCacheParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        config: config.env with which the checkpoint will be served, relative to the recipe.
        prompt_tokens: lengths of the prompts that the server responds to before its cache is packed, tokens.
    """

    config: Annotated[RecipePath, Field(exclude=True)] = Path("config.env")
    prompt_tokens: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (
        1,
        64,
        512,
        2048,
    )

    @field_validator("config")
    @classmethod
    def _is_of_a_variant(cls, path: Path) -> Path:
        if path.name != "config.env":
            raise ValueError("config has to be the config.env of a variant")
        return path


@spawner.share_spawner()
def bake_compile_cache(
    source: Path, destination: Path, parameters: BakeCacheParameters, progress: Progress
) -> Facts:
    """Copy source to destination and put the compile cache of its server beside it.

    Raises:
        ServingError: the variant compiles nothing, vLLM did not start or saved no graph, or a start from the archive
            compiled a graph.
    """
    # weights/<variant> is not linked yet.
    variant = _variant(parameters).with_lines({"VLLM_MODEL": str(destination)})
    carry_all(source, destination)
    command = ServerCommand.resolve(variant, port=free_port())
    if command.cache is None:
        raise ServingError(
            f"{variant.name} compiles nothing, so there is nothing to bake; set VLLM_ENFORCE_EAGER=0 in its config.env "
            "or remove bake_cache from its recipe"
        )
    if command.platform == "cuda" and gpu.first_gpu() is None:
        raise ServingError(
            f"no GPU here to compile the graphs of {variant.name}; bake it on a GPU host like those that will serve it"
        )
    with tempfile.TemporaryDirectory(prefix=".bake.", dir=destination) as folder:
        cold = command.with_cache_root(Path(folder))
        compiled = _start(cold, parameters.prompt_tokens, Path(folder) / "vllm.log", progress)
        if not compiled:
            raise ServingError("vLLM compiled no graph; read why in the stage's log")
        progress("packing", 0, 0)
        libraries = baked_cache.collect_libraries(Path(folder))
        packed = baked_cache.pack_cache(
            Path(folder),
            destination,
            machine=baked_cache.describe_machine(command.platform),
            flags=decisive_flags(command.flags),
            environment=dict(command.variables),
            graphs={graph.name: graph.seconds for graph in compiled},
        )
    baked_cache.trust(variant.root, packed.archive_sha256, "baked here")
    proof = ServerCommand.resolve(variant.with_lines({"REQUIRE_BAKED": "1"}), port=free_port())
    with tempfile.TemporaryDirectory(prefix=".proof.", dir=destination) as folder:
        loaded = _start(proof, parameters.prompt_tokens[:1], Path(folder) / "vllm.log", progress)
    missed = {graph.name for graph in compiled} ^ {graph.name for graph in loaded if graph.loaded}
    if missed:
        raise ServingError(
            f"a start from the packed cache did not load {', '.join(sorted(missed))}; run the recipe again, or remove "
            "bake_cache from it"
        )
    return {
        "graphs": len(compiled),
        "compile_seconds": round(sum(graph.seconds for graph in compiled), 2),
        "libraries": libraries,
        "load_seconds": round(sum(graph.seconds for graph in loaded), 2),
        "archive_bytes": (destination / baked_cache.ARCHIVE).stat().st_size,
    }


def needs(outline: Outline, parameters: BakeCacheParameters) -> Needs:
    """Needs: disk for the checkpoint and for the cache, packed and unpacked; memory for a server with its weights."""
    size = outline.disk_bytes
    return Needs(size + 2 * _ARCHIVE_BYTES, _ENGINE_BYTES + size, fixed_seconds=120)


def inspect_config(outline: Outline, parameters: BakeCacheParameters) -> Iterator[Fault]:
    """Find a config.env that cannot be used."""
    try:
        _variant(parameters)
    except SlimqwenError as error:
        yield Fault(str(error), "config")


def data(parameters: BakeCacheParameters) -> dict[str, str]:
    """Settings of the config.env that affect what is compiled, and properties of the compiling machine.

    Raises:
        ConfigError: the config.env is missing or malformed.
    """
    settings = _variant(parameters).settings
    lines = {f"config.{key}": settings[key].value for key in settings if may_affect(Effect.GRAPHS, key)}
    platform: Platform = "cuda" if host.has_nvidia_driver() else "cpu"
    facts = baked_cache.describe_machine(platform)
    return lines | {f"machine.{name}": fact for name, fact in facts.items()}


def _variant(parameters: BakeCacheParameters) -> Variant:
    folder = parameters.config.resolve().parent
    return variants.load(folder.name, folder.parent.parent)


def _start(
    command: ServerCommand, prompt_tokens: Sequence[int], log: Path, progress: Progress
) -> list[baked_cache.CompiledGraph]:
    """Start a server, have it respond to prompts, and end it; returns its graphs."""
    try:
        with run_server(command, log=log, kept_log="that of bake_cache", progress=progress) as server:
            progress("answering", 0, 0)
            drive(server, prompt_tokens)
    finally:
        _keep(log)
    return baked_cache.read_graphs(log.read_text(encoding="utf-8", errors="replace"))


def _keep(log: Path) -> None:
    """Copy a server's log to standard output, the stage's own log, which outlives the folder of the server's log."""
    if log.is_file():
        sys.stdout.write(log.read_text(encoding="utf-8", errors="replace"))


def drive(server: RunningServer, prompt_tokens: Sequence[int]) -> None:
    """Send prompts of the given lengths one by one, then as many at once as --max-num-seqs (16 if that is unset).

    Prompts longer than the context are cut. On a GPU those at once are sampled, which loads FlashInfer's sampling.

    Raises:
        ServingError: the server did not respond to a prompt.
    """
    vocabulary = int(checkpoint.text_config(checkpoint.read_config(server.weights))["vocab_size"])
    context = server.command.max_model_len
    tokens = 16
    longest = context - tokens - 1
    if longest < 1:
        raise ServingError(f"a context of {context} tokens holds no response; raise VLLM_MAX_MODEL_LEN")
    lengths = sorted({min(length, longest) for length in prompt_tokens})
    concurrency = int(server.command.flags.get("max-num-seqs") or _DEFAULT_CONCURRENCY)

    def ask(length: int, sampling: Mapping[str, float] = MappingProxyType({})) -> None:
        length = min(length, longest)
        # The text does not matter, but no two prompts may share a prefix.
        prompt = [(length * 31 + position * 7) % vocabulary for position in range(length)]
        body = {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            **sampling,
        }
        with open_client(timeout_s=600) as client:
            answer = client.post(f"{server.base_url}/v1/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            raise ServingError(
                f"the server did not answer a prompt of {length} tokens ({json.dumps(answer.text)[:200]}); "
                "lower prompt_tokens, or fix the error in its log"
            )

    for length in lengths:
        ask(length)
    sampling = {"temperature": 1, "top_k": 20, "top_p": 0.95} if server.command.platform == "cuda" else {}
    with ThreadPoolExecutor(concurrency) as clients:
        list(
            clients.map(partial(ask, sampling=sampling), range(lengths[0] + 1, lengths[0] + 1 + concurrency))
        )


STAGE = Stage(
    name="bake_cache",
    parameters=BakeCacheParameters,
    run=bake_compile_cache,
    needs=needs,
    inspect=inspect_config,
    data=data,
    last=True,
)
