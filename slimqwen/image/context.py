"""The build context of one variant: library, lock, config.env lineage, checkpoint and compile cache."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from slimqwen import checkpoint
from slimqwen.checkpoint.files import CARD, COMPILE_CACHE, MANIFEST, list_files, sha256
from slimqwen.host import Platform
from slimqwen.image import ImageError
from slimqwen.image.imported_cache import LOCKS, read_imported_cache
from slimqwen.plan import devices, trouble
from slimqwen.plan.record import PlanRecord
from slimqwen.progress import Progress, silent
from slimqwen.records import store
from slimqwen.serving import baked_cache
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant, making_command
from slimqwen.variant.config_env import config_env, read_config_env
from slimqwen.workspace import installation_root, locate, relative

ALL_INTERFACES = "0.0.0.0"
"""Address that a server in a container listens on; a container's loopback cannot be reached from outside."""

_ROOT = "/opt/slimqwen"
# The library is copied later, so that the environment, which takes minutes, is a layer that no edit or variant changes.
_INSTALL_FILES = (
    "README.md",
    "pyproject.toml",
    "requirements/uv.txt",
    "scripts/install.py",
    "scripts/pack.py",
    "scripts/package_client.py",
    "scripts/_torchvision_schemas.py",
    "slimqwen/__init__.py",
)


@dataclasses.dataclass(frozen=True)
class Content:
    """Content of an image, before any of it is copied.

    Attributes:
        command: command that serves the variant in the image, resolved on this host.
        root: folder of the image that holds what the repository holds here.
        installed: path below `install` in the context, and below `root` in the image -> file on this host.
        served: path below `variant` in the context, and below `root` in the image -> file on this host.
        replaced: path of `installed` or `served` -> text that replaces the content of its file.
        cache: manifest of the image's compile cache; None where nothing is compiled.
    """

    command: ServerCommand
    root: str
    installed: Mapping[str, Path]
    served: Mapping[str, Path]
    replaced: Mapping[str, str]
    cache: baked_cache.BakedCache | None

    def digests(self, progress: Progress = silent) -> dict[str, str]:
        """SHA-256 of each file in the image, by its path below `root`."""
        files = {**self.installed, **self.served}
        digests = {}
        for done, (name, file) in enumerate(sorted(files.items())):
            progress("hash", done, len(files))
            text = self.replaced.get(name)
            digests[name] = sha256(file) if text is None else hashlib.sha256(text.encode()).hexdigest()
        return digests


def gather(
    variant: Variant,
    platform: Platform | None = None,
    archive: Path | None = None,
    *,
    needs_cache: bool = True,
) -> Content:
    """Collect the content of a variant's image, and check that the variant can be served from it.

    Args:
        variant: the variant.
        platform: platform of the image; None: the one on which this host would serve the variant.
        archive: compile_cache.tar.gz that was baked on another host; None: the one that the recipe baked on this host.
        needs_cache: whether to refuse a variant whose server compiles graphs but has no compile cache.

    Raises:
        ImageError: the checkpoint lies outside the repository, there is no compile cache that fits, or the variant is
            not served on `platform`.
        MissingCheckpointError, CorruptCheckpointError: no checkpoint, or a damaged one.
        ConfigError: vLLM would refuse a line of config.env.
        ServingError: the manifest of the baked cache is unreadable, or config.env requires a cache although nothing is
            compiled.
    """
    root, code = variant.root, installation_root()
    if variant.platform and platform and platform != variant.platform:
        raise ImageError(
            f"{variant.name} is served on {variant.platform} only; leave out --platform {platform}"
        )
    checkpoint.check_folder(variant.weights, cure=making_command(variant.weights, root))
    weights = _below_root(variant.weights, root, "VLLM_MODEL")
    command = ServerCommand.resolve(listening_everywhere(variant), platform=platform)
    cache, cache_folder = None, variant.weights
    if archive is not None:
        cache, cache_folder = read_imported_cache(command, archive), archive.parent
    elif command.cache is not None and (needs_cache or command.cache.usable):
        cache = _baked_cache(command)
    files = [locate(name, root) for name in (trouble.FILE, devices.FILE)]
    for name in variant.lineage:
        files += [locate(f"experiments/{name}/{file}", root) for file in ("config.env", "measurements.json")]
    files += store.records(variant.folder, PlanRecord)[:1]  # the plan with which a start is compared
    if isinstance(template := command.flags.get("chat-template"), str) and (root / template).is_file():
        files.append(root / _below_root(root / template, root, "VLLM_CHAT_TEMPLATE"))
    served = {relative(file, root).as_posix(): file for file in files if file.is_file()}
    folder = variant.weights.resolve()
    stored = list_files(folder) | {name: folder / name for name in (MANIFEST, CARD)}
    served |= {
        f"{weights}/{name}": file
        for name, file in stored.items()
        if file.is_file() and name not in COMPILE_CACHE
    }
    if cache:
        served |= {f"{weights}/{name}": cache_folder / name for name in COMPILE_CACHE}
        trusted = f"{baked_cache.TRUSTED}/{cache.archive_sha256}"
        served[trusted] = root / trusted
    for file in (*sorted((code / "slimqwen").rglob("*")), code / "scripts" / "serve.py"):
        if file.is_file() and "__pycache__" not in file.parts:
            served[file.relative_to(code).as_posix()] = file
    installed = {
        name: code / name
        for name in (*_INSTALL_FILES, *(f"requirements/{lock}.txt" for lock in LOCKS[command.platform]))
    }
    # The build commands of kernels have paths of headers, so the cache has to be at the path where it was made.
    image_root = str(Path(cache.machine["environment"]).parent) if cache else _ROOT
    return Content(command, image_root, installed, served, _replaced_texts(variant), cache)


