"""Baked compile cache: compiled code that a start of vLLM can load, in an archive beside the checkpoint.

The archive holds what one start compiled: graphs, Triton kernels and FlashInfer's libraries.

The manifest beside the archive states the machine and the flags that it was made with. The archive is used only where
all of them are the same, because vLLM's own cache keys leave some out (the draft depth, the thread count). A cache hit
is never assumed: `vllm_plugin.patches.serving.compile_watch` logs for each graph whether it was loaded or compiled.

An archive is code: pickled graphs and shared libraries. A server loads only one that this workspace baked, or that its
user imported by its SHA-256; a checkpoint from elsewhere may hold any.
"""

import hashlib
import importlib.metadata
import json
import platform as system
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from slimqwen import host
from slimqwen.checkpoint.files import COMPILE_CACHE, sha256
from slimqwen.file_lock import hold_lock
from slimqwen.identity import changed_names, source
from slimqwen.identity.effects import decisive_flags
from slimqwen.serving import gpu
from slimqwen.serving.errors import ServingError

ARCHIVE, MANIFEST = COMPILE_CACHE

TRUSTED = "weights/store/.compile_caches"
"""Folder of a workspace with one file for each archive that its servers may load, named by the SHA-256.

It lies outside every checkpoint, so none can bring it along, and in weights/, so that a copy of weights/ keeps it.
"""

LIBRARIES = "flashinfer"
"""Folder of a cache root with FlashInfer's libraries as <name>/<name>.so, FlashInfer's layout of prebuilt ones."""

KERNELS = "triton"
"""Folder of a cache root that is Triton's cache: one folder for each compiled form of a kernel."""

_PACKED = ("vllm/torch_compile_cache", "vllm/modelinfos", LIBRARIES, KERNELS)
"""The packed parts of a cache root: compiled graphs, their kernels, the autotuner's results, and vLLM's facts about the
model class. Without the facts a start has to import vLLM in one more process to find them (`_ModelInfo` in
vllm/model_executor/models/registry.py)."""

_READ_OF_KERNELS = frozenset({".json", ".cubin"})
"""Endings of the files that Triton reads of a compiled kernel; the others, half of its cache, are only intermediate."""


def _below_root(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name} lies outside the cache folder")
    return name


class BakedCache(BaseModel):
    """The manifest compile_cache.json.

    Attributes:
        machine: facts, by name, that must be equal where the archive is used: versions, platform, GPU or instruction
            set.
        flags: vLLM's flags by name, each value as JSON.
        environment: environment variables that the config.env set.
        graphs: compiled graph -> seconds that its compilation took.
        files: path in the cache root -> SHA-256.
        archive_sha256: SHA-256 of the archive beside this file.
    """

    # Earlier manifests have `libraries` as well.
    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal[1] = 1
    machine: dict[str, str]
    flags: dict[str, str]
    environment: dict[str, str]
    graphs: dict[str, float]
    files: dict[Annotated[str, AfterValidator(_below_root)], str]
    archive_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class CompiledGraph:
    """One graph that a start of vLLM loaded from the cache or compiled.

    Attributes:
        name: vLLM's tag: backbone, eagle_head (the MTP head), …
        loaded: whether it was loaded from the cache; if not, it was compiled.
        seconds: time of loading or compiling.
        why_compiled: what the cache lacked; empty if the graph was loaded.
    """

    name: str
    loaded: bool
    seconds: float
    why_compiled: str


def describe_machine(platform: host.Platform) -> dict[str, str]:
    """Properties of this machine, by name, that must equal the baking machine's for its compiled code to be loaded."""
    facts = {
        "platform": platform,
        "vllm": _version("vllm"),
        "torch": _version("torch"),
        "python": system.python_version(),
        # The build commands of kernels contain the paths of headers.
        "environment": sys.prefix,
        "patches of vLLM": digest_patches(platform),
    }
    if platform == "cpu":
        return facts | {"instruction set": _cpu_flags()}
    # Slow to import, and not needed on a CPU.
    import torch

    device = gpu.first_gpu()
    return facts | {
        "CUDA": str(torch.version.cuda),
        "triton": _version("triton"),
        "flashinfer": _version("flashinfer-python"),
        "GPU": device.name if device else "none",
        "compute capability": device.capability if device else "none",
    }


