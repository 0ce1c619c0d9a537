import contextlib
import dataclasses
import json
from types import SimpleNamespace

import pytest

from slimqwen import variant
from slimqwen.evals import EvalError, quality
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.quality import OutputTokens, Quality
from slimqwen.evals.suites.suite import AUTO, Suite
from slimqwen.records import store
from slimqwen.serving import shared_server
from slimqwen.variant import repository_root
from tests.evals.small_suite import SMALL
from tests.record_files import example as example_of


def test_generated_answers_are_scored_and_their_ends_counted(parse):
    row, _ = parse("small_facts")
    assert row.value == pytest.approx(1 / 3)
    assert row.standard_error == pytest.approx(1 / 3)
    assert (row.item_count, row.available_count) == (3, 60)
    assert (row.output_count, row.truncated_count, row.empty_count) == (3, 2, 1)
    assert row.output_tokens == OutputTokens(mean=3, p50=4, max=4)


def test_repeats_of_one_item_count_as_one_observation(parse):
    once, three = parse("small_facts")[0], parse("small_facts", repeats=3)
    row, items = three
    assert [(i.index, i.repeat) for i in items] == [(n, r) for n in range(3) for r in range(3)]
    assert len({i.cluster for i in items}) == 3
    assert (row.item_count, row.cluster_count, row.output_count) == (3, 3, 9)
    # The same answer three times tells nothing more.
    assert (row.value, row.standard_error) == pytest.approx((once.value, once.standard_error))
    assert row.settings["repeats"] == 3


@pytest.mark.parametrize(("floor", "said"), [(0.0, "pass"), (0.2, "inconclusive"), (0.95, "fail")])
def test_a_floor_is_judged_by_the_whole_interval(parse, floor, said):
    """One of three is right: the exact interval reaches from 0.8 % to 90.6 %."""
    row, _ = parse("small_facts", floor=floor)
    assert (row.floor, row.floor_verdict) == (floor, said)


def test_a_record_with_an_earlier_digest_of_the_code_is_evidence_but_no_reason_not_to_measure():
    suite = Suite.load("tinyworld", repository_root())
    example = Quality.model_validate(example_of("quality"))
    earlier = {
        task.name: example.tasks["example_facts"].model_copy(
            update={"settings": {**suite.settings_of(task), "scorer": "0" * 16}}
        )
        for task in suite.tasks
    }
    for score in earlier.values():
        del score.settings["code"]
    record = example.model_copy(update={"suite": suite.name, "tasks": earlier})
    assert "code" in record.changed_settings(suite)
    assert not {"code", "scorer"} & {*record.changed_settings(suite, may_be_old=True)}


@pytest.fixture
def measure(monkeypatch, small_suite):
    """Measure a served stand-in; returns the record's path."""

    def run(served_variant, limit=4, suite=small_suite, **arguments):
        monkeypatch.setattr(quality, "share_server", lambda *_, **__: contextlib.nullcontext(served_variant))
        return quality.measure_quality(served_variant.variant, suite, limit, Invocation(["x"], **arguments))

    return run


def test_a_measured_variant_has_a_valid_record_with_every_item(
    measure, add_served, stand_in, monkeypatch, capfd
):
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    messages = []
    server = stand_in()
    path = measure(add_served("tiny", server), progress=lambda *step: messages.append(step))
    record = store.read_record(path)
    assert [row.item_count for row in record.tasks.values()] == [4, 4, 4]
    assert record.tasks["small_facts"].value == 1
    assert record.limit == 4
    assert len(store.read_items(path)) == 12
    assert set(record.provenance.datasets) == {
        f"eval/tasks/{task}.{ending}" for task in record.tasks for ending in ("jsonl", "yaml")
    }
    assert ("generating responses of small_facts", 4, 4) in messages
    assert ("scoring options of small_margin", 12, 12) in messages
    assert ("scoring texts of small_prose", 4, 4) in messages
    assert {request["headers"]["Authorization"] for request in server.requests} == {"Bearer hunter2"}
    assert "hunter2" not in path.read_text()
    assert capfd.readouterr().out == ""


def test_a_variant_that_serves_one_request_at_a_time_is_asked_the_same(measure, add_served, stand_in):
    servers = stand_in(), stand_in()
    variants = [add_served(f"tiny-{n}", server) for n, server in enumerate(servers)]
    variants[1].server.command.flags["max-num-seqs"] = 1
    for one in variants:
        measure(one)
    asked = [sorted(json.dumps(r | {"headers": None}, sort_keys=True) for r in s.requests) for s in servers]
    assert asked[0] == asked[1]


def test_a_limit_without_a_standard_error_is_refused_before_anything_starts(measure, add_served, stand_in):
    server = stand_in()
    with pytest.raises(EvalError, match="set --limit to 2 or more"):
        measure(add_served("tiny", server), limit=1)
    assert server.requests == []


def test_texts_follow_the_token_that_the_suite_names(measure, add_served, stand_in):
    server = stand_in()
    measure(add_served("tiny", server))
    scored = [request["prompt"][0] for request in server.requests if request.get("echo")]
    texts = [tokens for tokens in scored if 8 in tokens and 2 not in tokens]
    assert len(texts) == 4
    assert {tokens[0] for tokens in texts} == {0}


