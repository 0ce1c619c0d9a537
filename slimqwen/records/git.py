"""The git state of a checkout or workspace: its commit, its changes, the files that git tracks."""

import os
import subprocess
from pathlib import Path

from slimqwen.records.record import Git
from slimqwen.workspace import MADE_OF

_NOT_CODE = (
    ":(exclude)experiments/*.json",
    ":(exclude)experiments/*.jsonl",
    ":(exclude)experiments/*.svg",
    ":(exclude)*.md",
)


def git_state(root: Path) -> Git:
    """The commit of a repository, and whether files other than records and Markdown differ from it.

    Both are None outside a checkout. For an installed package it is the commit from which the package was built.
    """
    if (made_of := root / MADE_OF).is_file():
        return Git(commit=made_of.read_text(encoding="utf-8").strip() or None, dirty=False)
    try:
        commit = run_git(root, "rev-parse", "HEAD").strip()
        changes = run_git(root, "status", "--porcelain", "--", ".", *_NOT_CODE).strip()
    except (OSError, subprocess.CalledProcessError):
        return Git(commit=None, dirty=None)
    return Git(commit=commit, dirty=bool(changes))


def run_git(root: Path, *arguments: str) -> str:
    """Output of a git command about the repository whose top folder is `root`, even if another user owns it.

    It never asks another repository, even if a copy without .git lies inside one, or if this process is a git hook, for
    which git sets GIT_DIR, GIT_INDEX_FILE and others.

    Raises:
        OSError: there is no git.
        CalledProcessError: git failed, or `root` is no checkout.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Programs that the repository's own configuration names are not run: it may be another user's.
    quiet = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    command = [
        "git",
        "-C",
        str(root),
        *quiet,
        f"--git-dir={root / '.git'}",
        f"--work-tree={root}",
        *arguments,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=True, env=environment
    ).stdout


def tracked_files(root: Path, *patterns: str) -> frozenset[str] | None:
    """Paths, relative to `root`, that git tracks under these patterns; None where `root` is no checkout."""
    try:
        return frozenset(run_git(root, "ls-files", "-z", "--", *patterns).split("\0")) - {""}
    except (OSError, subprocess.CalledProcessError):
        return None
