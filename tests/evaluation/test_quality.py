import contextlib
import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import yaml

from slimqwen.evaluation import quality, served
from slimqwen.evaluation.completions import Generation
from slimqwen.evaluation.statistics import TooFewItemsError
from slimqwen.records import store
from slimqwen.variant import load, repository_root

GENERATE = """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """\
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{options}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
"""
READ = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
SMALL = quality.Suite(
    name="small",
    tasks_folder=Path("eval/tasks"),
    chat_template=False,
    text_prefix="<end>",
    sample_items=3,
    tasks=(
        quality.SuiteTask("small_facts", "exact_match", 0.05),
        quality.SuiteTask("small_margin", quality.ANSWER_MARGIN, 0.1),
        quality.SuiteTask("small_prose", quality.BITS_PER_BYTE, 0.01),
    ),
)


@pytest.fixture
def recorded():
    """What lm-eval returned for three items of three tasks on an untrained model; facts 1 then made right."""
    results = json.loads(Path(__file__).with_name("lm_eval_results.json").read_text())
    for sample in results["samples"]["small_facts"]:
        sample["resps"] = [[Generation(**sample["resps"][0][0])]]
    results["samples"]["small_facts"][1].update(exact_match=1.0, resps=[[Generation("glass", "stop")]])
    results["samples"]["small_facts"][2].update(resps=[[Generation(" ", "length")]])
    return results


def test_generated_answers_are_scored_and_their_ends_counted(recorded):
    row = quality.parse(SMALL, recorded, Path()).tasks["small_facts"]
    assert row["value"] == pytest.approx(1 / 3)
    assert row["standard_error"] == pytest.approx(1 / 3)
    assert (row["item_count"], row["available_count"]) == (3, 60)
    assert (row["truncated_count"], row["empty_count"]) == (2, 1)


def test_margin_is_right_minus_best_wrong(recorded):
    scores = quality.parse(SMALL, recorded, Path())
    expected = []
    for sample in recorded["samples"]["small_margin"]:
        options = [log_likelihood for log_likelihood, _ in sample["filtered_resps"]]
        right = options[sample["target"]]
        expected.append(right - max(o for n, o in enumerate(options) if n != sample["target"]))
    assert [i.value for i in scores.items if i.task == "small_margin"] == pytest.approx(expected)
    row = scores.tasks["small_margin"]
    assert row["value"] == pytest.approx(sum(expected) / 3)
    assert row["truncated_count"] is None


def test_bits_per_byte_weighs_documents_by_their_bytes(recorded):
    scores = quality.parse(SMALL, recorded, Path())
    pairs = [sample["bits_per_byte"] for sample in recorded["samples"]["small_prose"]]
    bits, byte_count = -sum(p[0] for p in pairs) / math.log(2), sum(p[1] for p in pairs)
    row = scores.tasks["small_prose"]
    assert row["value"] == pytest.approx(bits / byte_count)
    assert row["higher_is_better"] is False
    assert sum(i.weight for i in scores.items if i.task == "small_prose") == byte_count


def test_items_keep_their_names_whatever_the_model_answers(recorded):
    before = quality.parse(SMALL, copy.deepcopy(recorded), Path()).items
    for samples in recorded["samples"].values():
        samples.reverse()
        for sample in samples:
            sample["filtered_resps"] = [[-1.0 - n, False] for n in range(4)]
            sample["exact_match"] = 0.0
    after = quality.parse(SMALL, recorded, Path()).items
    assert [(i.task, i.index, i.item) for i in after] == [(i.task, i.index, i.item) for i in before]
    assert len({i.item for i in before}) == len(before)


@pytest.mark.parametrize(
    ("measure", "damage", "cause"),
    [
        ("accuracy", lambda sample: None, "no accuracy"),
        ("exact_match", lambda sample: sample.update(exact_match=float("nan")), "not a number"),
        ("exact_match", lambda sample: sample.update(doc_id=1), "several filters"),
    ],
)
def test_items_without_one_finite_score_are_an_error(recorded, measure, damage, cause):
    suite = quality.Suite(
        "small", Path(), False, "<end>", 3, (quality.SuiteTask("small_facts", measure, 0.05),)
    )
    damage(recorded["samples"]["small_facts"][0])
    with pytest.raises(quality.SuiteError, match=cause):
        quality.parse(suite, recorded, Path())


def test_the_suites_of_the_repository_are_readable():
    files = list((repository_root() / "eval" / "suites").glob("*.yaml"))
    assert files
    for file in files:
        suite = quality.load_suite(file.stem, repository_root())
        assert suite.tasks
        assert all(task.non_inferiority_margin >= 0 for task in suite.tasks)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "does not exist"),
        ("tasks_folder: [", "unusable"),
        ("tasks_folder: x\n", "chat_template"),
        ("", "unusable"),
    ],
)
def test_a_bad_suite_is_named(tmp_path, content, cause):
    file = tmp_path / "eval" / "suites" / "mine.yaml"
    file.parent.mkdir(parents=True)
    if content is not None:
        file.write_text(content)
    with pytest.raises(quality.SuiteError, match=cause) as error:
        quality.load_suite("mine", tmp_path)
    assert "eval/suites/mine.yaml" in str(error.value)


@pytest.fixture
def small_suite(tmp_path, write_task):
    prompts = [f"Q : what sells town {n} ? A :" for n in range(6)]
    write_task("small_facts", [{"prompt": p, "answer": "salt"} for p in prompts], GENERATE)
    options = ["salt", "wool", "iron"]
    write_task("small_margin", [{"prompt": p, "options": options, "right": 1} for p in prompts], CHOOSE)
    write_task("small_prose", [{"text": " ".join([*["town"] * n, "salt"])} for n in range(1, 7)], READ)
    (tmp_path / "eval" / "suites").mkdir()
    rows = [{"task": t.name, "measure": t.measure, "non_inferiority_margin": 0.1} for t in SMALL.tasks]
    content = {
        "tasks_folder": "eval/tasks",
        "chat_template": False,
        "text_prefix": "<end>",
        "sample_items": 4,
        "tasks": rows,
    }
    (tmp_path / "eval" / "suites" / "small.yaml").write_text(yaml.safe_dump(content))
    return quality.load_suite("small", tmp_path)


@pytest.fixture
def measure(monkeypatch, small_suite):
    """Measure a served stand-in; returns the record's path."""

    def run(served_variant, limit=4, **arguments):
        monkeypatch.setattr(quality, "serve", lambda *_, **__: contextlib.nullcontext(served_variant))
        return quality.measure(
            served_variant.variant, small_suite, command=["scripts/eval_quality.py"], limit=limit, **arguments
        )

    return run


