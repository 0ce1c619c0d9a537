import json
import subprocess
import sys

import pytest

from slimqwen.records.journal import RunInProgressError, locked

ASK = {"prompt": [1, 2], "max_tokens": 4}


def test_answers_outlive_the_process_that_was_given_them(tmp_path):
    """The process is killed without a chance to close anything."""
    file = tmp_path / "run" / "answers.jsonl"
    script = (
        "import os, pathlib, sys\n"
        "from slimqwen.records.journal import locked\n"
        "with locked(pathlib.Path(sys.argv[1])) as answers:\n"
        f"    answers.add({ASK!r}, [['salz ü', 'stop', 3]])\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, file], check=False).returncode == -9
    with locked(file) as answers:
        assert (answers.reused, len(answers)) == (0, 1)
        # The order in which a request names its fields says nothing.
        assert answers.get(dict(reversed(ASK.items()))) == [["salz ü", "stop", 3]]
        assert answers.reused == 1
        assert answers.get(ASK | {"max_tokens": 5}) is None
        # What was used counts, not what was there.
        assert answers.reused == 1


def test_half_a_line_of_a_dying_process_is_dropped(tmp_path):
    file = tmp_path / "answers.jsonl"
    with locked(file) as answers:
        for number in range(3):
            answers.add(number, number)
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with locked(file) as answers:
        assert [answers.get(number) for number in range(3)] == [0, 1, None]
        answers.add(2, "again")
    with locked(file) as answers:
        assert [answers.get(number) for number in range(3)] == [0, 1, "again"]
    assert [json.loads(line)[1] for line in file.read_text().splitlines()] == [0, 1, "again"]


def test_an_answer_of_this_run_is_known_at_once_and_not_reused(tmp_path):
    with locked(tmp_path / "answers.jsonl") as answers:
        answers.add(ASK, 1)
        assert answers.get(ASK) == 1
        assert answers.reused == 0


def test_a_second_process_is_refused_and_a_finished_run_forgotten(tmp_path):
    file = tmp_path / "answers.jsonl"
    with locked(file) as answers:
        answers.add(ASK, 1)
        with pytest.raises(RunInProgressError, match=r"answers\.jsonl\); wait for its end"), locked(file):
            pass
        answers.discard()
    with locked(file) as answers:
        assert answers.reused == 0
