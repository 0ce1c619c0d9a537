"""A variant's acceptance length as a share of its baseline's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slimqwen.evals import acceptance, acceptance_share
from slimqwen.records import store
from slimqwen.records.pairing import NotComparableError
from slimqwen.records.record import MeasuredCheckpoint
from tests import record_files

EXAMPLE = record_files.example("acceptance")


def counted(folder: Path, accepted: Sequence[int], **changes: Any) -> Path:
    """A record of 10 drafts of 2 tokens a group, so many of each group accepted at each position."""
    items = record_files.draft_items(*([number, number] for number in accepted))
    depths = [row.as_json() for row in acceptance.summarise_items(items)]
    body = EXAMPLE | {"variant": folder.name, "depths": depths} | changes
    return record_files.write(folder, body, items)


@pytest.mark.parametrize(
    ("accepted", "verdict"),
    [((8, 8, 8, 8), "pass"), ((7, 7, 7, 7), "fail"), ((10, 7, 8, 7), "inconclusive")],
)
def test_the_share_of_the_baselines_length_decides(
    tmp_path: Path, accepted: Sequence[int], verdict: str
) -> None:
    first, second = counted(tmp_path / "a", (8, 8, 8, 8)), counted(tmp_path / "b", accepted)
    assert acceptance_share.pair_acceptance_records(tmp_path / "a", tmp_path / "b") == (first, second)
    share = acceptance_share.compare_acceptance(first, second)
    assert (share.depth, share.groups, share.verdict) == (2, 4, verdict)
    assert share.first == pytest.approx(2.6)
    assert share.second == pytest.approx(1 + 2 * sum(accepted) / 40)
    assert share.ratio.value == pytest.approx(share.second / share.first)


def test_records_of_other_settings_or_another_checkpoint_are_no_pair(tmp_path: Path) -> None:
    counted(tmp_path / "a", (8, 8))
    counted(tmp_path / "b", (8, 8), plan="another")
    with pytest.raises(NotComparableError, match=r"differ in settings \(\w+ and another\)"):
        acceptance_share.pair_acceptance_records(tmp_path / "a", tmp_path / "b")
    other = MeasuredCheckpoint(path="weights/other", digest="0" * 64, size_bytes=1)
    with pytest.raises(store.MissingRecordError, match="slimqwen eval acceptance --variant a"):
        acceptance_share.pair_acceptance_records(tmp_path / "a", tmp_path / "b", [other, other])
