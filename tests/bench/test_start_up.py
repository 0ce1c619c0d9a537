"""Records of starts; the starts themselves are those of `run_server`, tested with the stage that bakes."""

import dataclasses
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace

import pytest

from slimqwen import variant
from slimqwen.bench import BenchError, start_up
from slimqwen.bench.start_up import StartUp
from slimqwen.records import provenance, store
from slimqwen.stats.intervals import TooFewItemsError

SECONDS = {"cold": 90.0, "baked": 30.0, "eager": 35.0}
CPU_LOG = """\
(Worker pid=7) INFO 11-21 06:20:45 [base_loader.py:82] Initializing model took 0.345405 seconds
(Worker pid=7) INFO 11-21 06:20:45 [default_loader.py:501] Loading weights took 0.15 seconds
(Worker pid=7) INFO 11-21 06:20:45 [base_loader.py:82] Initializing model took 0.100000 seconds
(Worker pid=7) INFO 11-21 06:20:45 [default_loader.py:501] Loading weights took 0.40 seconds
(Worker pid=7) INFO 11-21 06:20:58 [compile_watch.py:9] Graph backbone compiled in 20.50 s (not in the cache)
(Worker pid=7) INFO 11-21 06:20:59 [compile_watch.py:9] Graph eagle_head compiled in 5.00 s (not in the cache)
(EngineCore pid=6) INFO 11-21 06:21:47 [core.py:396] init engine (profile, create kv cache, warmup model) took \
30.25 s (compilation: 25.40 s)
(APIServer pid=5) INFO 11-21 06:21:52 [warm_up.py:60] Warm-up took 3.10 s: batches of 1, chats with thinking on and off
"""
GPU_LOG = """\
INFO [default_loader.py:501] Loading weights took 1.50 seconds
INFO [gpu_model_runner.py:5150] Model loading took 2.51 GiB memory and 4.250000 seconds
INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 9.00 s
"""


def test_phases_add_up_to_the_time_until_ready():
    result = start_up.split_phases(CPU_LOG, ready_seconds=60.0)
    assert result == {
        "import": pytest.approx(60 - 1.0 - 30.25 - 3.1, abs=0.01),
        "load_weights": pytest.approx(1.0, abs=0.01),
        "compile": 25.5,
        "warm_up": 4.75,
        "first_requests": 3.1,
    }
    assert list(result) == list(start_up.PHASES)
    assert sum(result.values()) == pytest.approx(60.0, abs=0.02)


def test_where_the_log_states_the_whole_of_the_loading_its_parts_are_not_added():
    result = start_up.split_phases(GPU_LOG, 20.0)
    assert (result["load_weights"], result["compile"], result["warm_up"]) == (4.25, 0.0, 9.0)


FAILED_WARM_UP = "ERROR WarmUpError: the warm-up failed, the first requests will be slow: x"


