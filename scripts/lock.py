"""Write the SHA-256 of each file of each pin into requirements/*.txt; run it after a pin was changed.

Pins are edited by hand, hashes never. uv asks the main index of pip's settings for the files of each version, and no
other: a further one may have files of its own. Kept are those for Linux, x86-64 and aarch64, Python 3.11 to 3.13, and
the source of a package that has no wheel. requirements/torch-cpu.txt stays without: its file is another one on each
index.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

from package_client import FROM_SOURCE, PackageClient, read_pins, uv_environment, uv_options

ROOT = Path(__file__).resolve().parent.parent
MINORS = range(11, 14)


def main() -> int:
    """Rewrite the locks."""
    client = PackageClient(Path(sys.executable), ROOT / "logs" / "lock.log")
    client.log.parent.mkdir(exist_ok=True)
    client.fetch_uv(ROOT / "requirements" / "uv.txt", ROOT / ".venv" / "uv")
    if client.uv is None:
        print(
            "error: hashes come from uv; remove those of requirements/uv.txt if its pin is new",
            file=sys.stderr,
        )
        return 2
    settings = {
        key: value for key, value in client.settings.items() if key not in ("extra-index-url", "find-links")
    }
    uv = [str(client.uv), "--no-config", "pip", "compile", *uv_options(settings)]
    for lock in sorted((ROOT / "requirements").glob("*.txt")):
        if lock.stem == "torch-cpu":
            continue
        pins = {name: pin.split()[0] for name, pin in read_pins(lock).items()}
        packages = find_packages(list(pins.values()), uv, uv_environment(settings))
        parts = [line for line in lock.read_text().splitlines() if line.startswith("#")]
        for name, pin in pins.items():
            hashes = [f"--hash=sha256:{file['hashes']['sha256']}" for file in files_of(packages[name])]
            source = "" if packages[name].get("wheels") else f"  {FROM_SOURCE}"
            parts.append(" \\\n    ".join((pin, *sorted(hashes))) + source)
        lock.write_text("\n".join(parts) + "\n")
        print(f"{lock.relative_to(ROOT)}: {len(pins)} packages")
    return 0


def find_packages(pins: list[str], uv: list[str], environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The files of each pin, as pylock.toml describes them, by the package's normalised name."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "pins.txt"), Path(folder, "pylock.toml")
        asked.write_text("\n".join(pins).replace("===", "=="))
        what = [
            "--no-deps",
            "--universal",
            f"--python-version=3.{MINORS.start}",
            "--format=pylock.toml",
            "--quiet",
        ]
        command = [*uv, *what, "-o", str(answer), str(asked)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        return {one["name"]: one for one in tomllib.loads(answer.read_text())["packages"]}


def files_of(package: dict[str, Any]) -> list[dict[str, Any]]:
    """A package's wheels for the supported hosts; its source, where it has no wheel at all."""
    wheels = package.get("wheels", [])
    files = [wheel for wheel in wheels if fits(wheel["url"])] if wheels else [package["sdist"]]
    if not files:
        sys.exit(
            f"error: no wheel of {package['name']} fits Linux with Python 3.11-3.13; pin another version"
        )
    return files


def fits(wheel: str) -> bool:
    """Whether a host that the project supports could install this wheel."""
    pythons, abi, platforms = wheel.removesuffix(".whl").split("-")[-3:]
    if not any(
        name == "any" or (name.startswith(("manylinux", "linux")) and name.endswith(("_x86_64", "_aarch64")))
        for name in platforms.split(".")
    ):
        return False
    if abi not in ("none", "abi3"):
        return abi in {f"cp3{minor}" for minor in MINORS}
    tags = re.findall(r"(cp|py)3(\d*)", pythons)
    return any(
        int(minor or 0) < MINORS.stop and (abi == "abi3" or kind == "py" or int(minor) in MINORS)
        for kind, minor in tags
    )


if __name__ == "__main__":
    sys.exit(main())
