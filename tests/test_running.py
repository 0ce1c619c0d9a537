"""What a process publishes of its work, and what is found of it; a process of its own where it must die."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import running
from slimqwen.running import Activity, Work

COMMAND = ["scripts/eval_latency.py", "--variant", "tiny", "tiny-awq", "--rounds", "2"]

WORKER = """
import sys, time
from pathlib import Path
from slimqwen import running

with running.publishing(Path(sys.argv[1]), sys.argv[1:]) as tell:
    tell("counting", 3, 10)
    print("up", flush=True)
    sys.stdin.readline()
"""


def published(root: Path, meets: Callable[[Work], bool]) -> Work:
    """The one work that is published, once it meets a condition: a thread writes it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for work in running.find(root):
            if meets(work):
                return work
        time.sleep(0.02)
    raise AssertionError(f"not published: {running.find(root)}")


def done_of(work: Work) -> float | None:
    """How much of the latest activity is done."""
    return work.activities[-1].done if work.activities else None


def file_of(root: Path, pid: int | None = None) -> Path:
    return root / "logs" / "running" / f"{pid or os.getpid()}.json"


@pytest.fixture
def worker(tmp_path):
    """A process that publishes in tmp_path until its standard input ends."""
    started = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert started.stdout.readline() == b"up\n"
    published(tmp_path, lambda work: bool(work.activities))
    yield started
    started.kill()
    started.communicate()


def test_secrets_of_a_command_are_not_published(tmp_path):
    words = ["scripts/export_mlflow.py", "--uri", "http://me:hunter2@host"]
    with running.publishing(tmp_path, words):
        assert published(tmp_path, bool).command == [*words[:2], "http://<redacted>@host"]
        assert "hunter2" not in file_of(tmp_path).read_text()


def test_work_is_published_with_its_command_its_variants_and_its_activities(tmp_path):
    with running.publishing(tmp_path, COMMAND) as tell:
        tell("sending", 3, 48)
        work = published(tmp_path, lambda work: bool(work.activities))

    assert (work.pid, work.command, work.variants) == (os.getpid(), COMMAND, ["tiny", "tiny-awq"])
    assert [(one.name, one.done, one.total) for one in work.activities] == [("sending", 3, 48)]
    assert work.began <= work.activities[0].began <= time.time()


def test_work_that_has_told_nothing_yet_is_published_already(tmp_path):
    with running.publishing(tmp_path, ["scripts/demo.py"]):
        work = published(tmp_path, lambda work: True)

    assert (work.variants, work.activities, work.current) == ([], [], [])


def test_the_last_word_is_published_even_where_words_come_faster_than_files_are_written(tmp_path):
    with running.publishing(tmp_path, COMMAND) as tell:
        for done in range(5001):
            tell("sending", done, 10000)
        assert published(tmp_path, lambda work: done_of(work) == 5000)


def test_a_file_is_written_four_times_a_second_at_most_and_never_seen_in_halves(tmp_path):
    seen = set()
    until = time.monotonic() + 1.2
    with running.publishing(tmp_path, COMMAND) as tell:
        done = 0
        while time.monotonic() < until:
            tell("sending", done, 1e9)
            done += 1
            if file_of(tmp_path).exists():
                content = Work.model_validate_json(file_of(tmp_path).read_bytes())
                seen.update(one.done for one in content.activities)

    assert 2 <= len(seen) <= 6


def test_telling_costs_the_worker_microseconds(tmp_path):
    with running.publishing(tmp_path, COMMAND) as tell:
        started = time.process_time()
        for done in range(20_000):
            tell("sending", done, 20_000)
        assert (time.process_time() - started) / 20_000 < 100e-6


def test_the_file_is_gone_when_the_work_has_ended_even_by_an_error(tmp_path):
    def divide():
        with running.publishing(tmp_path, COMMAND) as tell:
            tell("dividing", 0, 1)
            published(tmp_path, lambda work: bool(work.activities))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        divide()
    assert running.find(tmp_path) == []
    assert list(file_of(tmp_path).parent.iterdir()) == []


def test_work_goes_on_where_nothing_can_be_written(tmp_path, capfd):
    (tmp_path / "logs").write_text("a file where the folder should be")
    with running.publishing(tmp_path, COMMAND) as tell:
        tell("sending", 1, 2)
        time.sleep(0.3)
        tell("sending", 2, 2)
    assert running.find(tmp_path) == []
    assert capfd.readouterr().err == ""


