"""Names, units and uncertainty of the numbers in a record."""

from slimqwen.records.figures import Figure, figures_of


def test_a_figure_has_the_names_of_the_fields_around_it():
    fields = {
        "schema": "x/1",
        "variant": "tiny",
        "seconds": 2,
        "passed": True,
        "note": "text",
        "tasks": {"facts": {"measure": "acc", "value": 0.5, "standard_error": 0.1, "count": 9, "floor": 0.1}},
        "classes": {"short": {"ttft_ms": {"mean": 1.5, "median": 1.0}, "request_count": 4}},
        "ratio": {"value": 2.0, "low": 1.5, "high": 2.5},
        "provenance": {"threads": 1},
    }
    assert figures_of(fields, {}) == {
        "seconds": Figure(2, "s"),
        "tasks/facts/acc": Figure(0.5, "share", standard_error=0.1, count=9),
        "tasks/facts/floor": Figure(0.1),
        "classes/short/ttft_ms/mean": Figure(1.5, "ms"),
        "classes/short/ttft_ms/median": Figure(1.0, "ms"),
        "classes/short/request_count": Figure(4),
        "ratio": Figure(2.0, low=1.5, high=2.5),
    }


def test_entries_of_a_list_are_told_apart_by_their_labels_or_their_number():
    fields = {
        "depths": [
            {"depth": 3, "class": "short", "length": {"value": 2.5, "standard_error": 0.1}},
            {"length": 1},
        ],
        "rates": [0.5, 0.25],
        "decode": [{"batch_size": 1, "seconds": 0.5}, {"batch_size": 1, "seconds": 1.5}],
    }
    assert {name: figure.value for name, figure in figures_of(fields, {}).items()} == {
        "depths/short, depth=3/length": 2.5,
        "depths/1/length": 1,
        "rates/0": 0.5,
        "rates/1": 0.25,
        "decode/batch_size=1, 0/seconds": 0.5,
        "decode/batch_size=1, 1/seconds": 1.5,
    }


def test_a_kind_s_own_unit_goes_before_the_shared_ones():
    assert figures_of({"energy_per_s": 1.0}, {"energy_per_s": "W"})["energy_per_s"].unit == "W"
    assert figures_of({"requests_per_s": 1.0}, {"energy_per_s": "W"})["requests_per_s"].unit == "1/s"
