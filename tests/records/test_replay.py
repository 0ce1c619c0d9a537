"""A record measured again: what is asked of the measurement, and what is said of the two records."""

import copy
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.bench import latency
from slimqwen.bench.latency import Latency
from slimqwen.bench.latency.speedups import LATENCY_MEASURES
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.errors import SlimqwenError
from slimqwen.evals import quality
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import replay, store
from slimqwen.records.differences import Circumstance
from slimqwen.variant import ConfigError
from tests.record_files import example, write

pytestmark = pytest.mark.usefixtures("stamps")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path, add_variant):
    add_variant("a", "VLLM_MODEL=weights/tiny\n")
    add_variant("b", "BASE=a\n", baseline="a")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    return tmp_path


def answers(right, of=8):
    facts = [
        {"task": "example_facts", "item": f"f{n}", "value": float(n < right), "weight": 1, "output": str(n < right)}
        for n in range(of)
    ]  # fmt: skip
    prose = [
        {"task": "example_prose", "item": f"p{n}", "value": 1.0 + n, "weight": 10, "output": None}
        for n in range(4)
    ]
    return facts + prose


@pytest.fixture
def scored(repository, monkeypatch):
    """Keep a quality record of b, and have the next measurement find what is told."""

    def keep(before, after, body=None, **changes):
        body = body or example("quality", variant="b", suite="tinyworld")
        path = write(repository / "experiments" / "b", body, before)
        asked = {}

        def measure(one, suite, *, records_folder, **options):
            asked.update(options, variant=one.name, suite=suite)
            now = copy.deepcopy(body)
            now["provenance"] |= changes
            return write(records_folder, now, after)

        monkeypatch.setattr(quality, "measure", measure)
        return path, asked

    return keep


def test_equal_answers_are_a_reproduction(scored, repository):
    path, asked = scored(answers(5), answers(5))
    result = replay.replay(path, command=["scripts/replay.py"], root=repository)
    assert result.reproduced
    assert result.summary == "reproduced: all 12 answers and their scores are equal"
    assert result.repetition.parent == path.parent
    assert result.repetition != path
    assert [row[4] for row in result.tables[0].rows] == ["+0.000 ± 0.000"] * 2
    assert result.tables[0].columns[2:4] == ("then", "now")
    assert result.differences == ()
    assert asked["variant"] == "b"
    assert asked["limit"] == example("quality")["limit"]
    assert asked["chat"] is False
    assert asked["command"] == ["scripts/replay.py"]


@pytest.mark.parametrize("changed", [{"value": 0.0}, {"output": "another"}])
def test_one_other_answer_is_none_even_where_the_score_is_the_same(scored, repository, changed):
    after = answers(5)
    after[0] |= changed
    path, _ = scored(answers(5), after)
    result = replay.replay(path, command=["x"], root=repository)
    assert not result.reproduced
    assert result.summary == "1 of 12 answers or their scores differ"


def test_what_was_not_the_same_is_named(scored, repository):
    hardware = example("quality")["provenance"]["hardware"] | {"cpu_model": "Other"}
    path, _ = scored(answers(5), answers(3), hardware=hardware, git={"commit": "9" * 40, "dirty": False})
    result = replay.replay(path, command=["x"], root=repository)
    assert [each.circumstance for each in result.differences] == [Circumstance.HARDWARE, Circumstance.CODE]
    facts = result.tables[0].rows[0]
    assert facts[4].startswith("-0.250 ±")
    assert facts[-1] == "8"


def test_items_of_one_side_alone_are_counted_and_the_rest_is_paired(scored, repository):
    path, _ = scored(answers(5), answers(5, of=6))
    result = replay.replay(path, command=["x"], root=repository)
    assert not result.reproduced
    assert result.summary == "0 of 10 answers or their scores differ, 2 items are on one side alone"
    assert result.tables[0].rows[0][-1].startswith("6")


def test_a_run_that_had_all_think_has_all_think_again(scored, repository):
    body = example("quality", variant="b", suite="core", limit=2, endpoint="chat")
    body["tasks"]["ifeval"] = body["tasks"].pop("example_facts") | {"settings": {"thinking": True}}
    path, asked = scored(answers(5), answers(5), body)
    replay.replay(path, command=["x"], root=repository)
    plain = {task.name: task.thinking for task in Suite.load("core", repository).tasks}
    again = {task.name: task.thinking for task in asked["suite"].tasks}
    assert again == plain | {"ifeval": True}
    assert asked["chat"]
    assert asked["limit"] == 2


def times(ms, rounds=1, count=12):
    return [
        {"class": "short", "error": None, "round": number, **dict.fromkeys(LATENCY_MEASURES, ms + n + number)}
        for number in range(rounds)
        for n in range(count)
    ]


@pytest.fixture
def timed(repository, monkeypatch):
    """Keep a latency record of b made in turns with a, and have the next measurement find what is told."""

    def keep(before, after, *, rounds=1, **changes):
        body = example("latency", variant="b", workload="classes", rounds=rounds, interleaved_with=["a"])
        path = write(repository / "experiments" / "b", body, before)
        asked = {}

        def measure(chosen, load, *, records_folders, **options):
            asked.update(options, variants=[one.name for one in chosen], workload=load.name)
            now = copy.deepcopy(body)
            now["classes"]["short"] |= changes
            now["run"] = "2030-01-01T00:00:00Z"
            return [
                write(folder, now | {"variant": one.name}, after if one.name == "b" else times(1.0))
                for one, folder in zip(chosen, records_folders, strict=True)
            ]

        monkeypatch.setattr(latency, "measure", measure)
        return path, asked

    return keep


