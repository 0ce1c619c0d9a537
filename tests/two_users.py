"""Two users of one group with one workspace: programs that run as each of them."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimqwen.workspace import create_workspace

USERS, GROUP = (65534, 5), 12345


def run_as(user: int, command: list[str], folder: Path) -> "subprocess.Popen[str]":
    """Start a command as a user, in the workspace of both."""
    home = folder / f"home-{user}"
    home.mkdir(exist_ok=True)
    os.chown(home, user, GROUP)
    named = {"HOME": str(home), "SLIMQWEN_HOME": str(folder / "ours"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder / "ours", env=os.environ | named, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        user=user, group=GROUP, extra_groups=[], umask=0o002,
    )  # fmt: skip


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the group, with a workspace of the first user."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a program as another user")
    made = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    create_workspace(made / "ours")
    for path in (made, *made.rglob("*")):
        os.chown(path, USERS[0], GROUP)
        path.chmod(0o2775 if path.is_dir() else 0o664)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def python(folder: Path) -> str:
    """A Python with the packages of this one that both users may run."""
    own = folder / "env" / "bin" / "python"
    system = Path(f"/usr/bin/python3.{sys.version_info.minor}")
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "pyvenv.cfg").write_text(f"home = {system.parent}\n")
    (folder / "env" / "lib").symlink_to(Path(sysconfig.get_path("purelib")).parents[1])
    own.symlink_to(system)
    for program in (sys.executable, str(own)):
        try:
            done = run_as(USERS[0], [program, "-c", "import slimqwen, torch"], folder)
        except OSError:
            continue
        if done.wait(120) == 0:
            return program
    pytest.skip("no Python here may be run by another user")
