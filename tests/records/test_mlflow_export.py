"""Records sent to a real local tracking store, and read back with MLflow's own client."""

import json
import shutil
import sys

import mlflow
import pytest

from slimqwen.evals.quality import Quality
from slimqwen.records import collection, mlflow_export, store
from slimqwen.records.mlflow_export import MlflowExportError
from tests.record_files import write

pytestmark = pytest.mark.usefixtures("stamps")

ITEMS = [{"task": "example_facts", "item": "f", "value": 1.0, "weight": 1}]


@pytest.fixture
def repository(tmp_path, add_variant, quality, latency):
    """Two variants, three records."""
    for name, baseline in (("a", None), ("b", "a")):
        add_variant(name, f"VLLM_MODEL=weights/{name}\n", baseline=baseline)
        write(tmp_path / "experiments" / name, quality | {"variant": name}, ITEMS)
    write(tmp_path / "experiments" / "b", latency | {"variant": "b"}, ITEMS)
    return tmp_path


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A database as MLflow makes it, which takes seconds."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def stored(repository, empty_store):
    """The same repository with an empty store."""
    (repository / "mlruns").mkdir()
    shutil.copy(empty_store, repository / "mlruns" / "mlflow.db")
    return repository


def database(repository):
    return f"sqlite:///{repository}/mlruns/mlflow.db"


def runs(exported):
    client = mlflow.MlflowClient(exported.uri)
    experiment = client.get_experiment_by_name("slimqwen")
    return client, {
        run.data.tags["slimqwen.record"]: run for run in client.search_runs([experiment.experiment_id])
    }


def test_every_record_becomes_a_run_that_says_what_the_record_says(repository, quality):
    exported = mlflow_export.export_records(repository, database(repository))
    client, sent = runs(exported)
    everything = collection.collect(repository)
    assert set(exported.added) == set(sent) == {entry.location for entry in everything.records}
    for entry in everything.records:
        run = sent[entry.location]
        figures = entry.record.figures().values()
        numbers = [n for f in figures for n in (f.value, f.standard_error, f.low, f.high) if n is not None]
        assert sorted(run.data.metrics.values()) == sorted(map(float, numbers))
        assert run.info.status == "FINISHED"
        assert run.info.start_time == 1767323045000
        assert run.data.tags["slimqwen.variant"] == entry.variant
        assert run.data.tags["slimqwen.kind"] == entry.kind
        assert run.data.tags["slimqwen.checkpoint"] == entry.record.provenance.checkpoint_digest
        assert run.data.tags["slimqwen.commit"] == entry.record.provenance.git.commit
        assert run.data.tags["slimqwen.hardware"] == "Example GPU"
        flags = entry.record.provenance.flags
        assert {key: run.data.params[key] for key in flags} == {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in flags.items()
        }
        folder = client.download_artifacts(run.info.run_id, "")
        for path in (entry.path, entry.path.with_suffix(".items.jsonl")):
            assert (type(entry.path)(folder) / path.name).read_bytes() == path.read_bytes()
    scored = next(run for run in sent.values() if run.data.tags["slimqwen.kind"] == "quality")
    assert (
        scored.data.metrics["tasks/example_facts/exact_match"] == quality["tasks"]["example_facts"]["value"]
    )
    assert scored.data.metrics["tasks/example_facts/exact_match.standard_error"] == 0.2


def test_a_second_export_adds_nothing_and_a_third_adds_what_is_new(stored, quality):
    mlflow_export.export_records(stored, database(stored))
    again = mlflow_export.export_records(stored, database(stored))
    assert (again.added, again.known) == ((), 3)
    path = write(stored / "experiments" / "b", quality | {"variant": "b"}, ITEMS)
    third = mlflow_export.export_records(stored, database(stored))
    assert third.added == (f"experiments/b/{path.name}",)
    assert len(runs(third)[1]) == 4


def test_an_interrupted_export_leaves_no_half_of_a_run_and_the_next_sends_the_rest(stored, monkeypatch):
    finish, finished = mlflow.MlflowClient.set_terminated, []

    def dies_at_the_second(client, run_id, *words, **options):
        finished.append(run_id)
        if len(finished) == 2:
            raise KeyboardInterrupt
        finish(client, run_id, *words, **options)

    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        mlflow_export.export_records(stored, database(stored))
    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", finish)
    whole = mlflow_export.export_records(stored, database(stored))
    assert (len(whole.added), whole.known) == (2, 1)
    client, sent = runs(whole)
    assert len(sent) == 3
    experiment = client.get_experiment_by_name("slimqwen").experiment_id
    assert len(client.search_runs([experiment])) == 3
    assert {run.info.status for run in sent.values()} == {"FINISHED"}


def test_damaged_records_are_named_and_the_rest_is_sent(stored):
    damaged = store.records(stored / "experiments" / "a", Quality)[0]
    damaged.write_text("{")
    exported = mlflow_export.export_records(stored, database(stored))
    assert len(exported.added) == 2
    assert [problem.location for problem in exported.problems] == [f"experiments/a/{damaged.name}"]


def test_a_store_of_ones_own_has_its_artifacts_beside_it(repository, empty_store, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copy(empty_store, folder / "team.db")
    exported = mlflow_export.export_records(repository, f"sqlite:///{folder}/team.db")
    assert exported.uri == f"sqlite:///{folder}/team.db"
    assert not (repository / "mlruns").exists()
    assert len(list(folder.glob("artifacts/*/artifacts/*.json"))) == 3


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("sqlite:///{file}/x.db", "sqlite:///{file}/x.db"),
        ("nonsense://x", "nonsense://x"),
        ("http://me:hunter2@127.0.0.1:9", "http://<redacted>@127.0.0.1:9"),
        ("file:{file}", "file:{file}"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(repository, uri, shown, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (repository / "file").write_text("")
    uri, shown = (said.format(file=repository / "file") for said in (uri, shown))
    with pytest.raises(MlflowExportError, match="check URI") as caught:
        mlflow_export.export_records(repository, uri)
    assert str(caught.value).startswith(f"{shown}: ")
    assert "hunter2" not in str(caught.value)


def test_without_mlflow_the_command_that_installs_it_is_named(repository, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MlflowExportError, match="make install"):
        mlflow_export.export_records(repository, database(repository))
    assert not (repository / "mlruns").exists()
