"""Options that several verbs share."""

import subprocess
import sys

from slimqwen import variant

ROOT = variant.repository_root()


def test_completion_names_the_variants():
    ended = subprocess.run(
        [sys.executable, "-m", "slimqwen.cli"],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "_SLIMQWEN_COMPLETE": "complete_bash",
            "COMP_WORDS": "slimqwen serve --variant tiny-a",
            "COMP_CWORD": "3",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.stdout.split() == ["tiny-awq"]
