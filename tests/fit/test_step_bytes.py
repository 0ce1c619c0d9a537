from pathlib import Path

import pytest

from slimqwen.fit.step_bytes import SavedBytes, step_bytes_table
from slimqwen.plan.devices import read_gpus

ROOT = Path(__file__).parents[2]


def saved(variant: str) -> SavedBytes:
    return SavedBytes.of(variant, read_gpus(ROOT)["rtx-3090"], ROOT)


def test_a_step_reads_each_byte_that_the_draft_head_saves_four_times():
    row = saved("qwen3.8-27b-best")
    rows, hidden = 40_960, 5120
    whole, packed = 2 * rows * hidden, rows * (hidden // 2 + 2 * hidden // 128)
    assert (row.before.draft_output.bytes, row.after.draft_output.bytes) == (whole, packed)
    # The rows of the embedding that the nine passes gather are a few kilobytes.
    saving = row.step_bytes(row.before) - row.step_bytes(row.after)
    assert saving == pytest.approx(4 * (whole - packed), abs=1e5)
    assert row.step_seconds(row.after) < row.step_seconds(row.before)


def test_an_8_bit_embedding_gives_half_of_its_memory_back():
    row = saved("qwen3.8-27b-best")
    numbers = 248_320 * 5120
    assert row.before.embedding_bytes == 2 * numbers
    assert row.after.embedding_bytes == numbers + 2 * numbers // 128
    heads = row.before.draft_output.bytes - row.after.draft_output.bytes
    saving = row.before.resident_bytes(4) - row.after.resident_bytes(4)
    assert saving == heads + row.before.embedding_bytes - row.after.embedding_bytes


@pytest.mark.parametrize("variant", ["qwen3.5-9b-best", "qwen3.5-4b-best"])
def test_an_embedding_that_the_recipe_leaves_alone_saves_nothing(variant):
    row = saved(variant)
    assert row.after.embedding_bytes == row.before.embedding_bytes
    saving = row.before.resident_bytes(4) - row.after.resident_bytes(4)
    assert saving == row.before.draft_output.bytes - row.after.draft_output.bytes > 0


def test_the_table_has_a_row_for_each_variant():
    table = step_bytes_table(ROOT)
    assert [row[0] for row in table.rows] == ["qwen3.8-27b-best", "qwen3.5-9b-best", "qwen3.5-4b-best"]
