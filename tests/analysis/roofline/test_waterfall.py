"""Bytes of a decode step, lever by lever, from dimensions alone."""

import pytest

from slimqwen import variant
from slimqwen.analysis.roofline import gpu as gpus
from slimqwen.analysis.roofline import waterfall
from slimqwen.records import store

ROOT = variant.repository_root()
A10G = gpus.read("a10g", ROOT)


def test_each_lever_saves_the_bytes_that_it_is_for():
    steps = list(waterfall.steps(variant.load("qwen3.5-4b-best"), A10G, 2048))
    assert [step.lever for step in steps] == [
        "qwen3.5-4b",
        "drafts, K = 4",
        "calibrate",
        "prune_vocab",
        "trim_draft_vocab",
        "calibrate again",
    ]
    base, drafts, packed, pruned, trimmed, packed_drafts = steps
    assert [step.num_speculative_tokens for step in steps[:3]] == [0, 4, 4]
    assert base.part_bytes["draft head"] == 0
    assert drafts.part_bytes["draft head"] == 4 * base.part_bytes["output head"] == 4 * 248320 * 2560 * 2
    assert packed.part_bytes["layers"] < 0.7 * drafts.part_bytes["layers"]
    assert packed.part_bytes["output head"] == drafts.part_bytes["output head"]
    assert pruned.part_bytes["output head"] == 65536 * 2560 * 2
    assert pruned.seconds < packed.seconds
    assert trimmed.part_bytes["draft head"] == 4 * 32768 * 2560 * 2
    assert packed_drafts.part_bytes["draft layers"] < 0.3 * trimmed.part_bytes["draft layers"]


def test_a_variant_without_a_recipe_or_drafts_is_one_step():
    (step,) = waterfall.steps(variant.load("qwen3.5-4b"), A10G, 128)
    assert (step.lever, step.num_speculative_tokens) == ("qwen3.5-4b", 0)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write the record of a variant into a folder of its own."""
    write_record = store.write
    monkeypatch.setattr(store, "write", lambda _, record: write_record(tmp_path, record))

    def write(name):
        path = waterfall.write(variant.load(name), "a10g", command=["x"])
        return path, store.read(path, waterfall.Waterfall)

    return write


def test_the_record_shows_a_row_per_lever(written):
    path, record = written("cyankiwi-seq8-w4lm")
    (table,) = record.tables(path)
    assert [row[0] for row in table.rows] == [step.lever for step in record.steps]


def test_the_embedded_model_has_a_waterfall_in_megabytes(written):
    path, record = written("tiny-best")
    (table,) = record.tables(path)
    assert table.columns[2] == "layers, MB"
    assert float(table.rows[0][2]) == pytest.approx(record.steps[0].part_bytes["layers"] / 1e6, abs=0.01)
