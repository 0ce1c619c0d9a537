"""`make gpu-check`: every step on the GPU of this host, or rehearsed on its CPU (REHEARSE=1), the worthiest first.

STEPS=b,a chooses steps and their order; a step that has passed with this code is skipped, unless FRESH=1.
"""

import os
from pathlib import Path

import pytest

from slimqwen import variant
from tests import tracked_copy
from tests.gpu.steps import STEPS, Result, run_step

CHECKOUT = Path(os.environ.get(tracked_copy.CHECKOUT) or variant.repository_root())
CHOSEN = [letter for letter in os.environ.get("STEPS", "").replace(" ", "").split(",") if letter] or list(
    STEPS
)
RESULTS: dict[str, Result] = {}
"""What each step came to, for the last line (tests/gpu/conftest.py)."""


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("letter", CHOSEN)
def test_step(letter: str, capsys: pytest.CaptureFixture[str]) -> None:
    if letter not in STEPS:
        pytest.fail(f"there is no step {letter}; choose among {', '.join(sorted(STEPS))}", pytrace=False)
    result = RESULTS[letter] = run_step(letter, CHECKOUT, fresh=os.environ.get("FRESH") == "1")
    when = f"in {result.seconds:.0f} s" if result.again else "before, FRESH=1 repeats it"
    with capsys.disabled():
        print(f"\n{letter} {STEPS[letter]}: {result.status} {when}: {result.line}", flush=True)  # noqa: T201
    if result.status == "failed":
        pytest.fail(result.line, pytrace=False)
    if result.status != "passed":
        pytest.skip(result.line)