def test_a_measured_variant_has_a_valid_record_with_every_item(
    measure, add_served, stand_in, monkeypatch, capfd
):
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    told = []
    server = stand_in()
    path = measure(add_served("tiny", server), progress=lambda *step: told.append(step))
    record = store.read(path)
    assert {task: row["item_count"] for task, row in record["tasks"].items()} == dict.fromkeys(
        record["tasks"], 4
    )
    assert record["tasks"]["small_facts"]["value"] == 1
    assert record["limit"] == 4
    assert len(store.read_items(path)) == 12
    assert set(record["provenance"]["datasets"]) == {
        f"eval/tasks/small_{name}.{ending}"
        for name in ("facts", "margin", "prose")
        for ending in ("jsonl", "yaml")
    }
    assert ("generating answers", 4, 4) in told
    assert ("scoring options", 12, 12) in told
    assert ("scoring texts", 4, 4) in told
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


@pytest.mark.parametrize("lives_for", [0, 2, 6, 17])
def test_a_server_that_dies_is_an_error_and_leaves_no_record(measure, add_served, stand_in, lives_for):
    dying = add_served("tiny", stand_in(lives_for))
    with pytest.raises(served.ServerLostError, match="nothing was recorded"):
        measure(dying)
    assert [file.name for file in dying.variant.folder.iterdir() if "quality" in file.name] == []


def test_a_limit_without_a_standard_error_is_refused_before_anything_starts(measure, add_served, stand_in):
    server = stand_in()
    with pytest.raises(TooFewItemsError, match="2 items or more"):
        measure(add_served("tiny", server), limit=1)
    assert server.requests == []


def test_texts_follow_the_token_that_the_suite_names(measure, add_served, stand_in):
    server = stand_in()
    measure(add_served("tiny", server))
    texts = [
        r["prompt"][0]
        for r in server.requests
        if r.get("echo") and 8 in r["prompt"][0] and 2 not in r["prompt"][0]
    ]
    assert len(texts) == 4
    assert {tokens[0] for tokens in texts} == {0}


def test_a_prefix_that_the_tokenizer_lacks_is_named(measure, add_served, stand_in, small_suite):
    suite = dataclasses.replace(small_suite, text_prefix="<|endoftext|>")
    one = add_served("tiny", stand_in())
    with pytest.raises(quality.SuiteError, match=r"<\|endoftext\|>"):
        quality.score(suite, one, root=one.variant.root, limit=2, log=one.variant.root / "log")


def test_a_task_that_is_not_there_is_named(measure, add_served, stand_in, small_suite):
    (small_suite.tasks_folder / "small_prose.yaml").unlink()
    with pytest.raises(quality.SuiteError, match="small_prose"):
        measure(add_served("tiny", stand_in()))


@pytest.mark.engine
def test_a_real_server_is_scored(tiny_server, tmp_path):
    tiny = load("tiny")
    running = served.Served(tiny, tiny_server, True, served.max_model_len(tiny_server.base_url))
    suite = quality.load_suite("tinyworld", tiny.root)
    scores = quality.score(suite, running, root=tiny.root, limit=6, log=tmp_path / "quality.log")
    assert {task: row["item_count"] for task, row in scores.tasks.items()} == {t.name: 6 for t in suite.tasks}
    assert 0 < scores.tasks["tinyworld_prose"]["value"] < 8
    assert all(item.output is not None for item in scores.items if item.task == "tinyworld_facts")
    again = quality.score(suite, running, root=tiny.root, limit=6, log=tmp_path / "quality.log")
    assert [i.item for i in again.items] == [i.item for i in scores.items]