def test_work_goes_on_where_no_thread_can_be_started(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with running.publishing(tmp_path, COMMAND) as tell:
        tell("sending", 1, 2)
    assert running.find(tmp_path) == []


def test_two_processes_are_two_works_the_older_first(tmp_path, worker):
    with running.publishing(tmp_path, COMMAND):
        published(tmp_path, lambda work: work.pid == os.getpid())
        assert [work.pid for work in running.find(tmp_path)] == [worker.pid, os.getpid()]


def test_what_a_killed_process_left_is_no_work_and_is_removed(tmp_path, worker):
    file_of(tmp_path, worker.pid).with_suffix(".json.part").write_text("{")
    worker.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while running.find(tmp_path) and time.monotonic() < deadline:  # it may be a zombie: not collected yet
        time.sleep(0.02)

    assert running.find(tmp_path) == []
    assert list(file_of(tmp_path).parent.iterdir()) == []


def test_a_file_of_an_earlier_process_of_the_same_number_is_no_work_and_is_removed(tmp_path, worker):
    file = file_of(tmp_path, worker.pid)
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"process_started": content["process_started"] - 3600}))

    assert running.find(tmp_path) == []
    assert not file.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (f"{os.getpid()}.json", '{"pid": 1'),
        (f"{os.getpid()}.json", ""),
        (f"{os.getpid()}.json", '{"some": "other file"}'),
        (f"{os.getpid()}.json", "[]"),
        ("notes.json", "{}"),
        (f"{os.getpid()}.json.part", "{}"),
    ],
)
def test_half_written_and_foreign_files_are_passed_over_and_left_alone(tmp_path, worker, name, content):
    file = file_of(tmp_path).with_name(name)
    file.write_text(content)

    assert [work.pid for work in running.find(tmp_path)] == [worker.pid]
    assert file.read_text() == content


def test_a_copy_under_another_living_process_s_number_is_not_work(tmp_path, worker):
    file_of(tmp_path).write_bytes(file_of(tmp_path, worker.pid).read_bytes())

    assert [work.pid for work in running.find(tmp_path)] == [worker.pid]


def test_a_repository_without_logs_has_no_work(tmp_path):
    assert running.find(tmp_path) == []


def test_an_activity_that_begins_anew_is_timed_anew(tmp_path):
    with running.publishing(tmp_path, COMMAND) as tell:
        tell("start tiny", 30.0, 0)
        tell("loading", 0, 0)
        first = published(tmp_path, lambda work: len(work.activities) == 2).activities
        tell("start tiny", 0.5, 0)
        tell("loading", 0, 0)
        second = published(tmp_path, lambda work: work.activities[-1].told > first[-1].told).activities

    assert [one.name for one in second] == ["start tiny", "loading"]
    assert second[0].began > first[0].began
    assert second[0].done_before == 0.5
    assert second[1].began > first[1].began


def test_a_counted_activity_that_others_interrupt_keeps_its_beginning(tmp_path):
    with running.publishing(tmp_path, COMMAND) as tell:
        tell("starts", 0, 6)
        tell("start tiny", 5.0, 0)
        first = published(tmp_path, lambda work: len(work.activities) == 2).activities[0]
        tell("starts", 1, 6)
        second = published(tmp_path, lambda work: done_of(work) == 1).activities[-1]

    assert (first.name, second.name) == ("starts", "starts")
    assert second.began == first.began


def test_of_many_activities_the_latest_are_kept(tmp_path):
    with running.publishing(tmp_path, COMMAND) as tell:
        for number in range(500):
            tell(f"task {number}", 1, 1)
        work = published(tmp_path, lambda work: [one.name for one in work.activities][-1:] == ["task 499"])

    assert len(work.activities) == 20


def activity(name: str = "sending", done: float = 0, total: float = 0, **more: float) -> Activity:
    times = {"done_before": 0.0, "began": 1000.0, "told": 1000.0} | more
    return Activity(name=name, done=done, total=total, **times)


def test_it_is_at_what_was_told_last_and_at_what_is_not_over():
    activities = [
        activity("packing", 5, 5),
        activity("loading"),
        activity("starts", 1, 6),
        activity("start tiny", 3.0, 0),
    ]
    work = Work(pid=1, process_started=0, command=["x"], variants=[], began=0, activities=activities)
    assert [one.name for one in work.current] == ["starts", "start tiny"]


def test_the_time_left_follows_from_the_pace_and_runs_down_between_two_words():
    one = activity(done=30, total=90, told=1060.0)
    assert one.seconds_left(1060.0) == 120
    assert one.seconds_left(1070.0) == 110
    assert one.seconds_left(9999.0) == 0


def test_what_an_earlier_run_had_done_does_not_count_for_the_pace():
    assert activity(done=80, total=90, done_before=60.0, told=1040.0).seconds_left(1040.0) == 20


@pytest.mark.parametrize(("done", "total"), [(0, 10), (5, 0)])
def test_no_time_left_is_told_before_anything_is_done_or_where_the_end_is_unknown(done, total):
    assert activity(done=done, total=total, told=1010.0).seconds_left(1010.0) is None