def test_a_task_that_is_not_there_is_named(measure, add_served, stand_in):
    one = add_served("tiny", stand_in())
    (one.variant.root / SMALL.tasks_folder / "small_prose.yaml").unlink()
    with pytest.raises(EvalError, match="small_prose"):
        measure(one)


@pytest.mark.parametrize("lives_for", [0, 17])
def test_a_run_whose_server_died_leaves_no_record_and_goes_on_where_it_broke_off(
    measure, add_served, stand_in, lives_for
):
    first = stand_in(lives_for)
    one = add_served("tiny", first)
    kept = f"nothing was recorded; .* its {lives_for} responses so far are kept: run the same command"
    with pytest.raises(shared_server.ServerLostError, match=kept):
        measure(one)
    assert [file.name for file in one.variant.folder.iterdir() if "quality" in file.name] == []
    (unfinished,) = (one.variant.root / ".cache" / "quality").iterdir()

    second = stand_in()
    resumed = store.read_record(path := measure(at(one, second)))
    answered = [asked(request) for request in first.requests[:lives_for]]
    assert not [request for request in second.requests if asked(request) in answered]
    assert not unfinished.exists()

    third = stand_in()
    undisturbed_path = measure(at(one, third), folder="undisturbed")
    undisturbed = store.read_record(undisturbed_path)
    assert len(third.requests) == lives_for + len(second.requests)
    assert resumed.tasks == undisturbed.tasks
    assert store.read_items(path) == store.read_items(undisturbed_path)


@pytest.mark.usefixtures("stamps")
def test_answers_of_another_extent_are_not_taken_over(measure, add_served, stand_in):
    one = add_served("tiny", stand_in(3))
    with pytest.raises(shared_server.ServerLostError):
        measure(one)
    first, again = stand_in(), stand_in()
    measure(at(one, first), limit=3)
    measure(at(one, again), limit=3)
    assert len(first.requests) == len(again.requests) > 0


def at(one, server):
    """The same variant, now answered by another server."""
    running = SimpleNamespace(**(vars(one.server) | {"base_url": server.base_url}))
    return dataclasses.replace(one, server=running)


def asked(request):
    return json.dumps({name: value for name, value in request.items() if name != "headers"}, sort_keys=True)


def test_the_deciding_sample_is_what_the_suite_assumes_or_all(measure, small_suite, add_served, stand_in):
    facts, margin, prose = small_suite.tasks
    tasks = (
        facts.model_copy(update={"non_inferiority_margin": 0.9, "assumed_discordance": 0.1}),
        margin.model_copy(update={"assumed_deviation": 1.0}),
        prose,
    )
    suite = small_suite.model_copy(update={"tasks": tasks})
    record = store.read_record(measure(add_served("tiny", stand_in()), AUTO, suite))
    rows = record.tasks
    assert record.limit == "auto"
    few = tasks[0].items_to_decide
    assert 2 <= few < 6
    assert rows["small_facts"].item_count == few
    # (2.05 + 1.71) standard deviations of 1 over a margin of 0.1, squared; there are six.
    assert (rows["small_margin"].item_count, rows["small_margin"].items_to_decide) == (6, 1414)
    assert (rows["small_prose"].item_count, rows["small_prose"].items_to_decide) == (6, None)


def test_data_that_were_not_fetched_are_named_before_a_server_starts(add_served, stand_in, monkeypatch):
    one = add_served("tiny", stand_in())
    monkeypatch.setattr(quality, "share_server", lambda *_, **__: pytest.fail("a server starts"))
    core = Suite.load("core", repository_root())
    with pytest.raises(
        EvalError, match=r"data/mmlu_pro, data/ifeval, data/gpqa, .*`slimqwen download --suite core`"
    ):
        quality.measure_quality(one.variant, core, 2, Invocation([]))


@pytest.mark.parametrize(
    ("template", "line", "parser"),
    [
        ("{{ tools }} <tool_call>\n<function=name>", "", "qwen3_coder"),
        ('{{ tools }} <tool_call>\n{"name": ', "", "hermes"),
        ('{{ tools }} <tool_call>\n{"name": ', "VLLM_TOOL_CALL_PARSER=qwen3_json\n", "qwen3_json"),
    ],
)
def test_a_suite_with_tools_switches_the_tool_parser_on(add_variant, tmp_path, template, line, parser):
    weights = tmp_path / "weights" / "own"
    weights.mkdir(parents=True)
    (weights / "tokenizer_config.json").write_text("{}")
    (weights / "chat_template.jinja").write_text(template)
    add_variant("own", f"VLLM_MODEL=weights/own\n{line}")
    own = variant.load("own", tmp_path)
    served = quality.with_tool_parser(own, Suite.load("core", repository_root()))
    values = {key: setting.value for key, setting in served.settings.items()}
    assert values == {
        "VLLM_MODEL": "weights/own", "VLLM_ENABLE_AUTO_TOOL_CHOICE": "1", "VLLM_TOOL_CALL_PARSER": parser,
    }  # fmt: skip
    assert quality.with_tool_parser(own, Suite.load("tinyworld", repository_root())) is own
