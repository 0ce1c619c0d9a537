"""The file that a withdrawal names: the record, also for its items; any other file names itself."""

import pytest

from slimqwen.records import withdrawals


@pytest.mark.parametrize(
    ("location", "record"),
    [
        ("experiments/b/quality_1.json", "experiments/b/quality_1.json"),
        ("experiments/b/quality_1.items.jsonl", "experiments/b/quality_1.json"),
        ("results/figure.svg", "results/figure.svg"),
    ],
)
def test_items_belong_to_their_record_and_other_files_to_themselves(location: str, record: str) -> None:
    assert withdrawals.record_of(location) == record
