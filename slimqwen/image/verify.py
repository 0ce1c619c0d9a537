"""A built image held against its variant: what it holds, what it would run, and on a CPU what it answers."""

import json
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from slimqwen.errors import SlimqwenError
from slimqwen.image import container, context, contract
from slimqwen.image.build import Tool
from slimqwen.progress import Progress, silent
from slimqwen.serving import baked_cache, launch

QUESTION = "Hello! Who are you?"
_TOKENS = 32
_READY_TIMEOUT_S = 1800
_END_TIMEOUT_S = 300


class ImageServerError(SlimqwenError):
    """The server of an image ended, was not ready in time, or did not answer."""


@dataclass(frozen=True)
class Trial:
    """One start of an image's server without a network, as the image's own user.

    Attributes:
        command: that started it.
        ready_seconds: from the start to the first 200 of /ping.
        unready_answers: answers of /ping before that, by status code; "none" where nobody listened yet.
        uids: of the server's processes.
        models: what /v1/models lists.
        question: what it was asked.
        answer: what it said.
        completion_tokens: of the answer.
        end_seconds: from SIGTERM to the end of the container.
        exit_code: of the container.
    """

    command: str
    ready_seconds: float
    unready_answers: Mapping[str, int]
    uids: tuple[int, ...]
    models: tuple[str, ...]
    question: str
    answer: str
    completion_tokens: int
    end_seconds: float
    exit_code: int


@dataclass(frozen=True)
class Verified:
    """All that was found out about an image.

    Attributes:
        checks: what was looked at; those without a fault hold.
        layers: from the base up.
        bytes_by_part: of its files, by what they belong to.
        dry_run: what its entry point says that it would run; None where it was not asked.
        trial: None where it was not started.
        history: the steps that made it.
    """

    checks: tuple[contract.Check, ...]
    layers: tuple[container.Layer, ...]
    bytes_by_part: Mapping[str, int]
    dry_run: str | None
    trial: Trial | None
    history: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether no check found a fault."""
        return not any(check.faults for check in self.checks)

    def as_record(self, tool: Tool, tag: str) -> dict[str, Any]:
        """The figures of its record."""
        return {
            "tool": tool,
            "tag": tag,
            "checks": [{"name": check.name, "faults": list(check.faults)} for check in self.checks],
            "layers": [asdict(layer) for layer in self.layers],
            "bytes_by_part": dict(self.bytes_by_part),
            "history": list(self.history),
            "dry_run": (self.dry_run or "").splitlines(),
            "trial": json.loads(json.dumps(asdict(self.trial))) if self.trial else None,
        }


def verify(
    content: context.Content, *, tool: Tool, tag: str, log: Path, progress: Progress = silent
) -> Verified:
    """Look into an image and, where it is one for a CPU, run it.

    Args:
        content: what this checkout would build now.
        tool: docker, podman or buildah.
        tag: of the image.
        log: receives what its server prints.
        progress: told what is being done.

    Raises:
        slimqwen.image.container.ContainerError: there is no such image, or its entry point fails.
        ImageServerError: its server does not come up or answer; only asked of an image without a fault.
    """
    expected = context.describe(content, progress)
    with container.opened(tool, tag) as image:
        progress("read the image", 0, 0)
        with image.file_system() as stream:
            found = contract.read(stream, _root_of(image.settings, expected), image.settings.user)
        checks = contract.check(found, image.settings, expected)
        dry_run = trial = None
        if expected.platform == "cpu" and found.description is not None:
            progress("dry run", 0, 0)
            dry_run = image.says("--dry-run")
            root = found.description.root
            checks.append(contract.Check("same dry run as here", tuple(differences(dry_run, root, content))))
            checks.append(
                contract.Check("compile cache fits there", tuple(_unused(dry_run, found.description)))
            )
            if not any(check.faults for check in checks):
                trial = try_out(image, expected.port, log, progress)
                said = log.read_text(encoding="utf-8", errors="replace")
                compiled = tuple(compiled_anew(said, found.description))
                checks.append(contract.Check("compiled graphs come from the cache", compiled))
    listed = container.layers(tool, tag)
    return Verified(
        tuple(checks),
        tuple(listed),
        found.bytes_by_part,
        dry_run,
        trial,
        tuple(filter(None, image.settings.history)),
    )


def differences(dry_run: str, root: str, content: context.Content) -> list[str]:
    """What an image would run otherwise than `make serve`, paths and the address to listen on aside.

    Args:
        dry_run: what its entry point prints.
        root: the folder in the image that stands for the repository.
        content: what this checkout would build.
    """
    there, here = _lines(dry_run, root), _lines(content.dry_run(), content.root)
    return list(contract.differing(there, here, "the image", "here"))


def try_out(image: container.Opened, port: int, log: Path, progress: Progress = silent) -> Trial:
    """Start an image's server, wait for /ping, ask for its models and one chat answer, end it by SIGTERM.

    Raises:
        ImageServerError: it ended, was not ready in 30 minutes, or did not answer.
        slimqwen.image.container.ContainerError: it did not end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (
        container.started(image, port, log) as server,
        httpx.Client(
            base_url=server.base_url, headers=launch.authorization(), timeout=300, trust_env=False
        ) as client,
    ):
        unready = _wait(server, client, log, progress)
        ready_seconds = time.monotonic() - began
        uids = server.uids()
        models = [model["id"] for model in _answered(client.get("/v1/models"), log)["data"]]
        body = {
            "model": models[0],
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": _TOKENS,
            "temperature": 0,
        }
        said = _answered(client.post("/v1/chat/completions", json=body), log)
        message = said["choices"][0]["message"]
        text = message.get("content") or message.get("reasoning") or ""
        if not text:
            raise ImageServerError(f"the image's server answered {QUESTION!r} with nothing; its log: {log}")
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
        completion_tokens=said["usage"]["completion_tokens"],
        end_seconds=round(end_seconds, 1),
        exit_code=exit_code,
    )


