import fcntl
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from slimqwen import checkpoint, variant
from slimqwen.records import provenance
from slimqwen.records.journal import RunInProgressError, journal_file, locked
from slimqwen.serving.command import ServerCommand

ASK = {"prompt": [1, 2], "max_tokens": 4}


def test_answers_outlive_the_process_that_was_given_them(tmp_path):
    """The process is killed without a chance to close anything."""
    file = tmp_path / ".cache" / "quality" / "answers.jsonl"
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
        assert (answers.reused, len(answers)) == (0, 1)
        answers.add(ASK | {"max_tokens": 5}, 2)
        assert len(answers) == 2


def test_an_answer_that_is_known_is_not_made_again(tmp_path):
    with locked(tmp_path / "answers.jsonl") as answers:
        assert [answers.answer(ASK, lambda made=made: made) for made in (1, 2)] == [1, 1]


def test_a_second_process_is_refused_and_a_finished_run_forgotten(tmp_path):
    file = tmp_path / "answers.jsonl"
    with locked(file) as answers:
        answers.add(ASK, 1)
        with pytest.raises(RunInProgressError, match=r"answers\.jsonl\); wait until it ends"), locked(file):
            pass
        answers.discard()
    with locked(file) as answers:
        assert answers.reused == 0


def test_a_run_whose_journal_was_deleted_meanwhile_ends_as_any_other(tmp_path):
    file = tmp_path / "answers.jsonl"
    with locked(file) as answers:
        answers.add(ASK, 1)
        file.unlink()
        answers.discard()
    assert not file.exists()


@pytest.mark.parametrize("is_new", [False, True])
def test_a_run_that_ends_while_another_waits_for_its_journal_is_not_made_again(tmp_path, monkeypatch, is_new):
    """The first process deletes its journal between the second's opening and locking of it."""
    file = tmp_path / "answers.jsonl"

    def flock(stream, operation):
        file.rename(tmp_path / "ended")
        if is_new:
            file.touch()

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunInProgressError, match="just ended the same measurement"), locked(file):
        pass


def test_a_journal_belongs_to_all_that_decides_an_answer_and_to_no_port(monkeypatch):
    tiny = variant.load("tiny")
    command = ServerCommand.resolve(tiny, port=1, platform="cpu")
    file = journal_file("quality", command, ["a question"])
    assert file.parent == tiny.root / ".cache" / "quality"
    assert re.fullmatch(r"tiny_[0-9a-f]{16}\.jsonl", file.name)
    assert (
        journal_file("quality", replace(command, flags={**command.flags, "port": 2}), ["a question"]) == file
    )
    others = [
        journal_file("quality", command, ["another question"]),
        journal_file("quality", replace(command, flags={**command.flags, "dtype": "half"}), ["a question"]),
        journal_file("quality", replace(command, environment={}), ["a question"]),
        journal_file(
            "quality", replace(command, flags={**command.flags, "chat-template": "Makefile"}), ["a question"]
        ),
    ]
    other_machine = provenance.hardware().model_copy(update={"cpu_count": 99})
    patches = [
        (checkpoint, "digest", lambda *_: "0" * 16),
        (provenance, "package_versions", dict),
        (provenance, "hardware", lambda: other_machine),
    ]
    for module, name, changed in patches:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, changed)
            others.append(journal_file("quality", command, ["a question"]))
    assert len({file, *others}) == 1 + 7
