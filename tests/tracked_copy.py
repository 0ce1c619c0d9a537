"""The folder that tests run in: a copy of what git tracks, so that no test sees what a person has made beside it.

A checkout that is in use holds weights, records, variants, settings and caches of its own; a shipped variant may be
changed or gone. Code lies in the copy as it lies in the checkout, new files included: that is what a person tests. All
else is as git's index has it, so `git add` is what makes a change of it part of the tests.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

VARIABLE = "SLIMQWEN_TRACKED_COPY"
"""Environment variable with the folder of the copy, for pytest in it and for all that it starts."""

CHECKOUT = "SLIMQWEN_CHECKOUT"
"""Environment variable with the checkout, for what a test is there to write: files that `git add` takes."""

LEFT_OUT = "SLIMQWEN_NOT_TESTED"
"""Environment variable with the changed files, one a line, that the copy has as git's index has them."""

AS_TRACKED = ("docs", "eval", "experiments", "weights", "README.md")
"""What the verbs of `slimqwen` write, and settings that a person edits."""

_CODE = ("conftest.py", "slimqwen", "tests", "scripts", "tools")
"""Where new files are copied before `git add`."""

_KEPT = (".git", ".venv", ".pytest_cache", "__pycache__")
_OUTPUTS = re.compile(r"(--(?:junit-?xml|basetemp|log-file|report-log)=)(.+)")


def is_here(root: Path) -> bool:
    """Whether pytest runs in the copy, or without git, so that nothing says which files belong to the project."""
    has_git = (root / ".git").exists() and shutil.which("git") is not None
    return os.environ.get(VARIABLE) == str(root) or not has_git


def start_again(root: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by pytest in the copy, with the same arguments and in the same folder of it."""
    copy = lock_copy(root / ".cache" / "tests")
    left_out = fill(copy, root)
    here = Path.cwd()
    folder = copy / here.relative_to(root) if here.is_relative_to(root) else here
    variables = {
        VARIABLE: str(copy),
        CHECKOUT: str(root),
        LEFT_OUT: "\n".join(left_out),
        # Programs that tests start import slimqwen from here, not from where it is installed.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")])),
    }
    words = [_OUTPUTS.sub(lambda found: f"{found[1]}{here / found[2]}", word) for word in arguments]
    moved = [word.replace(f"{root}{os.sep}tests", f"{copy}{os.sep}tests") for word in words]
    os.chdir(folder if folder.is_dir() else copy)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *moved], os.environ | variables)


def lock_copy(folder: Path) -> Path:
    """The first copy in a folder that no other run uses; it stays locked until this process and its forks end."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        handle = os.open(folder / f"{number}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            number += 1
            continue
        os.set_inheritable(handle, True)  # exec would close it
        return folder / str(number)


def fill(copy: Path, root: Path) -> list[str]:
    """Make a folder the copy of a checkout, whatever it held; returns the changed files that it has as tracked."""
    tracked = _names(root, "ls-files")
    changed = {name for name in _names(root, "ls-files", "--modified") if name.split("/")[0] in AS_TRACKED}
    new = _names(root, "ls-files", "--others", "--exclude-standard", "--", *_CODE)
    sources = {name: root / name for name in {*tracked, *new} - changed if os.path.lexists(root / name)}
    _delete_others(copy, {*sources, *changed})
    for name, source in sources.items():
        _copy(source, copy / name)
    _make_repository(copy, root)
    for name in changed:
        (copy / name).unlink(missing_ok=True)
    _git(copy, "checkout-index", "-z", "--stdin", given="".join(f"{name}\0" for name in changed))
    _git(copy, "update-index", "-q", "--refresh", check=False)
    return sorted(changed)


def _delete_others(copy: Path, names: set[str]) -> None:
    """Delete every file that is not among the names, and folders that are empty then; caches of Python stay."""
    for parent, folders, files in os.walk(copy, topdown=False):
        inside = Path(parent).relative_to(copy)
        if not any(part in _KEPT for part in inside.parts):
            for name in [*files, *folders]:
                path = Path(parent, name)
                if path.is_symlink() or not path.is_dir():
                    if (inside / name).as_posix() not in names and name not in _KEPT:
                        path.unlink()
                elif not any(path.iterdir()):
                    path.rmdir()


def _copy(source: Path, copied: Path) -> None:
    """Copy a file with its time, by which Python knows that compiled code is of it; an equal one stays."""
    if copied.is_symlink() or copied.is_file():
        old, new = copied.lstat(), source.lstat()
        if (old.st_mtime_ns, old.st_size, old.st_mode) == (new.st_mtime_ns, new.st_size, new.st_mode):
            return
        copied.unlink()
    copied.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, copied, follow_symlinks=False)


def _make_repository(copy: Path, root: Path) -> None:
    """A repository of its own, with the checkout's commit, main branch and index; objects stay in the checkout's."""
    shutil.rmtree(copy / ".git", ignore_errors=True)
    copy.mkdir(exist_ok=True)
    _git(copy, "init", "-q", "--template=")
    place = {
        name: root / _git(root, "rev-parse", "--git-path", name).strip() for name in ("objects", "shallow")
    }
    for name, text in {
        "objects/info/alternates": f"{place['objects'].resolve()}\n",
        "info/exclude": "/.venv\n/.pytest_cache\n",
    }.items():
        (copy / ".git" / name).parent.mkdir(exist_ok=True)
        (copy / ".git" / name).write_text(text, encoding="utf-8")
    if place["shallow"].is_file():
        shutil.copy2(place["shallow"], copy / ".git" / "shallow")
    branches = ("refs/remotes/origin/main", "refs/remotes/origin/master")
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD", check=False).strip()
    seen = _git(root, "for-each-ref", "--format=%(objectname) %(refname)", *branches).splitlines()
    for line in [*([f"{head} HEAD"] if head else []), *seen]:
        commit, name = line.split()
        _git(copy, "update-ref", name, commit)
    _git(copy, "update-index", "-z", "--index-info", given=_git(root, "ls-files", "--stage", "-z"))
    if not os.path.lexists(copy / ".venv") and (root / ".venv").is_dir():
        (copy / ".venv").symlink_to(root / ".venv")


def _names(root: Path, *words: str) -> list[str]:
    """The names that a git command lists."""
    words = (words[0], "-z", *words[1:])
    return [name for name in dict.fromkeys(_git(root, *words).split("\0")) if name]


def _git(root: Path, *words: str, given: str | None = None, check: bool = True) -> str:
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
    environment = dict(_without_git(os.environ))
    done = subprocess.run(
        command, input=given, env=environment, capture_output=True, text=True, errors="surrogateescape"
    )
    if check and done.returncode:
        sys.exit(f"the tests need git to know which files belong to the project: {done.stderr.strip()}")
    return done.stdout


def _without_git(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables without those by which git takes another repository, as a hook of git has them."""
    return ((name, value) for name, value in environment.items() if not name.startswith("GIT_"))
