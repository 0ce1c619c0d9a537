"""Acceptance by depth, class and temperature in the real engine, and the comparison of two records."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.evals import EvalError, acceptance, acceptance_share, drafting
from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.invocation import Invocation
from slimqwen.records import store
from slimqwen.stats.verdict import Verdict
from tests import record_files
from tests.zoo.published_forms import PUBLISHED_FORMS

ROOT = Path(__file__).parents[2]
PLAN = """
acceptance:
  documents: tinyworld
  seed: 1
  tokens: 24
  groups: 2
  prompts: 4
  temperatures: [0.0, 1.0]
  classes: {short: 8, long: 32}
  gpu: a10g
  gate_depth: 3
  least_share: 0.97
"""


@pytest.fixture
def repository(tmp_path: Path, add_variant: Callable[..., Path]) -> Path:
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_DTYPE=bfloat16\nVLLM_MAX_MODEL_LEN=256\n")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    (tmp_path / "eval" / "gates").mkdir(parents=True)
    shutil.copy(ROOT / "eval" / "devices.yaml", tmp_path / "eval")
    (tmp_path / "eval" / "gates" / "small.yaml").write_text(PLAN)
    return tmp_path


@pytest.mark.engine
def test_deeper_drafts_are_accepted_for_longer(repository: Path) -> None:
    progress: list[tuple[float, float]] = []
    path = acceptance.measure_acceptance(
        variant.load("tiny", repository),
        AcceptanceSettings.load("small", repository),
        [1, 3],
        Invocation(["x"], progress=lambda activity, done, total: progress.append((done, total))),
    )
    record = store.read_record(path, Acceptance)
    shallow, deep = record.depths
    for row in (shallow, deep):
        assert [(each.class_, each.temperature) for each in row.settings] == [
            ("short", 0.0), ("short", 1.0), ("long", 0.0), ("long", 1.0),
        ]  # fmt: skip
        for setting in row.settings:
            shares = [rate.value for rate in setting.rates]
            assert len(shares) == row.depth
            assert shares == sorted(shares, reverse=True)
            assert setting.length.value == pytest.approx(1 + sum(shares))
    assert 1 < shallow.length.value <= 2
    assert shallow.length.value < deep.length.value <= 4
    items = store.read_items(path)
    assert len(items) == 2 * 2 * 2 * 2
    assert progress[-1] == (2 * 2 * 2, 2 * 2 * 2)
    greedy = [
        sum(item["output_tokens"] for item in items if item["depth"] == depth and not item["temperature"])
        for depth in (1, 3)
    ]
    # Greedy continuations end where they end, whatever drafts them; a near tie may move one end.
    assert max(greedy) - min(greedy) <= 24
    same = acceptance_share.compare_acceptance(path, path)
    assert (same.ratio.value, same.ratio.low, same.ratio.high, same.verdict) == (1, 1, 1, Verdict.PASS)


def test_depths_of_an_interrupted_run_are_not_counted_again(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, asked = variant.load("tiny", repository), []
    settings = AcceptanceSettings.load("small", repository)

    def count(folder: Path, classes: Any, settings: Any, depth: int, *_: Any) -> list[dict[str, Any]]:
        asked.append(depth)
        if depth == 3 and asked.count(3) == 1:
            raise KeyboardInterrupt
        return record_files.draft_items(*([4 - group] * depth for group in range(2)))

    monkeypatch.setattr(drafting, "measure_drafts", count)
    with pytest.raises(KeyboardInterrupt):
        acceptance.measure_acceptance(one, settings, [1, 2, 3], Invocation(["x"]))
    assert not list(one.folder.glob("acceptance_*"))
    path = acceptance.measure_acceptance(one, settings, [1, 2, 3], Invocation(["x"]))
    assert asked == [1, 2, 3, 3]
    record = store.read_record(path, Acceptance)
    assert [row.depth for row in record.depths] == [1, 2, 3]
    # Of 10 drafts, 4 are accepted at each position in one group and 3 in the other.
    assert [row.length.value for row in record.depths] == pytest.approx([1.35, 1.7, 2.05])
    (table,) = record.tables(path)
    assert table.rows[1] == ("2", "short", "0", "1.700 ± 0.100", "0.35 0.35", "0.05", "20")
    assert record.figures()["acceptance_length"].value == pytest.approx(2.05)
    monkeypatch.setattr(store, "_stamp", lambda: "2026-01-01T000000Z")
    acceptance.measure_acceptance(one, settings, [1], Invocation(["x"]))
    assert asked == [1, 2, 3, 3, 1]


def test_a_checkpoint_without_a_head_is_refused(repository: Path) -> None:
    PUBLISHED_FORMS["no-mtp"].build(repository / "weights" / "bare")
    (repository / "experiments" / "tiny" / "config.env").write_text("VLLM_MODEL=weights/bare\n")
    settings = AcceptanceSettings.load("small", repository)
    with pytest.raises(EvalError, match="tiny has no MTP head"):
        acceptance.measure_acceptance(variant.load("tiny", repository), settings, [1], Invocation(["x"]))
