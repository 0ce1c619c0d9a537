"""No traceback reaches a terminal: one line with the cause, the log and the exit code, whatever goes wrong and when."""

import errno
import os
import re
import subprocess
import sys

import pytest

from slimqwen import variant
from slimqwen.cli import console, unexpected
from slimqwen.report import tables

ROOT = variant.repository_root()
LINE = re.compile(r"error: (?P<cause>.*); the traceback is in (?P<log>\S+)\n")


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    """Logs of errors go below the test's own folder."""
    monkeypatch.setattr(unexpected, "repository_root", lambda: tmp_path)
    return tmp_path / "logs"


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("two\nlines"), "unexpected ValueError: two lines"),
        (AssertionError(), "unexpected AssertionError"),
        (
            ImportError("no module named x"),
            "unexpected ImportError: no module named x; run `make install` to repair .venv",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a/b"),
            "/a/b: Permission denied; make it writable",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/a"), "/a: Read-only file system; make it writable"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; free some disk space"),
        (
            OSError(errno.EMFILE, "Too many open files", "/a"),
            "/a: Too many open files; allow more .*ulimit -n",
        ),
        (
            OSError("AF_UNIX path too long"),
            "AF_UNIX path too long; set TMPDIR to a folder with a shorter path",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            ".*No usable temporary directory found in .*; set TMPDIR to a folder that is writable",
        ),
        (OSError("no errno"), "unexpected OSError: no errno"),
        (MemoryError(), "unexpected MemoryError; free some memory"),
    ],
)
def test_any_exception_is_one_line_with_its_cause_and_a_log(monkeypatch, run_here, logs, error, cause):
    monkeypatch.setattr(tables, "variants_table", fail_with(error))
    code, _, said = run_here("variant", "list")
    line = LINE.fullmatch(said)
    assert code == 1
    assert re.match(cause, line["cause"])
    [log] = logs.iterdir()
    assert line["log"] == str(log)
    assert "Traceback" in log.read_text()
    assert f"raise error\n{type(error).__name__}" in log.read_text()


def test_where_no_log_can_be_written_the_cause_is_still_said(monkeypatch, run_here, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(unexpected, "repository_root", lambda: tmp_path / "file")
    monkeypatch.setattr(tables, "variants_table", fail_with(ValueError("x")))
    with monkeypatch.context() as patched:  # pytest makes temporary files too
        patched.setattr("tempfile.tempdir", str(tmp_path / "file"))
        first = run_here("variant", "list")
        patched.setattr("tempfile.gettempdir", fail_with(FileNotFoundError(errno.ENOENT, "No usable …")))
        second = run_here("variant", "list")
    for code, _, said in (first, second):
        assert (code, said) == (1, "error: unexpected ValueError: x; its traceback could not be written\n")


def python(code, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, **options
    )


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("import slimqwen.cli.no_such_module", 1, "unexpected ModuleNotFoundError: .*make install"),
        (
            "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
            0,
            "unexpected Zero",
        ),
    ],
)
def test_what_nobody_caught_is_one_line_too(tmp_path, code, exit_code, said):
    setup = (
        "import pathlib\nfrom slimqwen.cli import unexpected\n"
        f"unexpected.repository_root = lambda: pathlib.Path({str(tmp_path)!r})\n"
    )
    done = python(setup + code)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert re.match(said, LINE.fullmatch(done.stderr)["cause"])


def test_ctrl_c_during_the_imports_is_no_traceback():
    done = python("import slimqwen.cli, signal\nsignal.raise_signal(signal.SIGINT)")
    assert (done.returncode, done.stderr) == (-2, "interrupted\n")


def run_verb(tmp_path, shell):
    """Run a shell's line, in which $RUN is a verb that prints a long table."""
    code = (
        "import pathlib, sys\nfrom slimqwen.cli import app, unexpected\n"
        f"unexpected.repository_root = lambda: pathlib.Path({str(tmp_path)!r})\n"
        "sys.argv = ['slimqwen', 'variant', 'list']\napp.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CODE": code, "PYTHON": sys.executable}
    line = f'run() {{ "$PYTHON" -c "$CODE"; }}; {shell}'
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, timeout=120)


def test_output_that_nobody_reads_ends_a_command_quietly(tmp_path):
    done = run_verb(tmp_path, "run | true; echo ${PIPESTATUS[0]}")
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_a_full_disk_below_the_output_is_one_line(tmp_path):
    done = run_verb(tmp_path, "run > /dev/full; echo $?")
    assert done.stdout == "1\n"
    assert LINE.fullmatch(done.stderr)["cause"] == "No space left on device; free some disk space"


def test_a_command_without_output_or_errors_runs(tmp_path):
    done = run_verb(tmp_path, "(run >&- 2>&-); echo $?")
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_terminal_of_another_encoding_gets_what_it_can_show(tmp_path):
    done = run_verb(tmp_path, "export PYTHONIOENCODING=ascii; run > /dev/null; echo $?")
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_threads_of_torch_are_those_that_a_container_has_time_for(monkeypatch, run_here):
    monkeypatch.setattr(console, "allowed_cpus", lambda: 1)
    monkeypatch.setattr(console, "physical_cores", lambda: 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert run_here("--help")[0] == 0
    assert os.environ.pop("OMP_NUM_THREADS") == "1"


def test_a_file_that_this_user_may_not_read_is_not_called_unwritable(monkeypatch, tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read everything
    error = PermissionError(errno.EACCES, "Permission denied", str(file))
    cause = unexpected.describe_cause(error)
    assert (
        cause == f"{file}: Permission denied; make it readable for this user: its owner can, by `chmod a+r`"
    )
