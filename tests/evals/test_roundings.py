"""What each way to round costs, on the embedded model."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from slimqwen import variant
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.roundings import Roundings, RoundingsSettings, measure_roundings
from slimqwen.records import store
from slimqwen.variant import Variant

ROWS = """
gate: tinyworld
first: 0
texts: 6
rows:
  - {name: W8, bits: {mlp: 8, attention: 8, linear_attention: 8}, group_size: 32}
  - {name: W6, bits: {mlp: 6, attention: 6, linear_attention: 6}, group_size: 32, over: W8}
  - {name: W5, bits: {mlp: 5, attention: 5, linear_attention: 5}, group_size: 32, over: W6}
  - {name: W4, bits: {mlp: 4, attention: 4, linear_attention: 4}, group_size: 32, over: W5}
  - {name: W3, bits: {mlp: 3, attention: 3, linear_attention: 3}, group_size: 32, over: W4}
  - {name: head W4, bits: {lm_head: 4}, group_size: 32}
  - {name: unchanged, stages: []}
  - {name: bfloat16, arithmetic: bfloat16}
  - name: made
    stages: [{calibrate: {targets: {mlp: W4A16}, scaling: none, corpus: {path: tinyworld, sequences: 2, length: 16}}}]
  - {name: rounded, bits: {mlp: 4}, group_size: 32, over: made}
"""


@pytest.fixture
def settings(one: Variant) -> RoundingsSettings:
    (one.root / "eval/roundings").unlink()
    (one.root / "eval/roundings").mkdir()
    (one.root / "eval/roundings/mine.yaml").write_text(ROWS)
    return RoundingsSettings.load("mine", one.root)


@pytest.fixture
def measured(one: Variant, settings: RoundingsSettings) -> Roundings:
    tiny = variant.load("tiny", one.root)
    path = measure_roundings(tiny, settings, Invocation(["x"], "records"))
    assert store.read_record(path).tables(path)
    return store.read_record(path, Roundings)


def test_fewer_bits_cost_more_and_what_a_stage_makes_costs_what_rounding_in_memory_does(
    measured: Roundings, one: Variant
) -> None:
    rows = {row.name: row for row in measured.rows}
    for name in ("W6", "W5", "W4", "W3"):
        ratio = rows[name].kl_ratio
        assert ratio, name
        assert ratio.low > 1, name
    sizes = [rows[name].tensor_bytes for name in ("W3", "W4", "W5", "W6", "W8")]
    assert sizes == sorted(sizes)
    assert (rows["W8"].verdict, rows["W3"].verdict) == ("pass", "fail")
    same = rows["rounded"].kl_ratio
    assert same
    assert same.value == pytest.approx(1, rel=1e-3)
    assert rows["rounded"].tensor_bytes == rows["made"].tensor_bytes
    exact = rows["unchanged"].figures.kl_nats
    assert exact
    assert exact.value == pytest.approx(0, abs=1e-6)
    arithmetic = rows["bfloat16"].figures.kl_nats
    assert arithmetic
    assert 10 * exact.value < arithmetic.value
    assert arithmetic.value < 1e-2
    stored = list_tensors(one.root / "weights/tiny")
    embedding = stored["model.embed_tokens.weight"]
    assert rows["head W4"].tensor_bytes - rows["unchanged"].tensor_bytes == pytest.approx(
        embedding.elements * 4.5 / 8, rel=1e-3
    )


def test_an_interrupted_run_goes_on_after_its_last_row(
    one: Variant, settings: RoundingsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slimqwen.evals import roundings

    measure, seen = roundings._measure, []

    def fail_at_the_third(row, *rest):  # type: ignore[no-untyped-def]
        seen.append(row.name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return measure(row, *rest)

    few = settings.model_copy(update={"rows": settings.rows[:3]})
    monkeypatch.setattr(roundings, "_measure", fail_at_the_third)
    tiny = variant.load("tiny", one.root)
    with pytest.raises(KeyboardInterrupt):
        measure_roundings(tiny, few, Invocation(["x"], "records"))
    measure_roundings(tiny, few, Invocation(["x"], "records"))
    assert seen == ["W8", "W6", "W5", "W5"]


def test_a_row_is_compared_with_an_earlier_one(settings: RoundingsSettings) -> None:
    rows = [row.model_dump() for row in settings.rows[::-1]]
    with pytest.raises(ValidationError, match="its `over` is no earlier row"):
        RoundingsSettings.model_validate({**settings.model_dump(), "rows": rows})


def test_the_repository_s_rows_can_be_read() -> None:
    root = Path(__file__).parents[2]
    names = [file.stem for file in (root / "eval/roundings").glob("*.yaml")]
    rows = [row for name in names for row in RoundingsSettings.load(name, root).rows]
    assert all(row.steps(root) or row.bits or row.arithmetic != "float32" for row in rows)


def test_on_the_real_model_fewer_bits_cost_more_and_the_limits_tell_8_from_3() -> None:
    folder = Path(__file__).parents[2] / "experiments/smollm2-135m"
    path = store.latest(folder, Roundings, lambda record: record.topic == "general")
    rows = {row.name: row for row in store.read_record(path, Roundings).rows}
    names = ("W8, a scale a row", "W6 g32", "W5 g32", "W4 g32", "W3 g32")
    divergences = [row.figures.kl_nats.value for row in map(rows.__getitem__, names) if row.figures.kl_nats]
    assert len(divergences) == len(names)
    assert divergences == sorted(divergences)
    assert (rows[names[0]].verdict, rows[names[-1]].verdict) == ("pass", "fail")
