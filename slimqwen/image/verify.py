"""Verification of a built image against its variant: its files, its command, and on a CPU the answers of its server."""

import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from slimqwen.image import ImageError, container, context, contract
from slimqwen.image.build import Tool
from slimqwen.image.record import BytesByPart, Check, ImageCpu, Layer, Trial, tables
from slimqwen.plan import gpu_model, jit_modules, start
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.table import Table
from slimqwen.serving import baked_cache
from slimqwen.serving.http_client import open_client
from slimqwen.serving.server_log import find_last_cause

QUESTION = "Hello! Who are you?"
_TOKENS = 32
_READY_TIMEOUT_S = 1800
_END_TIMEOUT_S = 300


@dataclass(frozen=True)
class Verification:
    """The result of verifying an image.

    Attributes:
        checks: all checks; those without a fault hold.
        layers: layers from the base up.
        bytes_by_part: sizes of its files by what they belong to.
        dry_run: output of its entry point's `--dry-run`; None for an image that is not for a CPU.
        trial: one start of its server; None where it was not started.
        history: commands of the build steps.
    """

    checks: tuple[Check, ...]
    layers: tuple[Layer, ...]
    bytes_by_part: BytesByPart
    dry_run: str | None
    trial: Trial | None
    history: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether no check found a fault."""
        return not any(check.faults for check in self.checks)

    def tables(self) -> list[Table]:
        """Checks, layers and sizes, and the trial where there was one."""
        return tables(self.checks, self.layers, self.bytes_by_part, self.trial)


def verify(
    content: context.Content, *, tool: Tool, tag: str, log: Path, progress: Progress = silent
) -> Verification:
    """Check the content of an image and, if it is for a CPU, start its server.

    Args:
        content: content that this checkout would build now.
        tool: docker, podman or buildah.
        tag: name of the image.
        log: receives the server's output.

    Raises:
        ImageError: there is no such image, its entry point fails, or its server, which is only started where no check
            found a fault, does not come up or answer.
    """
    expected = context.describe(content, progress)
    with container.open_image(tool, tag) as image:
        progress("read the image", 0, 0)
        with image.file_system() as stream:
            contents = contract.read(stream, _root_of(image.settings, expected), image.settings.user)
        checks = contract.check(contents, image.settings, expected)
        checks.append(_check("libraries and kernels compiled ahead", compiled_late(contents.cache, content)))
        dry_run = trial = None
        if expected.platform == "cpu" and contents.description is not None:
            progress("dry run", 0, 0)
            dry_run = image.output("--dry-run")
            root = contents.description.root
            checks.append(_check("same dry run as here", differences(dry_run, root, content)))
            checks.append(_check("compile cache fits there", _unused_cache(dry_run, contents.description)))
            if not any(check.faults for check in checks):
                trial = try_out(image, expected.port, log, progress)
                output = log.read_text(encoding="utf-8", errors="replace")
                compiled = compiled_anew(output, contents.description)
                checks.append(_check("compiled graphs come from the cache", compiled))
    layers = container.layers(tool, tag)
    return Verification(
        tuple(checks),
        tuple(layers),
        BytesByPart(**contents.bytes_by_part),
        dry_run,
        trial,
        tuple(filter(None, image.settings.history)),
    )


def write_record(
    result: Verification,
    content: context.Content,
    tool: Tool,
    tag: str,
    *,
    command: Sequence[str],
    started: str,
) -> Path:
    """Write the record of an image whose server was started.

    Args:
        content: content that this checkout would build.
        command: the command line, for the provenance.
        started: time at which the verification began, UTC.
    """
    assert result.trial is not None
    variant = content.command.variant
    record = ImageCpu(
        variant=variant.name,
        tool=tool,
        tag=tag,
        checks=result.checks,
        layers=result.layers,
        bytes_by_part=result.bytes_by_part,
        history=result.history,
        dry_run=tuple((result.dry_run or "").splitlines()),
        trial=result.trial,
        provenance=provenance.of_variant(variant, command, started, **provenance.of_server(content.command)),
    )
    return store.write(variant.root / "results", record)


def differences(dry_run: str, root: str, content: context.Content) -> list[str]:
    """Differences between the command of an image and `make serve`, without those of paths and of the address.

    Args:
        dry_run: output of the image's `--dry-run`.
        root: the folder in the image that stands for the repository.
        content: content that this checkout would build.
    """
    image_lines, local_lines = _lines(dry_run, root), _lines(content.dry_run(), content.root)
    return list(contract.list_differences(image_lines, local_lines, "the image", "here"))


def try_out(image: container.ImageContainer, port: int, log: Path, progress: Progress = silent) -> Trial:
    """Start an image's server, wait for /ping, ask for its models and one chat answer, end it by SIGTERM.

    Raises:
        ImageError: it ended, was not ready in 30 minutes, did not answer, or did not end after SIGTERM.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (
        container.run_server(image, port, log) as server,
        open_client(timeout_s=300, base_url=server.base_url) as client,
    ):
        unready = _wait_until_ready(server, client, log, progress)
        ready_seconds = time.monotonic() - began
        uids = server.uids()
        models = [model["id"] for model in _decoded(client.get("/v1/models"), log)["data"]]
        body = {
            "model": models[0],
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": _TOKENS,
            "temperature": 0,
        }
        answer = _decoded(client.post("/v1/chat/completions", json=body), log)
        message = answer["choices"][0]["message"]
        text = message.get("content") or message.get("reasoning") or ""
        if not text:
            raise ImageError(f"the image's server answered {QUESTION!r} with nothing; its log: {log}")
        progress("SIGTERM", 0, 0)
        end_seconds, exit_code = server.terminate(_END_TIMEOUT_S)
    return Trial(
        command=shlex.join(server.command),
        ready_seconds=round(ready_seconds, 1),
        unready_answers=unready,
        uids=tuple(sorted(uids)),
        models=tuple(models),
        question=QUESTION,
        answer=text,
        completion_tokens=answer["usage"]["completion_tokens"],
        end_seconds=round(end_seconds, 1),
        exit_code=exit_code,
    )


