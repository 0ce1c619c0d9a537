import pytest

from slimqwen.records import collection
from slimqwen.records.settings import SettingsError
from slimqwen.report import cost
from slimqwen.report.cost import Prices


@pytest.fixture
def served(add_variant, add_record):
    """A latency record with a service level: TTFT 100 ms, TPOT 10 ms, 100 tokens."""

    def add(name, ttft_ms=200.0):
        add_variant(name, f"VLLM_MODEL=weights/{name}\n")

        def change(record):
            for figures in record["classes"].values():
                figures["durations_s"] = [2.0, 2.0, 2.0, 2.0]
                figures["goodput"] = {
                    "ttft_ms": ttft_ms, "tpot_ms": 50.0, "good_count": figures["request_count"], "requests_per_s": 1.0,
                }  # fmt: skip

        def each(row):
            return row | {"ttft_ms": 100.0, "tpot_ms": 10.0, "output_tokens": 100, "round": row["index"] % 4}

        return add_record(name, "latency", edit=change, edit_items=each)

    return add


def test_tokens_per_second_and_per_price_of_an_hour(served, tmp_path):
    served("base")
    [best] = cost.throughputs(collection.collect(tmp_path))
    every = cost.throughputs(collection.collect(tmp_path), "base")
    assert best.load.tokens_per_s == max(row.load.tokens_per_s for row in every)
    assert len(every) == len(best.entry.record.classes)

    table = cost.table([best], Prices(currency="EUR", per_hour={best.hardware: 0.5}))
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    rate = best.load.tokens_per_s
    assert cells["good tokens/s per EUR an hour"].startswith(f"{2 * rate:,.4g} [")
    assert cells["EUR per million good tokens"] == f"{0.5e6 / 3600 / rate:,.2f}"
    assert not any("No price" in note for note in table.notes)


def test_without_a_price_there_are_tokens_alone_and_the_file_is_named(served, tmp_path):
    served("base")
    table = cost.table(cost.throughputs(collection.collect(tmp_path)), Prices())

    assert table.columns[-1] == "good tokens/s"
    assert any("No price of 2 CPUs" in note and "eval/prices.yaml" in note for note in table.notes)


def test_requests_beyond_a_limit_yield_nothing(served, tmp_path):
    served("base", ttft_ms=50.0)
    assert [row.load.tokens_per_s for row in cost.throughputs(collection.collect(tmp_path))] == [0]


def test_a_workload_without_a_service_level_has_no_row(add_variant, add_record, tmp_path):
    add_variant("base", "VLLM_MODEL=weights/base\n")
    add_record("base", "latency")

    assert cost.throughputs(collection.collect(tmp_path)) == []
    assert cost.table([], Prices()) is None


def test_the_committed_file_has_no_price():
    from slimqwen import variant

    assert cost.read_prices(variant.repository_root()) == Prices()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("per_hour: {NVIDIA A10G: -1}", "per_hour.NVIDIA A10G"),
        ("per_hour: {NVIDIA A10G: much}", "per_hour.NVIDIA A10G"),
        ("prices: {}", "prices"),
    ],
)
def test_a_bad_file_is_an_error_of_one_line(tmp_path, text, fault):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=fault):
        cost.read_prices(tmp_path / "repository", file)


def test_a_named_file_has_to_exist_and_the_default_one_need_not(tmp_path):
    assert cost.read_prices(tmp_path) == Prices()
    with pytest.raises(SettingsError, match=r"mine\.yaml does not exist"):
        cost.read_prices(tmp_path, tmp_path / "mine.yaml")
