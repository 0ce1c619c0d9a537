"""The model's own outputs beside a checkpoint are read as they were written."""

from pathlib import Path

import pytest

from slimqwen.recipe.sampled_outputs import OUTPUTS, Output, read_outputs
from slimqwen.text.files import CorpusError
from tests.recipe.inspected import write_lines


def test_outputs_are_read_in_their_order_and_a_folder_without_them_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="put the stage sample_outputs before"):
        next(read_outputs(tmp_path))
    rows = [
        {"prompt": [1, 2], "continuation": [3], "held_out": True},
        {"prompt": [4], "continuation": [5, 6], "held_out": False},
    ]
    write_lines(tmp_path / OUTPUTS, *rows)
    assert list(read_outputs(tmp_path)) == [Output((1, 2), (3,), True), Output((4,), (5, 6), False)]