@pytest.mark.parametrize(
    ("log", "ready_seconds", "said"),
    [
        ("", 20.0, "does not say how long"),
        (CPU_LOG.partition("init engine")[0], 20.0, "does not say how long"),
        (GPU_LOG.rpartition("INFO")[2], 20.0, "does not say how long"),
        (CPU_LOG, 30.0, "longer in vLLM's log than the whole start"),
        (CPU_LOG.partition("(APIServer")[0] + FAILED_WARM_UP, 60.0, "warm-up requests failed"),
    ],
    ids=["nothing", "no engine", "no loading", "too short a start", "failed warm-up"],
)
def test_a_log_that_does_not_state_the_phases_of_the_start_is_an_error(log, ready_seconds, said):
    with pytest.raises(BenchError, match=said):
        start_up.split_phases(log, ready_seconds)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Write the record of starts that take `SECONDS` and one more each time; returns it with the kinds in order."""
    committed = store.read_record(store.latest(variant.load("tiny-best").folder, StartUp), StartUp)

    def run(rounds, *, compiles=True, baked=True, loads=lambda kind: kind == "baked"):
        made = []

        def start(command, log, all_logs):
            kind = "cold" if command == "cache" else str(command)
            made.append(kind)
            seconds = SECONDS[kind] + len(made)
            graph = start_up.StartGraph(name="backbone", loaded=loads(kind), seconds=1.0, why_compiled="")
            return start_up.Start(
                ready_seconds=seconds,
                phases=dict.fromkeys(start_up.PHASES, seconds / len(start_up.PHASES)),
                graphs=(graph,) if kind != "eager" else (),
            )

        def resolve(variant, *, port):
            class Command(str):
                cache = SimpleNamespace(baked=object() if baked else None) if compiles else None
                with_cache_root = staticmethod(lambda root: root.name)

            one = Command("baked" if variant.require_baked else "eager" if not compiles else "not required")
            one.port = port
            return one

        monkeypatch.setattr(start_up, "_time_start", start)
        monkeypatch.setattr(start_up.ServerCommand, "resolve", resolve)
        monkeypatch.setattr(provenance, "of_served_variant", lambda *_, **__: committed.provenance)
        subject = dataclasses.replace(variant.load("tiny"), root=tmp_path)
        path = start_up.measure_start_up(subject, rounds, tmp_path / "logs" / "log", command=["x"])
        return path, made

    return run


def test_starts_take_turns(measure):
    path, made = measure(3)
    assert made == ["cold", "baked", "baked", "cold", "cold", "baked"]
    record = store.read_record(path, StartUp)
    ready = {kind: [start.ready_seconds for start in starts] for kind, starts in record.starts.items()}
    assert ready == {"cold": [91, 94, 95], "baked": [32, 33, 36]}
    expected = geometric_mean(ready["cold"]) / geometric_mean(ready["baked"])
    assert record.ready_cold_over_baked.value == pytest.approx(expected)
    assert record.figures()["ready_seconds"].value == 33


@pytest.mark.parametrize(
    ("facts", "kinds"),
    [({"baked": False}, ["cold"]), ({"compiles": False}, ["eager"])],
)
def test_a_variant_has_the_kinds_of_start_that_its_cache_allows(measure, facts, kinds):
    path, made = measure(2, **facts)
    assert made == kinds * 2
    assert list(store.read_record(path, StartUp).starts) == kinds


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [("cold", "was loaded from the cache"), ("baked", "was compiled")],
)
def test_a_start_that_is_not_what_it_is_called_is_no_measurement(measure, wrong, reason):
    with pytest.raises(BenchError, match=f"expected a {wrong} start, but graph backbone {reason}"):
        measure(2, loads=lambda kind: (kind == "baked") != (kind == wrong))


def test_one_start_of_a_kind_is_refused_before_anything_starts(measure):
    with pytest.raises(TooFewItemsError, match="2 or more"):
        measure(1)


def test_a_record_has_a_table(measure, tmp_path):
    path, _ = measure(5)
    record = store.read_record(path, StartUp)
    (table,) = record.tables(path)
    assert table.columns == ("phase", "meaning", "cold, s", "baked, s")
    assert [row[0] for row in table.rows][-1:] == ["ready"]
    # Cold starts are numbers 1, 4, 5, 8 and 9 of all.
    assert table.rows[-1][2] == "95.0 [91.0, 99.0]"
    assert "94% interval" in table.notes[0]
    with pytest.raises(store.MissingRecordError, match="slimqwen bench startup --variant tiny-mtp4"):
        store.latest(tmp_path / "experiments" / "tiny-mtp4", StartUp)


@pytest.mark.engine
def test_a_real_server_states_its_phases(tiny_server):
    log = Path(tiny_server.log).read_text(encoding="utf-8", errors="replace")
    result = start_up.split_phases(log, 600.0)
    assert result["load_weights"] < 60
    assert 0 < result["first_requests"] < 60
    assert result["compile"] == 0
    assert sum(result.values()) == pytest.approx(600.0, abs=0.1)
