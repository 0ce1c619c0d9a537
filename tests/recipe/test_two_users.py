"""Two users, whose files are their group's, run one recipe at once: it is made once, and who waits is told for whom."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from slimqwen.workspace import create_workspace

USERS, GROUP = (65534, 5), 12345


def run_as(user: int, command: list[str], folder: Path) -> subprocess.Popen:
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
def folder():
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
def python(folder):
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


def test_one_makes_the_output_and_the_other_waits_for_a_named_process_and_reuses_it(folder, python):
    slimqwen = [python, "-m", "slimqwen.cli"]
    new = "variant new --name mine --base tiny --stage quantise_lm_head"
    made = run_as(USERS[0], [*slimqwen, *new.split()], folder)
    assert made.wait(300) == 0, made.communicate()
    both = [run_as(user, [*slimqwen, "recipe", "run", "mine"], folder) for user in USERS]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(word for text in said for word in re.findall(r"quantise_lm_head +(done|reused)", text)) == [
        "done", "reused",
    ]  # fmt: skip
    (told,) = re.findall(r"another run is at work on quantise_lm_head \(process (\d+) of ", "".join(said))
    assert int(told) in [process.pid for process in both]
    assert (
        len([path for path in (folder / "ours" / "weights" / "store").iterdir() if path.name[0] != "."]) == 1
    )
    cleaned = run_as(USERS[1], [*slimqwen, "recipe", "clean"], folder)
    assert "freed 0.0 MB" in cleaned.communicate(timeout=120)[0]
