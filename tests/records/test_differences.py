"""What counts as another circumstance, and what does not."""

import copy

import pytest

from slimqwen.records import differences
from slimqwen.records.differences import Circumstance
from slimqwen.records.record import Provenance


@pytest.fixture
def block(quality):
    return quality["provenance"]


def changed(block, *path, to):
    other = copy.deepcopy(block)
    holder = other
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = to
    return between(block, other)


def between(before, after):
    return differences.between(*map(Provenance.model_validate, (before, after)))


def test_the_same_circumstances_differ_in_nothing(block):
    assert between(block, copy.deepcopy(block)) == []


@pytest.mark.parametrize(
    ("path", "to", "circumstance", "shown"),
    [
        (("checkpoint", "digest"), "ef" * 32, Circumstance.CHECKPOINT, "checkpoint: "),
        (("datasets",), {}, Circumstance.DATA, "-> none"),
        (("flags", "max-num-seqs"), 99, Circumstance.FLAGS, "flag max-num-seqs: "),
        (
            ("environment", "VLLM_CPU_KVCACHE_SPACE"),
            "9",
            Circumstance.FLAGS,
            "variable VLLM_CPU_KVCACHE_SPACE: ",
        ),
        (("threads",), 99, Circumstance.HARDWARE, "engine threads: "),
        (("hardware", "cpu_model"), "Other", Circumstance.HARDWARE, "hardware cpu_model: "),
        (("packages", "vllm"), "9", Circumstance.PACKAGES, "vllm: "),
        (("git", "commit"), "9" * 40, Circumstance.CODE, "commit: "),
        (("git", "dirty"), True, Circumstance.CODE, "+changes"),
    ],
)
def test_each_circumstance_is_named_with_both_sides(block, path, to, circumstance, shown):
    result = changed(block, *path, to=to)
    assert {each.circumstance for each in result} == {circumstance}
    assert shown in str(result[0])
    assert "\n" not in str(result[0])


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("flags", "port"), 1),
        (("environment", "VLLM_CACHE_ROOT"), "elsewhere"),
        (("environment", "OMP_NUM_THREADS"), "1"),
        (("started",), "2020-01-01T00:00:00Z"),
        (("command",), "python other"),
        (("checkpoint", "path"), "weights/other"),
    ],
)
def test_what_decides_nothing_is_no_circumstance(block, path, to):
    assert changed(block, *path, to=to) == []