def test_times_as_long_as_then_have_no_change_within_the_interval(timed, repository):
    path, asked = timed(times(100.0), times(100.5))
    result = replay.replay(path, command=["x"], root=repository)
    assert result.reproduced
    assert "1.00 lies inside" in result.summary
    measures = [row[1] for row in result.tables[0].rows]
    assert measures == ["TTFT", "TPOT", "E2EL"]
    assert asked["variants"] == ["a", "b"]
    assert (asked["workload"], asked["rounds"]) == ("classes", 1)
    assert result.repetition.parent.name == "b"
    assert len(list(store.records(repository / "experiments" / "a", Latency))) == 1


def test_times_twice_as_long_have_it_outside(timed, repository):
    path, _ = timed(times(100.0), times(200.0))
    result = replay.replay(path, command=["x"], root=repository)
    assert not result.reproduced
    assert "1.00 lies outside" in result.summary
    assert "now, relative to then: short 0.51x [0.50, 0.53]; " in result.summary


def test_of_several_rounds_their_spread_is_what_counts(timed, repository):
    """Requests of a round are alike, rounds are not: over requests the same figures would be told apart."""

    def drifting(start):
        return [
            {"class": "short", "error": None, "round": n, **dict.fromkeys(LATENCY_MEASURES, start + 40.0 * n)}
            for n in range(5)
            for _ in range(40)
        ]

    path, _ = timed(drifting(100.0), drifting(120.0), rounds=5)
    assert replay.replay(path, command=["x"], root=repository).reproduced
    one_round = [item | {"round": 0} for item in drifting(100.0) if item["round"] == 4]
    path, _ = timed(
        one_round, [item | {name: item[name] * 1.01 for name in LATENCY_MEASURES} for item in one_round]
    )
    assert not replay.replay(path, command=["x"], root=repository).reproduced


def test_other_prompts_are_no_reproduction(timed, repository):
    path, _ = timed(times(100.0), times(100.0), prompts_sha256="12" * 32)
    result = replay.replay(path, command=["x"], root=repository)
    assert not result.reproduced
    assert "other prompts than then in short" in result.summary


def test_requests_that_failed_are_left_out(timed, repository):
    broken = times(100.0)
    broken[0] |= {"error": "died", "e2el_ms": 1e9}
    path, _ = timed(times(100.0), broken)
    rows = replay.replay(path, command=["x"], root=repository).tables[0].rows
    assert all(float(row[3].replace(",", "")) < 1e5 for row in rows)


def test_a_kind_that_cannot_be_replayed_is_refused_in_one_line(repository):
    path = write(repository / "experiments" / "b", example("acceptance", variant="b"), [{"depth": 1}])
    with pytest.raises(SlimqwenError, match="kind acceptance, which cannot be replayed; `"):
        replay.replay(path, command=["x"], root=repository)


def test_a_missing_checkpoint_names_the_command_that_makes_it(scored, repository):
    path, asked = scored(answers(5), answers(5))
    (repository / "experiments" / "b" / "config.env").write_text("BASE=a\nVLLM_MODEL=weights/b\n")
    (repository / "experiments" / "b" / "recipe.yaml").write_text("description: …\n")
    with pytest.raises(MissingCheckpointError, match="make recipe VARIANT=b"):
        replay.replay(path, command=["x"], root=repository)
    assert asked == {}


def test_records_that_are_not_there_or_damaged_are_named(scored, repository):
    with pytest.raises(store.RecordError, match="no such record"):
        replay.replay(repository / "experiments" / "b" / "quality_nope.json", command=["x"], root=repository)
    path, asked = scored(answers(5), answers(5))
    path.with_suffix(".items.jsonl").write_text("")
    with pytest.raises(store.RecordError, match="not the items"):
        replay.replay(path, command=["x"], root=repository)
    assert asked == {}


def test_a_record_of_a_variant_that_is_gone_is_named(repository):
    body = example("quality", variant="gone")
    path = write(repository / "experiments" / "b", body, answers(5))
    with pytest.raises(ConfigError, match="gone"):
        replay.replay(path, command=["x"], root=repository)


@pytest.mark.engine
def test_a_real_server_answers_as_it_did(tiny_server, tmp_path):
    tiny = variant.load("tiny")
    port = tiny_server.command.port
    suite = Suite.load("tinyworld", tiny.root)
    folder = tmp_path / "experiments" / "tiny"
    path = quality.measure(tiny, suite, command=["first"], limit=3, port=port, records_folder=folder)
    result = replay.replay(path, command=["scripts/replay.py"], port=port)
    scores = store.read(path, quality.Quality).tasks
    assert {task: score.item_count for task, score in scores.items()} == {t.name: 3 for t in suite.tasks}
    assert 0 < scores["tinyworld_prose"].value < 8  # bits per byte
    assert result.reproduced
    assert result.summary == "reproduced: all 15 answers and their scores are equal"
    # Somebody may commit meanwhile.
    assert {each.circumstance for each in result.differences} <= {Circumstance.CODE}
    assert result.repetition.parent == folder
    made = store.read(result.repetition).provenance
    assert (made.server, made.command) == ("found", "python scripts/replay.py")
