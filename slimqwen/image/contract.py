"""Contract of an image: checks of its files, settings and labels, without a start.

A root filesystem comes as a tar stream, which every container tool can give, so the same code reads a directory made
by hand in a test and an image of 5 GB.
"""

import base64
import hashlib
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any

from slimqwen import redaction
from slimqwen.checkpoint.files import COMPILE_CACHE
from slimqwen.image import ImageError
from slimqwen.image.context import DESCRIPTION, Description, without_paths
from slimqwen.image.record import Check
from slimqwen.serving import baked_cache

_TEXT_BYTES = 2**20
"""Largest file that is searched for credentials: a person forgets them in small files."""

_SECRET_NAMES = re.compile(
    r"(^|/)(\.netrc|_netrc|\.pypirc|\.git-credentials|\.dockercfg|\.env|pip\.conf|\.pip|id_(rsa|dsa|ecdsa|ed25519)"
    r"|\.ssh/[^/]+|\.aws/credentials|\.docker/config\.json|\.huggingface/token|huggingface/(token|stored_tokens))$"
)
# Each pattern begins with its literal text and looks behind it afterwards, which is ten times as fast as the reverse.
_SECRET_TEXT: Mapping[str, re.Pattern[bytes]] = {
    "a Hugging Face token": re.compile(rb"hf_(?<!\whf_)[A-Za-z0-9]{30,}\b"),
    "an API key": re.compile(rb"sk-(?<![\w-]sk-)(?:[a-z]+-)*[A-Za-z0-9_-]{24,}\b"),
    "an AWS key": re.compile(rb"AKIA(?<!\wAKIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(rb"gh(?<!\wgh)(?:[pousr]_[A-Za-z0-9]{36}\b|ithub_pat_\w{60})"),
    "a private key": re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\s+[A-Za-z0-9+/]"),
    # Not the word `password`: examples contain it.
    "an address with a password": re.compile(
        rb"http(?<!\whttp)s?://[\w.+-]+:(?!password@)[^\s@/:'\"<>{}$]+@[\w-]"
    ),
}
_COMPILERS: Mapping[str, re.Pattern[str]] = {
    "nvcc": re.compile(r"\.venv/lib/python[\d.]+/site-packages/nvidia/cu\d+/bin/nvcc"),
    "ninja": re.compile(r"\.venv/bin/ninja"),
}
"""The compilers of FlashInfer's kernels in a CUDA image, by their path below the root."""

_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_TOP_PARTS = ("environment", "checkpoint", "library", "system")


@dataclass(frozen=True)
class Settings:
    """Settings with which an image is run, from its configuration.

    Attributes:
        user: value of USER.
        environment: variables.
        labels: values of the labels, by name.
        entrypoint: the words before a container's arguments.
        healthcheck: the words of HEALTHCHECK, empty without one.
        history: the command of each step.
    """

    user: str
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    entrypoint: tuple[str, ...]
    healthcheck: tuple[str, ...]
    history: tuple[str, ...]


@dataclass
class Contents:
    """Content of a root filesystem.

    Attributes:
        description: image.json, None where it is missing.
        cache: compile_cache.json beside the checkpoint, None where there is none.
        files: SHA-256 of every regular file below the root but for the environment, .cache and bytecode, by its path
            below the root.
        owned: paths below that root, outside .cache, that belong to the server's user or anyone may write.
        world_writable: files, and directories without the sticky bit, anywhere.
        secrets: paths of what looks like a secret, each with its kind.
        compilers: the executable ones of `_COMPILERS`.
        bytes_by_part: sizes of the regular files, by what they belong to.
    """

    description: Description | None = None
    cache: baked_cache.BakedCache | None = None
    files: dict[str, str] = field(default_factory=dict)
    owned: list[str] = field(default_factory=list)
    world_writable: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    compilers: set[str] = field(default_factory=set)
    bytes_by_part: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TOP_PARTS, 0))