def lay_out(content: Content, folder: Path) -> None:
    """Write the build context into an empty folder: Dockerfile, `install` and `variant`, without symbolic links.

    Files are hard links where the disk allows it and their mode suits an image; others are copied.
    """
    shutil.copyfile(installation_root() / "Dockerfile", folder / "Dockerfile")
    for part, files in (("install", content.installed), ("variant", content.served)):
        for name, file in files.items():
            target = folder / part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in content.replaced:
                target.write_text(content.replaced[name], encoding="utf-8")
            else:
                _link_or_copy(file.resolve(), target)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif path.stat().st_nlink == 1:
            path.chmod(0o644)


def listening_everywhere(variant: Variant) -> Variant:
    """A copy of the variant whose server listens on all interfaces, as a server in a container has to."""
    return variant.with_lines({"VLLM_HOST": ALL_INTERFACES})


def _replaced_texts(variant: Variant) -> dict[str, str]:
    """Texts of files that differ from the checkout: config.env listens everywhere, measurements.json is shortened."""
    texts = {"README.md": "pyproject.toml asks for one.\n"}
    for name in variant.lineage:
        path = f"experiments/{name}/measurements.json"
        measurements = json.loads(locate(path, variant.root).read_text(encoding="utf-8"))
        # Without the status: a promotion does not change the image.
        texts[path] = json.dumps({key: measurements.get(key) for key in ("hypothesis", "baseline")}) + "\n"
    own = config_env(variant.name, variant.root)
    address = read_config_env(own).get("VLLM_HOST") or variant.settings.get("VLLM_HOST")
    file = address.file if address else own
    lines = file.read_text(encoding="utf-8").splitlines()
    if address:
        lines[address.line - 1] = f"VLLM_HOST={ALL_INTERFACES}"
    else:
        lines.append(f"VLLM_HOST={ALL_INTERFACES}")
    texts[f"experiments/{file.parent.name}/{file.name}"] = "\n".join(lines) + "\n"
    return texts


def _baked_cache(command: ServerCommand) -> baked_cache.BakedCache:
    cache, name = command.cache, command.variant.name
    assert cache is not None
    if cache.baked is None:
        raise ImageError(
            f"{name} compiles, but {command.variant.weights.name} has no baked compile cache; end its recipe with the "
            f"stage bake_cache and run `slimqwen recipe run --variant {name}` on a host like those of the image, or "
            f"import the cache of such a host: slimqwen image build --variant {name} --cache compile_cache.tar.gz"
        )
    if cache.differences:
        raise ImageError(
            f"the compile cache of {name} does not fit this host: {'; '.join(cache.differences)}; "
            f"run `slimqwen recipe run --variant {name}` to bake a cache that fits"
        )
    return cache.baked


def _below_root(path: Path, root: Path, key: str) -> str:
    normal_path = relative(Path(os.path.normpath(path)), root)
    if normal_path.is_absolute():
        raise ImageError(
            f"{key} is {path}, outside the repository; copy it into weights/ and set {key} to the copy"
        )
    return normal_path.as_posix()


def _link_or_copy(file: Path, target: Path) -> None:
    if file.stat().st_mode & 0o777 == 0o644:
        try:
            target.hardlink_to(file)
            return
        except OSError:
            pass  # the target is on another disk, or on one without hard links
    shutil.copyfile(file, target)
