"""What is printed, warned or written by compiled code goes to the log, and nothing after it does."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slimqwen.captured_log import capture_output


@pytest.fixture(autouse=True)
def logging_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of earlier tests may have given the root logger a handler or a level, or have silenced all of them."""
    noisy = logging.getLogger("noisy")
    monkeypatch.setattr(noisy, "propagate", False)
    monkeypatch.setattr(noisy, "disabled", False)
    monkeypatch.setattr(noisy.manager, "disable", logging.NOTSET)
    noisy.setLevel(logging.WARNING)


def test_prints_warnings_and_compiled_code_go_to_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "logs" / "one.log"
    with capture_output(log, "noisy"):
        sys.stdout.write("printed\n")
        sys.stderr.write("to standard error\n")
        logging.getLogger("noisy").warning("warned")
        os.write(2, b"by compiled code\n")
        subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('by a child\\n')"], check=True)
    assert sorted(log.read_text().splitlines()) == sorted(
        ["printed", "to standard error", "warned", "by compiled code", "by a child"]
    )
    assert capfd.readouterr() == ("", "")


def test_everything_is_as_it_was_after_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "one.log"
    opened = psutil.Process().num_fds()
    with pytest.raises(ValueError, match="broken"), capture_output(log, "noisy"):
        raise ValueError("broken")
    sys.stdout.write("shown\n")
    os.write(2, b"shown too\n")
    logging.getLogger("noisy").error("no more")
    assert log.read_text() == ""
    out, err = capfd.readouterr()
    assert out == "shown\n"
    assert "shown too\n" in err
    assert psutil.Process().num_fds() == opened