def read(stream: IO[bytes], root: str, user: str) -> Contents:
    """Read a root filesystem once, from beginning to end.

    Args:
        stream: a tar archive, its names relative to `/`.
        root: the folder that stands for the repository, `/opt/slimqwen`.
        user: value of USER.

    Raises:
        ImageError: image.json or compile_cache.json does not follow its schema.
    """
    contents, base = Contents(), root.strip("/") + "/"
    uid = int(user.partition(":")[0]) if user.partition(":")[0].isdecimal() else None
    installed: dict[str, str] = {}
    suspects: dict[str, tuple[str, set[str]]] = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            name = str(PurePosixPath(entry.name)).removeprefix("/")
            relative = name.removeprefix(base) if name.startswith(base) else None
            _check_permissions(entry, name, relative, uid, contents)
            if not entry.isfile():
                continue
            if relative is not None and entry.mode & 0o111:
                contents.compilers |= {tool for tool, path in _COMPILERS.items() if path.fullmatch(relative)}
            contents.bytes_by_part[_part(relative)] += entry.size
            if _SECRET_NAMES.search(name):
                contents.secrets.append(f"{name} is a file of credentials")
            is_product = relative is not None and not relative.startswith((".venv/", ".cache/"))
            # Bytecode holds the strings of its source, and no package lists it.
            if (not is_product and entry.size > _TEXT_BYTES) or name.endswith(".pyc"):
                continue
            stored = archive.extractfile(entry)
            assert stored is not None
            if entry.size > _TEXT_BYTES:
                assert relative is not None
                contents.files[relative] = _stream_digest(stored)
                continue
            content = stored.read()
            if is_product:
                assert relative is not None
                _read_product_file(relative, content, contents)
            elif name.endswith(".dist-info/RECORD"):
                installed |= _package_digests(name, content)
            elif name.startswith("var/lib/dpkg/info/") and name.endswith(".md5sums"):
                lines = (line.split(maxsplit=1) for line in content.decode(errors="replace").splitlines())
                installed |= {path: digest for digest, path in lines}
            for kind in _secrets_in(content):
                suspects[name] = (f"{name} holds {kind}", _digests(content))
    # An unchanged file of an installed package holds an example or a test key of that package.
    contents.secrets += [
        description for name, (description, digests) in suspects.items() if installed.get(name) not in digests
    ]
    return contents


def check(contents: Contents, settings: Settings, expected: Description) -> list[Check]:
    """Compare the contents of an image with the description that this checkout gives now."""
    description = contents.description
    differences = () if description is None else tuple(_difference_faults(description, expected))
    checks = [
        (
            "description",
            () if description else (f"there is no {DESCRIPTION}; `slimqwen image build` builds one",),
        ),
        ("files", tuple(_file_faults(contents, description)) if description else ()),
        ("same variant, code and checkpoint as here", differences),
        ("same flags as here", tuple(_flag_faults(description, expected)) if description else ()),
        ("compile cache", tuple(_cache_faults(contents, description)) if description else ()),
        (
            "compilers of CUDA code",
            tuple(_compiler_faults(contents, settings, description)) if description else (),
        ),
        ("labels", tuple(_label_faults(settings, description)) if description else ()),
        ("no secrets", (*contents.secrets, *_secret_faults(settings))),
        ("no root", tuple(_user_faults(settings))),
        ("nothing that anyone may write", tuple(contents.world_writable)),
        ("nothing of its own that its user may write", tuple(contents.owned)),
        ("no network, health check, entry point", tuple(_run_time_faults(settings))),
    ]
    return [Check(name=name, faults=faults) for name, faults in checks]


