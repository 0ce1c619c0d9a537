"""What a clone gets, on any system and whatever git is set up to change."""

import subprocess
from pathlib import Path

import pytest

from slimqwen import variant

ROOT = variant.repository_root()


@pytest.mark.parametrize(
    "setting", ["core.autocrlf=true", "core.eol=crlf", "filter.lfs.smudge=false", "core.symlinks=false"]
)
def test_a_clone_has_the_bytes_that_were_committed(tmp_path: Path, setting: str):
    attributes = tmp_path / "attributes"
    attributes.write_text("*.safetensors filter=lfs\n*.md text ident\n")
    settings = ("-c", f"safe.directory={ROOT}", "-c", f"core.attributesFile={attributes}", "-c", setting)
    clone = tmp_path / "clone"
    subprocess.run(
        ["git", *settings, "clone", "-q", "--shared", ROOT, clone], check=True, capture_output=True
    )
    git = ["git", "-C", clone]
    listed = subprocess.run([*git, "ls-tree", "-r", "HEAD"], capture_output=True, text=True, check=True)
    entries = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]
    names = "\n".join(name for *_, name in entries)
    stored = [digest for _, _, digest, _ in entries]
    plain = subprocess.run([*git, "hash-object", "--no-filters", "--stdin-paths"], cwd=clone, input=names,
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert plain.stdout.split() == stored
