"""The log of starts that were held against a plan."""

import pytest

from slimqwen.analysis import start_plan
from slimqwen.vllm_plugin import start_log
from slimqwen.vllm_plugin.start_log import Start


def start(*differences, time="2026-01-01T00:00:00Z"):
    return Start(
        time=time,
        variant="v",
        plan="vLLM 0.32.0 on a10g",
        required=False,
        planned={"block_size": 544},
        actual={"block_size": 544},
        differences=list(differences),
    )


def test_starts_are_added_to_what_was_there(tmp_path):
    file = tmp_path / start_log.FILE
    assert start_log.read(file) == []
    starts = [start(), start("block_size: planned 544, actual 1088", time="2026-01-02T00:00:00Z")]
    for one in starts:
        start_log.append(one, file)
    assert start_log.read(file) == starts
    table = start_plan.starts_table(tmp_path)
    assert [row[0] for row in table.rows] == ["2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z"]
    assert [row[3] for row in table.rows] == ["block_size: planned 544, actual 1088", "-"]


def test_a_damaged_line_is_named(tmp_path):
    file = tmp_path / "starts.jsonl"
    start_log.append(start(), file)
    with file.open("a") as log:
        log.write('{"time": "2026\n')
    with pytest.raises(start_log.StartLogError, match=r"starts\.jsonl, line 2: .*; remove that line"):
        start_log.read(file)