def _stream_digest(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(_TEXT_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _secrets_in(content: bytes) -> list[str]:
    return [kind for kind, pattern in _SECRET_TEXT.items() if pattern.search(content)]


def _digests(content: bytes) -> set[str]:
    """Digests of a file as wheels and Debian list it: SHA-256 and MD5, which is compared here but not trusted."""
    return {
        hashlib.sha256(content).hexdigest(),
        hashlib.md5(content, usedforsecurity=False).hexdigest(),
    }


def _check_permissions(
    entry: tarfile.TarInfo, name: str, relative: str | None, uid: int | None, contents: Contents
) -> None:
    if not (entry.isfile() or entry.isdir()):
        return
    world_writable = bool(entry.mode & 0o002)
    if world_writable and not (entry.isdir() and entry.mode & 0o1000):
        contents.world_writable.append(f"{name} has mode {entry.mode:o}")
    if relative is not None and relative.partition("/")[0] != ".cache" and entry.uid == uid:
        contents.owned.append(f"{name} belongs to uid {uid}, which serves")


def _part(relative: str | None) -> str:
    if relative is None:
        return "system"
    top = relative.partition("/")[0]
    return {".venv": "environment", "weights": "checkpoint"}.get(top, "library")


def _read_product_file(relative: str, content: bytes, contents: Contents) -> None:
    if "__pycache__" in relative or ".egg-info/" in relative:
        return
    contents.files[relative] = hashlib.sha256(content).hexdigest()
    if relative == DESCRIPTION:
        contents.description = Description.parse(content)
    elif PurePosixPath(relative).name == baked_cache.MANIFEST:
        try:
            contents.cache = baked_cache.BakedCache.model_validate_json(content)
        except ValueError:
            raise ImageError(
                f"the image's {relative} is no manifest of a compile cache; build the image anew"
            ) from None


def _package_digests(name: str, content: bytes) -> dict[str, str]:
    """SHA-256 by path of the files that an installed package lists in its RECORD."""
    packages = name.rpartition("/")[0].rpartition("/")[0]
    lines = re.findall(r"^\"?([^,\"]+)\"?,sha256=([\w-]+)", content.decode(errors="replace"), re.MULTILINE)
    return {str(PurePosixPath(packages, path)): _hexadecimal(digest) for path, digest in lines}


def _hexadecimal(urlsafe: str) -> str:
    return base64.urlsafe_b64decode(urlsafe + "=" * (-len(urlsafe) % 4)).hex()


def _file_faults(contents: Contents, description: Description) -> Iterator[str]:
    for name, digest in sorted(description.files.items()):
        if name not in contents.files:
            yield f"{name} is missing"
        elif contents.files[name] != digest:
            yield f"{name} is not the file that {DESCRIPTION} lists"
    for name in sorted(contents.files.keys() - description.files.keys() - {DESCRIPTION}):
        yield f"{name} is not in {DESCRIPTION}"


def _difference_faults(description: Description, expected: Description) -> Iterator[str]:
    for name in ("variant", "platform", "checkpoint", "port"):
        built, current = getattr(description, name), getattr(expected, name)
        if built != current:
            yield f"{name} is {built}, here it is {current}"
    for name in sorted(description.files.keys() | expected.files.keys()):
        # An imported compile cache is not part of this checkout, and a plan may have been made since.
        if PurePosixPath(name).name in COMPILE_CACHE or name.startswith("results/"):
            continue
        if description.files.get(name) != expected.files.get(name):
            yield f"{name} is {_state(description, expected, name)}"


def _state(description: Description, expected: Description, name: str) -> str:
    if name not in description.files:
        return "here and not in the image"
    return "not what it is here" if name in expected.files else "in the image and not here"


def _flag_faults(description: Description, expected: Description) -> Iterator[str]:
    yield from list_differences(
        _rooted(description, _flags_of(description.command.argv)),
        _rooted(expected, _flags_of(expected.command.argv)),
        "the image",
        "here",
    )
    built, current = description.command.environment, expected.command.environment
    for name in sorted(built.keys() | current.keys()):
        if _rooted(description, [built.get(name, "not set")]) != _rooted(
            expected, [current.get(name, "not set")]
        ):
            yield f"{name} is {built.get(name, 'not set')}, here {current.get(name, 'not set')}"


def list_differences(
    first: Sequence[str], second: Sequence[str], first_name: str, second_name: str
) -> Iterator[str]:
    """Items that only one of two lists has, a sentence for each list."""
    only_first = [word for word in first if word not in second]
    only_second = [word for word in second if word not in first]
    if only_first:
        yield f"only {first_name} has {' '.join(only_first)}"
    if only_second:
        yield f"only {second_name}: {' '.join(only_second)}"
    if not only_first and not only_second and list(first) != list(second):
        yield f"{first_name} and {second_name} have them in another order"


def _flags_of(argv: Sequence[str]) -> list[str]:
    """Each flag with its values as one text."""
    flags: list[str] = []
    for word in argv:
        if word.startswith("--") or not flags:
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    return flags


def _rooted(description: Description, words: list[str]) -> list[str]:
    return [without_paths(word, description.root) for word in words]


def _cache_faults(contents: Contents, description: Description) -> Iterator[str]:
    weights = [name for name in description.files if name.endswith(f"/{baked_cache.ARCHIVE}")]
    if bool(description.cache) != bool(weights):
        yield f"{DESCRIPTION} and the files disagree about whether there is one"
        return
    if not description.cache:
        return
    if contents.cache is None:
        yield f"{baked_cache.MANIFEST} is missing"
        return
    if not contents.cache.archive_sha256 == description.cache == contents.files.get(weights[0]):
        yield f"{baked_cache.MANIFEST}, {DESCRIPTION} and {baked_cache.ARCHIVE} come from different bakings"
    made_at = contents.cache.machine.get("environment")
    if made_at != f"{description.root}/.venv":
        yield f"it was made with the environment {made_at}, the image's is {description.root}/.venv"


def _compiler_faults(contents: Contents, settings: Settings, description: Description) -> Iterator[str]:
    if description.platform != "cuda":
        return
    for name in sorted(_COMPILERS.keys() - contents.compilers):
        yield f"{name} is not in the environment; requirements/cuda.txt names its package"
    if f"{description.root}/.venv/bin" not in settings.environment.get("PATH", "").split(":"):
        yield f"PATH lacks {description.root}/.venv/bin, where ninja is"


def _label_faults(settings: Settings, description: Description) -> Iterator[str]:
    expected_labels = {
        "org.opencontainers.image.revision": description.commit,
        "slimqwen.variant": description.variant,
        "slimqwen.platform": description.platform,
        "slimqwen.checkpoint": description.checkpoint,
        "slimqwen.dirty": str(description.dirty).lower(),
    }
    for name, value in expected_labels.items():
        if settings.labels.get(name, "") != value:
            yield f"{name} is {settings.labels.get(name, 'not set')}, {DESCRIPTION} says {value}"


def _secret_faults(settings: Settings) -> Iterator[str]:
    for name, value in settings.environment.items():
        if redaction.names_variable(name) and value:
            yield f"the variable {name} is set"
    for text in (*settings.environment.values(), *settings.labels.values(), *settings.history):
        for kind in _secrets_in(text.encode()):
            yield f"the image's own settings or history hold {kind}"


def _user_faults(settings: Settings) -> Iterator[str]:
    user = settings.user.partition(":")[0]
    if user in ("", "root") or (user.isdecimal() and int(user) == 0):
        yield f"it runs as {user or 'root, no USER being set'}"
    elif not user.isdecimal():
        yield f"USER is the name {user}; Kubernetes can only tell that a number is not root"


def _run_time_faults(settings: Settings) -> Iterator[str]:
    for name, value in _OFFLINE.items():
        if settings.environment.get(name) != value:
            yield f"{name} is {settings.environment.get(name, 'not set')}, not {value}"
    if not any("/ping" in word for word in settings.healthcheck):
        yield "no HEALTHCHECK asks /ping"
    if not any("scripts/serve.py" in word for word in settings.entrypoint):
        yield f"the entry point is {json.dumps(settings.entrypoint)}, not scripts/serve.py"


def as_settings(configuration: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Settings:
    """Read an image's configuration in Docker's form: User, Env, Labels, Entrypoint, Healthcheck."""
    environment = dict(variable.partition("=")[::2] for variable in configuration.get("Env") or [])
    health = configuration.get("Healthcheck") or {}
    return Settings(
        user=configuration.get("User") or "",
        environment=environment,
        labels=configuration.get("Labels") or {},
        entrypoint=tuple(configuration.get("Entrypoint") or ()),
        healthcheck=tuple(health.get("Test") or ()),
        history=tuple(step.get("created_by") or step.get("CreatedBy") or "" for step in history),
    )