def _root_of(settings: contract.Settings, expected: context.Description) -> str:
    home = settings.environment.get("HOME", "")
    return home.removesuffix("/.cache") if home.endswith("/.cache") else expected.root


def _lines(shown: str, root: str) -> list[str]:
    return [line.strip().removesuffix(" \\") for line in context.without_paths(shown, root).splitlines()]


def _unused(dry_run: str, description: context.Description) -> Iterator[str]:
    if description.cache and f"/baked-{description.cache[:16]}/" not in dry_run:
        yield "the image would compile anew; `docker run IMAGE --dry-run` says on its second stream what differs"


def compiled_anew(log: str, description: context.Description) -> Iterator[str]:
    """What a start of an image with a compile cache did not take from there.

    Args:
        log: of the image's server.
        description: of the image.
    """
    graphs = baked_cache.graphs(log) if description.cache else []
    if description.cache and not graphs:
        yield "no graph was loaded"
    for graph in graphs:
        if not graph.loaded:
            why = f": {graph.why_compiled}" if graph.why_compiled else ""
            yield f"{graph.name} was compiled in {graph.seconds:g} s{why}"


def _wait(server: container.Started, client: httpx.Client, log: Path, progress: Progress) -> dict[str, int]:
    began, unready = time.monotonic(), dict[str, int]()
    while (elapsed := time.monotonic() - began) < _READY_TIMEOUT_S:
        progress("start the image", elapsed, 0)
        if server.has_ended():
            raise ImageServerError(
                f"the image's server ended before it was ready: {_last_line(log)}; its log: {log}"
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
    raise ImageServerError(f"the image's server was not ready after {_READY_TIMEOUT_S} s; its log: {log}")


def _answered(answer: httpx.Response, log: Path) -> Any:
    if answer.status_code != httpx.codes.OK:
        raise ImageServerError(
            f"the image's server answered {answer.request.url.path} with {answer.status_code}: {answer.text[:200]}; "
            f"its log: {log}"
        )
    return answer.json()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    telling = [line for line in lines if "rror" in line]
    return (telling or lines or ["it printed nothing"])[-1].strip()