def digest_patches(platform: host.Platform) -> str:
    """Digest of the patches of one platform whose code becomes part of vLLM's compiled graphs."""
    return source.reach("slimqwen.vllm_plugin.patches.register", device=platform).digest[:12]


def read_manifest(folder: Path) -> BakedCache | None:
    """Read the manifest beside a checkpoint; None if no cache was baked.

    Raises:
        ServingError: the manifest does not follow the schema.
    """
    try:
        return BakedCache.model_validate_json((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        raise ServingError(
            f"{folder / MANIFEST} does not describe a compile cache ({error.errors()[0]['msg']}); run the recipe "
            "with its stage bake_cache again"
        ) from None


def trust(root: Path, archive_sha256: str, origin: str) -> None:
    """Let servers of a workspace load an archive.

    Args:
        root: the workspace.
        archive_sha256: SHA-256 of the archive.
        origin: why it may be loaded, for people; an earlier origin is kept.
    """
    file = root / TRUSTED / archive_sha256
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{origin}\n", encoding="utf-8")


def import_archive(root: Path, archive: Path, archive_sha256: str) -> None:
    """Let servers of a workspace load an archive whose SHA-256 the user gave.

    Args:
        root: the workspace.
        archive: the archive, which stays where it is.
        archive_sha256: the SHA-256, 64 hexadecimal digits.

    Raises:
        ServingError: the archive does not exist or has another SHA-256.
    """
    if not archive.is_file():
        names = " and ".join(COMPILE_CACHE)
        raise ServingError(f"{archive} is missing; copy {names} there from the host that baked them")
    if (found := sha256(archive)) != archive_sha256:
        raise ServingError(
            f"{archive} has the SHA-256 {found}, not {archive_sha256}; copy it again from the host that baked it"
        )
    trust(root, archive_sha256, "imported by its hash")


def find_origin(root: Path, baked: BakedCache) -> str | None:
    """The origin that `trust` noted for an archive; None if servers of the workspace `root` may not load it."""
    file = root / TRUSTED / baked.archive_sha256
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def list_differences(
    baked: BakedCache,
    facts: Mapping[str, str],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
) -> list[str]:
    """List in words why the baked cache cannot be used here; empty if it can.

    Args:
        facts: facts about this host, from `describe_machine`.
        flags: vLLM's flags of the server, by name.
        environment: environment variables that the config.env sets.
    """
    pairs = (
        ("", baked.machine, facts),
        ("--", baked.flags, decisive_flags(flags)),
        ("", baked.environment, environment),
    )
    return [
        f"{sign}{name} was {was.get(name, 'not set')} and is {now.get(name, 'not set')}"
        for sign, was, now in pairs
        for name in changed_names(was, now)
    ]


def collect_libraries(root: Path) -> int:
    """Move libraries that FlashInfer compiled during a start to the folder of the cache root where a later start looks.

    Returns:
        The number of libraries.
    """
    # FlashInfer compiles below FLASHINFER_WORKSPACE_BASE (`FLASHINFER_JIT_DIR` in flashinfer/jit/env.py).
    libraries = sorted(root.glob(".cache/flashinfer/**/cached_ops/*/*.so"))
    for library in libraries:
        target = root / LIBRARIES / library.stem / library.name
        target.parent.mkdir(parents=True, exist_ok=True)
        library.rename(target)
    return len(libraries)


def pack_cache(root: Path, destination: Path, **made_by: Any) -> BakedCache:
    """Pack the files under a cache root into an archive with a manifest, and return the manifest.

    Args:
        root: the cache root; no process may still write to it.
        destination: the folder for archive and manifest.
        made_by: the manifest's fields machine, flags, environment and graphs.

    Raises:
        ServingError: the root has no compiled graph.
    """
    paths = [path for part in _PACKED for path in sorted((root / part).rglob("*"))]
    files = {path.relative_to(root).as_posix(): path for path in paths if _is_packed(path, root)}
    if not any(name.endswith("/model") for name in files):
        raise ServingError(f"vLLM saved no compiled graph under {root}; read why in its log")
    archive = destination / ARCHIVE
    with tarfile.open(archive, "w:gz") as packed:
        for name, path in files.items():
            packed.add(path, name)
    baked = BakedCache(
        files={name: sha256(path) for name, path in files.items()},
        archive_sha256=sha256(archive),
        **made_by,
    )
    text = json.dumps(baked.model_dump(mode="json"), indent=1, sort_keys=True)
    (destination / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return baked


def _is_packed(path: Path, root: Path) -> bool:
    if not path.is_file() or path.is_symlink():
        return False
    return (root / KERNELS) not in path.parents or path.suffix in _READ_OF_KERNELS


def restore_cache(folder: Path, baked: BakedCache, root: Path) -> None:
    """Unpack the archive beside a checkpoint into a cache root, unless all its files are there already and intact.

    Args:
        folder: the checkpoint folder with archive and manifest.
        baked: the manifest.
        root: the cache root; a second process that restores it at the same time waits.

    Raises:
        ServingError: the archive is missing, damaged, or not the one that the manifest describes.
    """
    if _is_whole(root, baked):
        return
    archive = folder / ARCHIVE
    if not _is(archive, baked.archive_sha256):
        raise ServingError(
            f"{archive} is missing or not what {MANIFEST} says; run the recipe with its stage bake_cache again"
        )
    with hold_lock(root.parent / f".{root.name}.lock"):
        if not _is_whole(root, baked):
            _unpack(archive, baked, root)


def _unpack(archive: Path, baked: BakedCache, root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{root.name}.", dir=root.parent) as folder:
        # Only files in the manifest: `extractall` writes wherever the archive says, before Python 3.11.4 unfiltered.
        with tarfile.open(archive) as packed:
            for name in baked.files:
                _copy_out(packed, name, Path(folder) / name)
        for name, digest in baked.files.items():
            if not _is(Path(folder) / name, digest):
                raise ServingError(
                    f"{archive} holds another {name} than {MANIFEST} says; delete both and run the recipe again"
                )
        root.mkdir(exist_ok=True)
        for part in sorted(Path(folder).iterdir()):
            shutil.rmtree(root / part.name, ignore_errors=True)
            part.rename(root / part.name)


def _copy_out(packed: tarfile.TarFile, name: str, destination: Path) -> None:
    """Copy one plain file out of an archive; does nothing if the archive has no file of that name."""
    try:
        content = packed.extractfile(name)
    except KeyError:
        return
    if content is not None:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with content, destination.open("wb") as file:
            shutil.copyfileobj(content, file)


LINE = re.compile(
    r"Graph (?P<name>\S+) (?P<how>loaded from the compile cache|compiled) in (?P<seconds>[\d.]+) s"
    r"(?: \((?P<why>.*)\))?"
)
"""The line that `compile_watch` writes into vLLM's log for each graph."""


def read_graphs(log: str) -> list[CompiledGraph]:
    """Read from the log of a start whether each graph was loaded or compiled, in the log's order."""
    return [
        CompiledGraph(match["name"], match["how"] != "compiled", float(match["seconds"]), match["why"] or "")
        for match in LINE.finditer(log)
    ]


def _is_whole(root: Path, baked: BakedCache) -> bool:
    return all(_is(root / name, digest) for name, digest in baked.files.items())


def _is(file: Path, digest: str) -> bool:
    return file.is_file() and sha256(file) == digest


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _cpu_flags() -> str:
    """Digest of this CPU's features: kernels are compiled for exactly those of the machine that compiles them."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("flags", "Features")):
            return hashlib.sha256(" ".join(sorted(line.split())).encode()).hexdigest()[:12]
    return "unknown"
