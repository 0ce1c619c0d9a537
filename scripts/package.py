"""Build dist/slimqwen-….whl: the library and all that is shipped, so that `slimqwen` needs no checkout.

The wheel has no dependencies; `slimqwen install` puts the locked ones into its environment.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGING = ROOT / "build" / "package"
DIST = ROOT / "dist"

SHIPPED = [
    "Dockerfile",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "requirements",
    "scripts",
    "eval",
    "weights/tiny",
    *(f":(glob)experiments/*/{name}" for name in ("config.env", "recipe.yaml", "measurements.json")),
]
"""What git tracks under these patterns is a part of the package beside the library; records and tests are not."""

LIMIT_BYTES = 15_000_000


def main() -> int:
    """Build the wheel; print its path."""
    shutil.rmtree(STAGING, ignore_errors=True)
    copy_tracked(["slimqwen", "README.md", "LICENSE", "pyproject.toml"], STAGING)
    shipped = STAGING / "slimqwen" / "shipped"
    copy_tracked(SHIPPED, shipped)
    commit = git("rev-parse", "HEAD").strip()
    changed = bool(git("status", "--porcelain", "--untracked-files=no").strip())
    (shipped / "made-of-commit").write_text("" if changed else commit)
    DIST.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    built = subprocess.run(
        [*pip, "--no-build-isolation", "--no-deps", "--wheel-dir", str(DIST), str(STAGING)]
    )
    if built.returncode:
        print("error: the wheel was not built; `make install` repairs the environment", file=sys.stderr)
        return 2
    wheel = max(DIST.glob("slimqwen-*.whl"), key=lambda file: file.stat().st_mtime_ns)
    size = wheel.stat().st_size
    if size > LIMIT_BYTES:
        print(f"error: {wheel} has {size:,} bytes, {LIMIT_BYTES:,} are allowed; ship less", file=sys.stderr)
        return 2
    print(f"dist/{wheel.name}: {size / 1e6:.1f} MB; `uv pip install` it, then `slimqwen install`")
    return 0


def git(*arguments: str) -> str:
    """Output of a git command about this checkout."""
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout


def copy_tracked(patterns: list[str], target: Path) -> None:
    """Copy the files that git tracks under patterns, with their paths."""
    for name in git("ls-files", "-z", "--", *patterns).split("\0"):
        if name:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


if __name__ == "__main__":
    sys.exit(main())
