"""Pack what a host without a network lacks into parts of at most 40 MB: `make pack`; there `make install FROM=folder`.

The parts are the wheels, one after the other, cut; manifest.json has the SHA-256 of each part and of each wheel.
"""

import argparse
import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

from package_client import (
    FROM_SOURCE,
    PYTORCH_CPU_INDEX,
    InstallError,
    NotInIndexError,
    PackageClient,
    normalise,
    read_pins,
    show,
)

ROOT = Path(__file__).resolve().parent.parent
PART_BYTES, CHUNK_BYTES = 40_000_000, 1 << 20
MANIFEST = "manifest.json"

TOOLS = re.compile(r"ruff|mypy|mypy-extensions|librt|ast-serialize|types-.*|import-linter|grimp")
"""Packages that only `make lint` needs. pytest and what its configuration loads are packed for `make gpu-check`."""

BLACKWELL = re.compile(r"(?i).*g?b[123]00")
ONLY_BLACKWELL = ("tokenspeed-mla", "tokenspeed-triton")
"""vLLM's attention that takes capability 10 alone; no other package of the lock is for one generation of GPUs."""

GLIBC = range(5, 32)
"""Minor versions of glibc 2 whose wheels are packed: llguidance has none for a host with an older one than 2.31."""


def main() -> int:
    """Write the folder of parts, or say in one line why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--host", type=Path, help="`pip list --format json` or `pip inspect` of the host")
    parser.add_argument(
        "--python-version", help="the host's, as 3.12 (default: by --host, else this Python's)"
    )
    parser.add_argument(
        "--gpu", default="", help="the host's GPU, as h100: packages for other GPUs are left out"
    )
    parser.add_argument("--to", type=Path, default=ROOT / "pack", help="the folder to write")
    options = parser.parse_args()
    try:
        host, python = read_host(options.host) if options.host else ({}, None)
        python = options.python_version or python or f"{sys.version_info[0]}.{sys.version_info[1]}"
        lock = ROOT / "requirements" / f"{options.platform}.txt"
        pins = read_pins(lock)
        if options.platform == "cpu":
            pins |= read_pins(lock.with_name("torch-cpu.txt"))
        there = {name: host[name] for name in pins if name in host and fits(pins, name, host[name])}
        wanted = {
            name: pin for name, pin in pins.items() if name not in there and is_wanted(name, options.gpu)
        }
        wheels = download(wanted, lock, python, ROOT / ".cache" / "pack" / f"{options.platform}-{python}")
        manifest = {
            "platform": options.platform,
            "python": python,
            "machine": platform.machine(),
            "lock": hashlib.sha256(lock.read_bytes()).hexdigest(),
            "pins": [version_of(pin, whole=True) for pin in wanted.values()],
            "host": there,
        }
        parts = write_parts(wheels, options.to, manifest)
        size_mb = sum(wheel.stat().st_size for wheel in wheels) / 1e6
        print(f"{options.to}: {len(parts)} parts, {size_mb:.0f} MB; there: make install FROM=<that folder>")
        return 0
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(
            f"error: {error.strerror}: {error.filename}; free some disk or fix its permissions",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 2


def read_host(file: Path) -> tuple[dict[str, str], str | None]:
    """Versions of a host's packages by name, and its Python where the file says it.

    Raises:
        InstallError: the file is neither of the two lists.
    """
    try:
        listed = json.loads(file.read_text(encoding="utf-8-sig"))
        if isinstance(listed, dict):
            python = ".".join(listed["environment"]["python_full_version"].split(".")[:2])
            return {
                normalise(one["metadata"]["name"]): one["metadata"]["version"] for one in listed["installed"]
            }, python
        return {normalise(one["name"]): one["version"] for one in listed}, None
    except (ValueError, KeyError, TypeError) as error:
        raise InstallError(
            f"{file} is no list of packages ({type(error).__name__}: {error}); write it on the host with "
            "`python3 -m pip inspect > packages.json` or `python3 -m pip list --format json > packages.json`"
        ) from None


def version_of(pin: str, *, whole: bool = False) -> str:
    """The version of a pin; `whole`: name and version, without hashes."""
    words = pin.split()[0]
    return words if whole else words.rpartition("=")[2]


def fits(pins: Mapping[str, str], name: str, version: str) -> bool:
    """Whether a host's version is the lock's: equal, or torch's build for the same CUDA under its own label."""
    wanted = version_of(pins[name])
    runtime = pins.get("nvidia-cuda-runtime")
    label = "cu" + "".join(version_of(runtime).split(".")[:2]) if runtime else "cpu"
    return version == wanted or (name in ("torch", "torchvision") and version == f"{wanted}+{label}")


def is_wanted(name: str, gpu: str) -> bool:
    """Whether a host needs a package: no tool of developers, nothing for another GPU than the named one."""
    return not TOOLS.fullmatch(name) and (not gpu or name not in ONLY_BLACKWELL or bool(BLACKWELL.match(gpu)))