def _check(name: str, faults: Iterable[str]) -> Check:
    return Check(name=name, faults=tuple(faults))


def _root_of(settings: contract.Settings, expected: context.Description) -> str:
    home = settings.environment.get("HOME", "")
    return home.removesuffix("/.cache") if home.endswith("/.cache") else expected.root


def _lines(dry_run: str, root: str) -> list[str]:
    return [line.strip().removesuffix(" \\") for line in context.without_paths(dry_run, root).splitlines()]


def _unused_cache(dry_run: str, description: context.Description) -> Iterator[str]:
    if description.cache and f"/baked-{description.cache[:16]}/" not in dry_run:
        yield "the image would compile anew; `docker run IMAGE --dry-run` prints the differences to standard error"


def compiled_anew(log: str, description: context.Description) -> Iterator[str]:
    """Graphs that a start of an image with a compile cache did not load from it, a line each.

    Args:
        log: log of the image's server.
        description: description of the image.
    """
    graphs = baked_cache.graphs(log) if description.cache else []
    if description.cache and not graphs:
        yield "no graph was loaded"
    for graph in graphs:
        if not graph.loaded:
            reason = f": {graph.why_compiled}" if graph.why_compiled else ""
            yield f"{graph.name} was compiled in {graph.seconds:g} s{reason}"


def compiled_late(cache: baked_cache.BakedCache | None, content: context.Content) -> Iterator[str]:
    """Libraries and kernels that a compile cache lacks, by the plans for GPUs of its compute capability.

    Args:
        cache: manifest of the image's compile cache.
        content: content that this checkout would build.
    """
    if cache is None or content.command.platform != "cuda":
        return
    models = gpu_model.read_gpu_models(content.command.variant.root)
    capability = cache.machine.get("compute capability")
    # Which libraries a server loads does not depend on whether its host could compile them.
    plans = start.find_plans(content.command, toolkit=False)
    plans |= start.find_plans(content.command, toolkit=True)
    for gpu, plan in plans.items():
        if models[gpu].compute_capability != capability:
            continue
        for module in jit_modules.mark_baked(plan.jit, cache.libraries):
            if module.libraries and not module.baked:
                yield f"{module.module} is compiled at its first use on {gpu}; bake the compile cache anew"
        if plan.kernels and plan.kernels.forms > len(cache.kernels):
            yield (
                f"the plan for {gpu} has {plan.kernels.forms} forms of Triton kernels and the compile cache "
                f"{len(cache.kernels)}; bake it anew"
            )


def _wait_until_ready(
    server: container.ContainerServer, client: httpx.Client, log: Path, progress: Progress
) -> dict[str, int]:
    began, unready = time.monotonic(), dict[str, int]()
    while (elapsed := time.monotonic() - began) < _READY_TIMEOUT_S:
        progress("start the image", elapsed, 0)
        if server.has_ended():
            raise ImageError(
                f"the image's server ended before it was ready: {find_last_cause(log)}; its log: {log}"
            )
        try:
            status = client.get("/ping", timeout=5).status_code
            if status == httpx.codes.OK:
                return unready
            answer = str(status)
        except httpx.HTTPError:
            answer = "none"
        unready[answer] = unready.get(answer, 0) + 1
        time.sleep(0.25)
    raise ImageError(f"the image's server was not ready after {_READY_TIMEOUT_S} s; its log: {log}")


def _decoded(answer: httpx.Response, log: Path) -> Any:
    if answer.status_code != httpx.codes.OK:
        raise ImageError(
            f"the image's server answered {answer.request.url.path} with {answer.status_code}: {answer.text[:200]}; "
            f"its log: {log}"
        )
    return answer.json()
