"""A record kind is one module and its test: nothing else changes by hand, its units included."""

import subprocess
import sys

import pytest

import slimqwen.bench
from slimqwen.errors import SlimqwenError
from slimqwen.records import collection, mlflow_export, registry, schemas, store
from slimqwen.records.record import Provenance
from slimqwen.report import checks, leaderboard, markdown, site

ENERGY = '''
"""Energy of a generated token."""

from typing import ClassVar

from pydantic import Field

from slimqwen.records.record import Block, NonNegative, Record


class Interval(Block):
    """A ratio with its interval."""

    value: float
    low: float
    high: float


class Energy(Record):
    """Energy that the machine takes for a generated token."""

    kind: ClassVar = "{kind}"
    units: ClassVar = {{"joules_per_token": "J/token"}}
    leaderboard_columns: ClassVar = {{"joules_per_token": "energy (J/token)"}}

    joules_per_token: NonNegative = Field(description="Joules.")
    ratio: Interval
'''


@pytest.fixture
def energy(add_module, tmp_path, monkeypatch):
    """The model of the new kind, with its schema among the others."""
    add_module(slimqwen.bench, "energy", ENERGY.format(kind="energy"))
    monkeypatch.setattr(schemas, "FILE", schemas.write_schemas(tmp_path / "schemas.json"))
    return registry.kinds()["energy"]


def test_a_new_kind_is_in_every_report_without_a_change_elsewhere(energy, tmp_path, add_variant, quality):
    repository = tmp_path / "repository"
    repository.mkdir()
    add_variant("a", "VLLM_MODEL=weights/a\n")
    (tmp_path / "experiments").rename(repository / "experiments")
    made = Provenance.model_validate(quality["provenance"])
    ratio = {"value": 2.0, "low": 1.5, "high": 2.5}
    record = energy(variant="a", provenance=made, joules_per_token=0.25, ratio=ratio)
    with pytest.raises(store.MissingRecordError, match=r"no energy record that fits in experiments/a$"):
        store.latest(repository / "experiments" / "a", energy)
    path = store.write_record(repository / "experiments" / "a", record)
    location = path.relative_to(repository).as_posix()
    assert store.read_record(path, energy) == record
    assert "energy/1" in path.read_text()

    result = collection.collect(repository)
    assert ([stored.location for stored in result.records], result.problems) == ([location], ())
    assert result.select(energy, "a")[0].record.figures()["joules_per_token"].value == 0.25

    [row], problems = leaderboard.rows_of(result, "a")
    assert (row.figures["energy (J/token)"][0].value, problems) == (0.25, [])

    assert not [fault for fault in checks.check_records(repository).faults if fault.location == location]
    path.write_text(path.read_text().replace("0.25", "-1"))
    assert [fault.location for fault in checks.check_records(repository).faults if fault.location == location]
    path.write_text(path.read_text().replace("-1", "0.25"))

    assert mlflow_export.export_records(repository, f"sqlite:///{repository}/mlruns/mlflow.db").added == (
        location,
    )

    [table] = record.tables(path)
    assert table.rows[0] == ("joules_per_token", "0.25", "", "J/token")

    page = site.build_page(repository, repository / "report").index.read_text()
    assert "<h4>Energy of a</h4>" in page
    assert location in page

    (repository / "README.md").write_text("<!-- table:energy a -->\n<!-- end -->\n")
    markdown.update_tables(repository)
    assert "| joules_per_token | 0.25 |  | J/token |" in (repository / "README.md").read_text()


@pytest.mark.parametrize(
    ("line", "base"),
    [
        ("from slimqwen.records.split import SplitRecord", "SplitRecord"),
        ("from slimqwen.records import split", "split.SplitRecord"),
        ("from slimqwen.records import record", "record.Record"),
    ],
)
def test_a_kind_is_found_however_its_module_imports_the_base_class(add_module, line, base):
    text = f"{line}\n\n\nclass Halved({base}):\n    kind, verb = 'halved', '-'\n"
    add_module(slimqwen.bench, "halved", text)
    assert registry.kinds()["halved"].__module__ == "slimqwen.bench.halved"


def test_a_kind_is_defined_once(add_module):
    for name in ("one", "two"):
        add_module(slimqwen.bench, name, ENERGY.format(kind="twice"))
    with pytest.raises(SlimqwenError, match=r"'twice' is defined in slimqwen\.bench\.one and"):
        registry.kinds()


def test_what_only_reads_records_loads_no_engine():
    heavy = "('torch', 'vllm', 'transformers', 'matplotlib')"
    code = (
        "import sys; from slimqwen.records import registry; from slimqwen.report import checks, markdown, site; "
        f"assert registry.kinds(); print([name for name in {heavy} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