def download(wanted: Mapping[str, str], lock: Path, python: str, folder: Path) -> list[Path]:
    """Have the wheel of each pin in a folder; those of an earlier call are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    log = ROOT / "logs" / "pack.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("")
    own = ROOT / ".venv" / "bin" / "python"
    client = PackageClient(own if own.exists() else Path(sys.executable), log)
    machine = platform.machine()
    names = [
        "linux",
        "manylinux1",
        "manylinux2010",
        "manylinux2014",
        *(f"manylinux_2_{minor}" for minor in GLIBC),
    ]
    platforms = [word for name in names for word in ("--platform", f"{name}_{machine}")]
    only = ["--only-binary", ":all:", "--python-version", python, *platforms]
    verb = ["download", "--dest", str(folder), "--find-links", str(folder), *only]
    sources = [pin for pin in wanted.values() if pin.endswith(FROM_SOURCE)]
    hashed = [pin for pin in wanted.values() if "--hash" in pin and pin not in sources]
    built = [pin for pin in sources if not find_wheel(folder, pin)]
    uv = read_pins(lock.with_name("uv.txt"))["uv"]
    for pin in (pin for pin in wanted.values() if "--hash" not in pin):  # torch for a CPU
        try:
            client.run_pip("torch", verb, pin)
        except NotInIndexError:
            client.run_pip("torch (from PyTorch's index)", verb, pin, index=PYTORCH_CPU_INDEX)
    if hashed:
        client.run_pip(f"{len(hashed)} packages", verb, "\n".join(hashed), "--require-hashes")
    if built:
        client.run_pip("packages without wheels", ["wheel", "--wheel-dir", str(folder)], "\n".join(built))
    try:
        client.run_pip("uv", verb, uv, "--retries", "1")
    except InstallError as error:
        show(f"without uv, so the host installs by pip ({error})\n")
    wheels = {name: find_wheel(folder, pin) for name, pin in wanted.items()}
    if missing := [name for name, wheel in wheels.items() if wheel is None]:
        raise InstallError(
            f"{folder} has no wheel of {', '.join(missing)}; remove it and run the same command again"
        )
    return [wheel for wheel in (*wheels.values(), find_wheel(folder, uv)) if wheel is not None]


def find_wheel(folder: Path, pin: str) -> Path | None:
    """The wheel of a pin in a folder."""
    name, version = normalise(pin.partition("=")[0]), version_of(pin)
    for wheel in sorted(folder.glob("*.whl")):
        parts = wheel.name.split("-")
        if normalise(parts[0]) == name and parts[1] == version:
            return wheel
    return None


def read_bytes(files: list[Path]) -> Iterator[bytes]:
    """The content of files, one after the other."""
    for file in files:
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                yield chunk


def write_parts(wheels: list[Path], folder: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Cut the wheels into parts and write the manifest, last; parts that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    parts: list[dict[str, Any]] = []
    pending = bytearray()

    def write(content: bytes) -> None:
        part = describe(f"part-{len(parts) + 1:03}", content)
        file = folder / part["name"]
        if not file.exists() or file.stat().st_size != len(content) or file.read_bytes() != content:
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_bytes(content)
            unfinished.replace(file)
        parts.append(part)

    for chunk in read_bytes(wheels):
        pending += chunk
        if len(pending) >= PART_BYTES:
            write(bytes(pending[:PART_BYTES]))
            del pending[:PART_BYTES]
    if pending:
        write(bytes(pending))
    for file in folder.glob("part-*"):
        if file.name not in {part["name"] for part in parts}:
            file.unlink()
    files = [
        {"name": wheel.name, "size": wheel.stat().st_size, "sha256": digest_of(wheel)} for wheel in wheels
    ]
    text = json.dumps({**manifest, "parts": parts, "wheels": files}, indent=1)
    unfinished = folder / f"{MANIFEST}.unfinished"
    unfinished.write_text(text)
    unfinished.replace(folder / MANIFEST)
    return parts


def describe(name: str, content: bytes) -> dict[str, Any]:
    """A file's entry of the manifest."""
    return {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def digest_of(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that `make pack` wrote.

    Raises:
        InstallError: it is not there, or not whole.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise InstallError(
            f"{folder} has no {MANIFEST}; copy the whole folder that `make pack` wrote"
        ) from None
    except ValueError:
        raise InstallError(f"{folder / MANIFEST} is damaged; copy it again") from None
    return manifest


def unpack(folder: Path, manifest: Mapping[str, Any], to: Path) -> None:
    """Check every part, then write the wheels into a folder; those that are there whole already are kept.

    Raises:
        InstallError: parts are missing or damaged; names each.
    """
    missing, damaged = [], []
    for number, part in enumerate(manifest["parts"], 1):
        show(f"parts checked: {number} of {len(manifest['parts'])}")
        file = folder / part["name"]
        if not file.exists():
            missing.append(part["name"])
        elif file.stat().st_size != part["size"] or digest_of(file) != part["sha256"]:
            damaged.append(part["name"])
    if missing or damaged:
        said = [
            f"{what}: {', '.join(names)}"
            for what, names in (("missing", missing), ("damaged", damaged))
            if names
        ]
        raise InstallError(f"{folder}: {'; '.join(said)}; copy these again, then run the same command")
    show(f"parts checked: all {len(manifest['parts'])} are whole\n")
    to.mkdir(parents=True, exist_ok=True)
    content = read_bytes([folder / part["name"] for part in manifest["parts"]])
    rest = b""
    for wheel in manifest["wheels"]:
        with (to / wheel["name"]).open("wb") as file:
            left = wheel["size"]
            while left:
                rest = rest or next(content)
                file.write(rest[:left])
                left, rest = left - len(rest[:left]), rest[left:]


if __name__ == "__main__":
    sys.exit(main())
