"""Verification of a built image against its variant: files, settings, and for a CPU image its server."""

import hashlib
import inspect
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Any

from slimqwen import redaction
from slimqwen.checkpoint.files import COMPILE_CACHE
from slimqwen.image import trial
from slimqwen.image.context import Content
from slimqwen.image.tools import Image, Tool, open_image
from slimqwen.plan.record import PlanRecord
from slimqwen.progress import Progress, silent
from slimqwen.serving import baked_cache

_SECRET_NAMES = re.compile(
    r"(^|/)(\.netrc|_netrc|\.pypirc|\.git-credentials|\.dockercfg|\.env|pip\.conf|\.pip|id_(rsa|dsa|ecdsa|ed25519)"
    r"|\.ssh/[^/]+|\.aws/credentials|\.docker/config\.json|\.huggingface/token|huggingface/(token|stored_tokens))$"
)


@dataclass
class Contents:
    """What was found in an image's root filesystem.

    Attributes:
        files: path -> SHA-256 of every regular file below the repository's folder, except .venv, .cache and bytecode.
        secrets: a fault for each file whose name says that it has credentials.
        writable: a fault for each file or folder outside .cache that the server's user, or anyone, may write.
    """

    files: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    writable: list[str] = field(default_factory=list)

    @property
    def has_cache(self) -> bool:
        """Whether the image has a compile cache."""
        return any(name.endswith(f"/{baked_cache.MANIFEST}") for name in self.files)


def verify_image(
    content: Content, *, tool: Tool, tag: str, log: Path, progress: Progress = silent
) -> dict[str, list[str]]:
    """Check an image and, if it is for a CPU and has no fault so far, start its server.

    Args:
        content: content of the image that this checkout would build now.
        tool: container tool that has the image.
        tag: name of the image.
        log: file that receives the server's output.
        progress: receives (activity, done, total).

    Returns:
        Check -> its faults; a check without faults is passed.

    Raises:
        ImageError: there is no such image, or its programs cannot be run.
    """
    expected = content.digests(progress)
    with open_image(tool, tag) as image:
        progress("read the image", 0, 0)
        root = image.variables.get("HOME", "").removesuffix("/.cache") or content.root
        with image.file_system() as stream:
            contents = read_contents(stream, root, image.user)
        faults = {
            "variant, code and checkpoint are those of this checkout": _file_faults(contents.files, expected),
            "no secrets": [*contents.secrets, *filter(redaction.names_variable, image.variables)],
            "nothing that its user may write": contents.writable,
            "settings": list(_setting_faults(image, content)),
        }
        if content.command.platform == "cpu" and not any(faults.values()):
            progress("start the image", 0, 0)
            seen = _try_server(image, content.command.port, log)
            text = log.read_text(encoding="utf-8", errors="replace")
            found = server_faults(seen, text, has_cache=contents.has_cache)
            faults["server"] = [f"{fault}; its log: {log}" for fault in found]
    return faults


def read_contents(stream: IO[bytes], root: str, user: str) -> Contents:
    """Read a root filesystem once, from beginning to end.

    Args:
        stream: tar archive with names relative to `/`.
        root: folder of the image that holds what the repository holds here.
        user: user id that the server runs as.
    """
    contents, base = Contents(), root.strip("/") + "/"
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            name = str(PurePosixPath(entry.name)).removeprefix("/")
            relative = name.removeprefix(base) if name.startswith(base) else ""
            is_product = bool(relative) and not relative.startswith((".venv/", ".cache/"))
            is_anyones = entry.mode & 0o002 and not (entry.isdir() and entry.mode & 0o1000)
            is_own = relative and not relative.startswith(".cache") and str(entry.uid) == user
            if (entry.isfile() or entry.isdir()) and (is_anyones or is_own):
                contents.writable.append(f"{name} has mode {entry.mode:o} and belongs to uid {entry.uid}")
            if entry.isfile() and _SECRET_NAMES.search(name):
                contents.secrets.append(f"{name} is a file of credentials")
            if entry.isfile() and is_product and not re.search(r"\.pyc$|\.egg-info/", relative):
                digest, stored = hashlib.sha256(), archive.extractfile(entry)
                while stored and (chunk := stored.read(2**20)):
                    digest.update(chunk)
                contents.files[relative] = digest.hexdigest()
    return contents


def server_faults(seen: Mapping[str, Any], log: str, *, has_cache: bool) -> Iterator[str]:
    """Yield each fault of a start of an image's server.

    Args:
        seen: results that `trial` printed.
        log: output of the server.
        has_cache: whether the image has a compile cache, from which the server has to load every graph.
    """
    pings = seen["answers_of_ping"]
    if 200 not in pings:
        yield f"it was never ready (responses of /ping: {pings}, exit code {seen['exit_code']})"
        return
    if 503 not in pings:
        yield "it was ready before its warm-up: /ping never returned 503"
    if not (seen["message"].get("content") or seen["message"].get("reasoning")):
        yield "it did not respond to a chat"
    if seen["exit_code"] != 0:
        yield f"after SIGTERM it ended with exit code {seen['exit_code']}"
    graphs = baked_cache.read_graphs(log) if has_cache else []
    if has_cache and not graphs:
        yield "it loaded no compiled graph"
    for graph in graphs:
        if not graph.loaded:
            yield f"it compiled {graph.name} in {graph.seconds:g} s ({graph.why_compiled})"


def _try_server(image: Image, port: int, log: Path) -> dict[str, Any]:
    log.parent.mkdir(parents=True, exist_ok=True)
    # The question comes from within the container, so its server needs no key.
    words = ["python", "-c", inspect.getsource(trial), str(port), *image.entrypoint, "--allow-open", "1"]
    with log.open("wb") as output:
        seen: dict[str, Any] = json.loads(image.run(words, output).splitlines()[-1])
    return seen


def _file_faults(files: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Files that differ from this checkout, except the compile cache, which may be imported, and a newer plan."""
    names = sorted(
        name
        for name in files.keys() | expected.keys()
        if PurePosixPath(name).name not in COMPILE_CACHE
        and not name.startswith(f"{baked_cache.TRUSTED}/")
        and not fnmatch(name, f"experiments/*/{PlanRecord.kind}_*.json")
    )
    states = {name: (files.get(name), expected.get(name)) for name in names}
    return [
        f"{name} is {'missing' if there is None else 'not as in this checkout' if here else 'not in this checkout'}"
        for name, (there, here) in states.items()
        if there != here
    ]


def _setting_faults(image: Image, content: Content) -> Iterator[str]:
    if not image.user.isdecimal() or int(image.user) == 0:
        yield f"it runs as {image.user or 'root'}; Kubernetes needs a user id to see that a user is not root"
    expected = {
        "SLIMQWEN_VARIANT": content.command.variant.name,
        "SLIMQWEN_PLATFORM": content.command.platform,
        "SLIMQWEN_PORT": str(content.command.port),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in expected.items():
        if image.variables.get(name) != value:
            yield f"{name} is {image.variables.get(name, 'not set')}, not {value}"
    if "/ping" not in str(image.settings.get("Healthcheck")):
        yield "no HEALTHCHECK asks /ping"
    if "scripts/serve.py" not in str(image.entrypoint):
        yield f"the entry point is {json.dumps(image.entrypoint)}, not scripts/serve.py"
