"""What a running command publishes, and what another finds of it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slimqwen.cli.watch import activity
from slimqwen.cli.watch.activity import Activity, Work

COMMAND = ["slimqwen", "record", "mlflow", "--uri", "http://me:hunter2@host"]
WORKER = """
import sys
from pathlib import Path
from slimqwen.cli.watch import activity

with activity.publish(Path(sys.argv[1]), ["slimqwen", "demo"]) as report:
    report("counting", 3, 10)
    print("up", flush=True)
    sys.stdin.readline()
"""


def wait_for(root, meets=lambda work: True):
    """The one command that is published, once it meets a condition: a thread writes it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for work in activity.running(root):
            if meets(work):
                return work
        time.sleep(0.02)
    raise AssertionError(activity.running(root))


def file_of(root, pid=None):
    return root / "logs" / "running" / f"{pid or os.getpid()}.json"


@pytest.fixture
def worker(tmp_path):
    """A process that publishes in tmp_path until its standard input ends."""
    started = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert started.stdout.readline() == b"up\n"
    wait_for(tmp_path, lambda work: "counting" in work.activities)
    yield started
    started.kill()
    started.communicate()


def test_a_command_is_published_without_secrets_while_it_runs(tmp_path):
    with activity.publish(tmp_path, COMMAND) as report:
        assert wait_for(tmp_path).command == [*COMMAND[:4], "http://<redacted>@host"]
        report("sending", 3, 48)
        sending = wait_for(tmp_path, lambda work: bool(work.activities)).activities["sending"]
        assert (sending.done, sending.total) == (3, 48)
        assert "hunter2" not in file_of(tmp_path).read_text()


def test_nothing_is_left_of_a_command_that_ended_by_an_error(tmp_path):
    def fail():
        with activity.publish(tmp_path, COMMAND):
            wait_for(tmp_path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(file_of(tmp_path).parent.iterdir()) == []


def test_the_last_report_is_published_also_where_reports_come_faster_than_files_are_written(tmp_path):
    with activity.publish(tmp_path, COMMAND) as report:
        for done in range(1, 20_001):
            report("counting", done, 20_000)
        wait_for(tmp_path, lambda work: bool(work.activities) and work.activities["counting"].done == 20_000)


def test_the_file_is_written_four_times_a_second_at_most(tmp_path, monkeypatch):
    writes, replace = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda part, file: (writes.append(file), replace(part, file))[1])
    with activity.publish(tmp_path, COMMAND) as report:
        begin = time.monotonic()
        while time.monotonic() - begin < 1:
            report("counting", time.monotonic(), 0)
    assert 2 <= len(writes) <= 1 + 4 * (time.monotonic() - begin)


def test_work_goes_on_where_nothing_can_be_written_or_no_thread_be_started(tmp_path, monkeypatch):
    (tmp_path / "logs").write_text("a file")
    with activity.publish(tmp_path, COMMAND) as report:
        report("counting", 1, 2)
    monkeypatch.setattr(
        threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no threads"))
    )
    with activity.publish(tmp_path, COMMAND) as report:
        report("counting", 2, 2)


def test_two_processes_are_two_commands_the_older_first(tmp_path, worker):
    with activity.publish(tmp_path, COMMAND):
        wait_for(tmp_path, lambda work: work.pid == worker.pid)
        deadline = time.monotonic() + 60
        while len(result := activity.running(tmp_path)) < 2:
            assert time.monotonic() < deadline
    assert [work.pid for work in result] == [os.getpid(), worker.pid]


def test_what_a_killed_process_left_is_removed(tmp_path, worker):
    worker.kill()
    worker.communicate()
    assert activity.running(tmp_path) == []
    assert not file_of(tmp_path, worker.pid).exists()


def test_a_file_of_an_earlier_process_of_the_same_number_is_removed(tmp_path, worker):
    earlier = Work(pid=os.getpid(), process_started=1.0, command=["x"])
    file_of(tmp_path).write_text(earlier.model_dump_json())
    assert [work.pid for work in activity.running(tmp_path)] == [worker.pid]
    assert not file_of(tmp_path).exists()


@pytest.mark.parametrize(
    ("name", "content"), [("1.json", "{"), ("notes.json", "{}"), ("1.txt", ""), ("1.part", "{")]
)
def test_half_written_and_foreign_files_are_left_alone(tmp_path, worker, name, content):
    file = file_of(tmp_path).with_name(name)
    file.write_text(content)
    assert [work.pid for work in activity.running(tmp_path)] == [worker.pid]
    assert file.read_text() == content


def test_a_repository_without_logs_has_no_running_commands(tmp_path):
    assert activity.running(tmp_path) == []


def test_an_activity_that_begins_anew_is_timed_anew_and_an_interrupted_one_keeps_its_beginning():
    work = Work(pid=1, process_started=0.0, command=[])
    for name, done, total in (("a", 5, 10), ("b", 0, 0), ("a", 6, 10)):
        work.update(name, done, total)
    assert (work.activities["a"].done_before, list(work.activities)) == (5, ["b", "a"])
    work.update("a", 2, 10)
    assert work.activities["a"].done_before == 2
    for number in range(20):
        work.update(f"c{number}", 1, 2)
    assert (len(work.activities), list(work.activities)[-1]) == (8, "c19")


@pytest.mark.parametrize(
    ("done", "total", "done_before", "now", "left"),
    [
        (5, 10, 0, 110, 10),  # 5 in 10 s
        (5, 10, 0, 114, 6),  # and runs down until the next report
        (5, 10, 0, 200, 0),
        (15, 20, 10, 110, 10),  # what an earlier run did is no pace
        (0, 10, 0, 110, None),
        (5, 0, 0, 110, None),
    ],
)
def test_the_time_left_follows_from_the_pace(done, total, done_before, now, left):
    each = Activity(done=done, total=total, done_before=done_before, began=100, updated=110)
    assert each.seconds_left(now) == left
