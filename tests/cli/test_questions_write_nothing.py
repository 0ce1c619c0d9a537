"""Looking changes nothing: a verb that answers a question writes no tracked file and no record, unless asked to."""

import subprocess

import pytest

from slimqwen import variant

ROOT = variant.repository_root()
QUESTIONS = [
    "variant list",
    "serve --variant tiny --dry-run",
    "recipe run --variant tiny-best --dry-run",
    "fit qwen3.5-4b-best --gpu a10g",
    "fit qwen3.5-4b-best --gpu rtx-3090 --waterfall",
    "compare",
    "compare tiny tiny-best",
    "fit qwen3.5-4b-best",
    "report --check",
    "report --output {folder}",
    pytest.param("plan --variant tiny --gpu cpu", marks=pytest.mark.engine),
]


def state():
    """What git sees, and every file among the records, those that git ignores too."""
    words = ["git", "-C", str(ROOT), "-c", f"safe.directory={ROOT}", "status", "--porcelain"]
    seen = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    files = {file: file.stat().st_mtime_ns for file in (ROOT / "experiments").rglob("*")}
    return seen, files


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_writes_nothing_that_git_sees_and_no_record(question, run_here, tmp_path):
    before = state()
    code, said, error = run_here(*question.format(folder=tmp_path).split())
    assert code == 0, error
    assert said
    assert state() == before
