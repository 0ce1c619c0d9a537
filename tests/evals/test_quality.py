import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest

from slimqwen.evals import EvalError, quality
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.quality import OutputTokens, Quality
from slimqwen.evals.suites import lm_eval_run
from slimqwen.evals.suites.generation import Generation, PromptTooLongError
from slimqwen.evals.suites.scored import TaskRun
from slimqwen.evals.suites.suite import ANSWER_MARGIN, AUTO, BITS_PER_BYTE, Suite, SuiteTask
from slimqwen.records import store
from slimqwen.serving import shared_server
from slimqwen.variant import load, repository_root
from tests.byte_tokenizer import byte_tokenizer
from tests.record_files import example as example_of
from tests.stand_in import WORDS


def score(suite, server, **how):
    """The scores of a running server by task, and their items; no record."""
    runs, files = lm_eval_run.run_suite(
        suite, server, log=server.variant.root / "logs" / "quality.log", **how
    )
    items = [item for run in runs for item in run.items]
    return SimpleNamespace(
        tasks={run.task.name: quality.score_task(run) for run in runs}, items=items, datasets=files
    )


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
SMALL = Suite(
    name="small",
    tasks_folder=Path("eval/tasks"),
    chat_template=False,
    text_prefix="<end>",
    sample="first",
    tasks=(
        SuiteTask(task="small_facts", measure="exact_match", non_inferiority_margin=0.05),
        SuiteTask(task="small_margin", measure=ANSWER_MARGIN, non_inferiority_margin=0.1),
        SuiteTask(task="small_prose", measure=BITS_PER_BYTE, non_inferiority_margin=0.01),
    ),
)


@pytest.fixture
def recorded():
    """What lm-eval returned for three items of three tasks on an untrained model; facts 1 then made right."""
    results = json.loads(Path(__file__).with_name("lm_eval_results.json").read_text())
    for sample in results["samples"]["small_facts"]:
        sample["resps"] = [[Generation(**sample["resps"][0][0], tokens=4)]]
    results["samples"]["small_facts"][1].update(exact_match=1.0, resps=[[Generation("glass", "stop", 1)]])
    results["samples"]["small_facts"][2].update(resps=[[Generation(" ", "length", 4)]])
    return results


@pytest.fixture
def parse(recorded):
    """Row and items of one of those tasks, some of its fields changed."""

    def one(name, repeats=1, **changes):
        task = next(task for task in SMALL.tasks if task.name == name)
        task = task.model_copy(update={"repeats": repeats, **changes})
        results = {name: recorded["samples"][name]}
        available = recorded["n-samples"][name]["original"]
        items = lm_eval_run.parse_samples(task, {name: available}, [results] * repeats)
        return quality.score_task(TaskRun(task, items, available, SMALL.settings_of(task))), items

    return one


def test_generated_answers_are_scored_and_their_ends_counted(parse):
    row, _ = parse("small_facts")
    assert row.value == pytest.approx(1 / 3)
    assert row.standard_error == pytest.approx(1 / 3)
    assert (row.item_count, row.available_count) == (3, 60)
    assert (row.output_count, row.truncated_count, row.empty_count) == (3, 2, 1)
    assert row.output_tokens == OutputTokens(mean=3, p50=4, max=4)


def test_margin_is_right_minus_best_wrong(recorded, parse):
    row, items = parse("small_margin")
    expected = []
    for sample in recorded["samples"]["small_margin"]:
        options = [log_likelihood for log_likelihood, _ in sample["filtered_resps"]]
        right = options[sample["target"]]
        expected.append(right - max(o for n, o in enumerate(options) if n != sample["target"]))
    assert [i.value for i in items] == pytest.approx(expected)
    assert row.value == pytest.approx(sum(expected) / 3)
    assert row.truncated_count is None
    assert row.output_tokens is None


def test_bits_per_byte_weighs_documents_by_their_bytes(recorded, parse):
    row, items = parse("small_prose")
    pairs = [sample["bits_per_byte"] for sample in recorded["samples"]["small_prose"]]
    bits, byte_count = -sum(p[0] for p in pairs) / math.log(2), sum(p[1] for p in pairs)
    assert row.value == pytest.approx(bits / byte_count)
    assert row.higher_is_better is False
    assert sum(i.weight for i in items) == byte_count


def test_items_keep_their_names_whatever_the_model_answers(recorded, parse):
    before = parse("small_facts")[1]
    recorded["samples"]["small_facts"].reverse()
    for sample in recorded["samples"]["small_facts"]:
        sample["exact_match"] = 0.0
    after = parse("small_facts")[1]
    assert [(i.task, i.index, i.item) for i in after] == [(i.task, i.index, i.item) for i in before]
    assert len({i.item for i in before}) == len(before)


def test_repeats_of_one_item_count_as_one_observation(parse):
    once, three = parse("small_facts")[0], parse("small_facts", repeats=3)
    row, items = three
    assert [(i.index, i.repeat) for i in items] == [(n, r) for n in range(3) for r in range(3)]
    assert len({i.cluster for i in items}) == 3
    assert (row.item_count, row.cluster_count, row.output_count) == (3, 3, 9)
    # The same answer three times tells nothing more.
    assert (row.value, row.standard_error) == pytest.approx((once.value, once.standard_error))
    assert row.settings["repeats"] == 3


def test_several_parts_of_a_task_are_numbered_one_after_the_other(recorded):
    samples = recorded["samples"]["small_facts"]
    items = lm_eval_run.parse_samples(
        SMALL.tasks[0], {"a": 10, "b": 5}, [{"b": samples[:1], "a": samples[1:]}]
    )
    assert [item.index for item in items] == [1, 2, 10]


@pytest.mark.parametrize(
    ("measure", "damage", "cause"),
    [
        ("accuracy", lambda sample: None, "no accuracy"),
        ("exact_match", lambda sample: sample.update(exact_match=float("nan")), "not a number"),
        ("exact_match", lambda sample: sample.update(doc_id=1), "several filters"),
    ],
)
def test_items_without_one_finite_score_are_an_error(recorded, parse, measure, damage, cause):
    damage(recorded["samples"]["small_facts"][0])
    with pytest.raises(EvalError, match=cause):
        parse("small_facts", measure=measure)


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


def test_the_suites_of_the_repository_are_readable():
    files = list((repository_root() / "eval" / "suites").glob("*.yaml"))
    assert files
    for file in files:
        suite = Suite.load(file.stem, repository_root())
        assert suite.tasks
        assert all(task.items_to_decide for task in suite.tasks)


@pytest.fixture
def small_suite(write_task):
    prompts = [f"Q : what sells town {n} ? A :" for n in range(6)]
    write_task("small_facts", [{"prompt": p, "answer": "salt"} for p in prompts], GENERATE)
    options = ["salt", "wool", "iron"]
    write_task("small_margin", [{"prompt": p, "options": options, "right": 1} for p in prompts], CHOOSE)
    write_task("small_prose", [{"text": " ".join([*["town"] * n, "salt"])} for n in range(1, 7)], READ)
    return SMALL


def facts_alone(suite, **changes):
    """The suite with its first task alone, some of whose fields are changed."""
    return suite.model_copy(update={"tasks": (suite.tasks[0].model_copy(update=changes),)})


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
    with pytest.raises(EvalError, match="set it to 2 or more"):
        measure(add_served("tiny", server), limit=1)
    assert server.requests == []


def test_texts_follow_the_token_that_the_suite_names(measure, add_served, stand_in):
    server = stand_in()
    measure(add_served("tiny", server))
    scored = [request["prompt"][0] for request in server.requests if request.get("echo")]
    texts = [tokens for tokens in scored if 8 in tokens and 2 not in tokens]
    assert len(texts) == 4
    assert {tokens[0] for tokens in texts} == {0}


def test_a_prefix_that_the_tokenizer_lacks_is_named(measure, add_served, stand_in, small_suite):
    suite = small_suite.model_copy(update={"text_prefix": "<|endoftext|>"})
    one = add_served("tiny", stand_in())
    with pytest.raises(EvalError, match=r"<\|endoftext\|>"):
        score(suite, one, limit=2)


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


def test_both_sides_of_the_split_together_ask_every_item_once(small_suite, add_served, stand_in, write_task):
    suite = facts_alone(small_suite).model_copy(update={"proof_share": 0.6})
    one = add_served("tiny", stand_in())

    def asked_towns(numbers, side, answer="salt", limit=None):
        """Towns that a side asks about, of those that the task's file asks about."""
        rows = [{"prompt": f"Q : what sells town {n} ? A :", "answer": answer} for n in numbers]
        write_task("small_facts", rows, GENERATE)
        scores = score(suite, one, limit=limit, split=suite.split(side))
        assert scores.tasks["small_facts"].available_count == len(numbers)
        return [numbers[item.index] for item in scores.items]

    towns = list(range(24))
    search, proof = asked_towns(towns, "search"), asked_towns(towns, "proof")
    assert sorted(search + proof) == asked_towns(towns, None) == towns
    assert asked_towns(towns, "proof", limit=3) == proof[:3]
    # By the text of a question alone: in another order, among more questions, whatever its answer is.
    others = asked_towns(list(reversed(range(40))), "proof", "wool")
    assert sorted(town for town in others if town < 24) == proof


def test_a_drawn_sample_ignores_the_order_of_the_file(small_suite, add_served, stand_in, write_task):
    suite = facts_alone(small_suite).model_copy(update={"sample": "drawn"})
    one = add_served("tiny", stand_in())

    def drawn():
        return {item.item for item in score(suite, one, limit=3).items}

    before = drawn()
    prompts = [f"Q : what sells town {n} ? A :" for n in reversed(range(6))]
    write_task("small_facts", [{"prompt": p, "answer": "salt"} for p in prompts], GENERATE)
    assert drawn() == before
    assert len(before) == 3


def test_repeats_are_asked_with_seeds_of_their_own(small_suite, add_served, stand_in):
    server = stand_in()
    scores = score(facts_alone(small_suite, repeats=2), add_served("tiny", server), limit=2)
    assert sorted(request["seed"] for request in server.requests) == [1234, 1234, 1235, 1235]
    assert {(request["max_tokens"], "\n" in request["stop"]) for request in server.requests} == {(4, True)}
    assert scores.tasks["small_facts"].item_count == 2


def test_a_prompt_is_never_cut_to_make_room_for_its_answer(small_suite, add_served, stand_in, write_task):
    """The stand-in takes 128 tokens: a limit of 200 leaves 128 less the prompt, a prompt of 130 is refused."""
    long = GENERATE.replace("max_gen_toks: 4", "max_gen_toks: 200")
    suite = facts_alone(small_suite)
    server = stand_in()
    one = add_served("tiny", server)
    for words in (10, 130):
        rows = [{"prompt": " ".join(["salt"] * words), "answer": "salt"}] * 2
        write_task("small_facts", rows, long)
        refusal = pytest.raises(PromptTooLongError, match=r"130 tokens .* takes 128, .*VLLM_MAX_MODEL_LEN")
        with refusal if words == 130 else contextlib.nullcontext():
            score(suite, one, limit=2)
    assert [(len(r["prompt"][0]), r["max_tokens"]) for r in server.requests] == [(10, 118)] * 2


def test_data_that_were_not_fetched_are_named_before_a_server_starts(add_served, stand_in, monkeypatch):
    one = add_served("tiny", stand_in())
    monkeypatch.setattr(quality, "share_server", lambda *_, **__: pytest.fail("a server starts"))
    core = Suite.load("core", repository_root())
    with pytest.raises(
        EvalError, match=r"data/mmlu_pro, data/ifeval, data/gpqa, .*`slimqwen download --suite core`"
    ):
        quality.measure_quality(one.variant, core, 2, Invocation([]))


@pytest.mark.parametrize(
    ("content", "thinking", "text"),
    [
        ("so </think>\n\nsalt", True, "\n\nsalt"),
        ("so and so and", True, ""),
        ("salt", False, "salt"),
        ("<think>\nso and", False, ""),
        ("<think>\nso </think>salt", False, "salt"),
        ("<think>\nso and", None, "<think>\nso and"),
    ],
)
def test_the_response_is_what_follows_the_thoughts(content, thinking, text):
    choice = {"text": content, "finish_reason": "length"}
    response = Generation.of_choice(choice, {"completion_tokens": 7}, thinking)
    assert (response, response.finish_reason, response.tokens) == (text, "length", 7)


@pytest.mark.parametrize(
    ("ending", "thinks"),
    [
        ("<think>\n{% if enable_thinking is false %}\n</think>\n{% endif %}", True),
        ("<think>\n{% if enable_thinking is not true %}\n</think>\n{% endif %}", False),
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", True),
        ("", False),
    ],
)
def test_a_suite_that_leaves_thinking_to_the_template_knows_what_it_does(ending, thinks):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<think>{{ m.content }}</think>{% endfor %}" + ending
    assert lm_eval_run.thinks_by_default(tokenizer) is thinks


def test_thoughts_that_the_limit_cut_are_no_response_where_the_template_thinks(
    small_suite, add_served, stand_in
):
    one = add_served("tiny", stand_in())
    for ending, output in (("<think>", ""), ("A", "salt")):
        template = "{% for m in messages %}Q {{ m.content }}{% endfor %}" + ending
        (one.server.weights / "chat_template.jinja").write_text(template)
        items = score(small_suite.model_copy(update={"chat_template": True}), one, limit=2).items
        assert {item.output for item in items if item.output is not None} == {output}


def test_a_template_without_a_thinking_switch_is_named(small_suite, add_served, stand_in):
    one = add_served("tiny", stand_in())
    suite = facts_alone(small_suite, thinking=True).model_copy(update={"chat_template": True})
    with pytest.raises(EvalError, match="weights/tiny has no chat template"):
        score(suite, one, limit=2)
    template = "{% for m in messages %}Q {{ m.content }}{% endfor %} A"
    (one.server.weights / "chat_template.jinja").write_text(template)
    with pytest.raises(EvalError, match="weights/tiny ignores enable_thinking"):
        score(suite, one, limit=2)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_task_that_switches_thinking_is_rendered_so(small_suite, add_served, stand_in, thinking):
    server = stand_in()
    one = add_served("tiny", server)
    template = "{% for m in messages %}Q {{ m.content }}{% endfor %}{% if enable_thinking %} A{% endif %}"
    (one.server.weights / "chat_template.jinja").write_text(template)
    suite = facts_alone(small_suite, thinking=thinking).model_copy(update={"chat_template": True})
    scores = score(suite, one, limit=2)
    assert scores.tasks["small_facts"].settings["thinking"] == thinking
    assert {request["prompt"][0][-1] == WORDS.index("A") for request in server.requests} == {thinking}


SUBJECTS = (
    "biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history", "law",
    "math", "other", "philosophy", "physics", "psychology",
)  # fmt: skip


def write_core_data(root):
    """A few items of our own in the columns of the three hub datasets, and what stands for nltk's tokenizer."""
    choices = [
        {
            "question_id": number,
            "question": f"Which of these has to do with {subject}?",
            "options": [f"a word of {subject}" if n == number % 10 else f"the colour {n}" for n in range(10)],
            "answer": "ABCDEFGHIJ"[number % 10],
            "answer_index": number % 10,
            "cot_content": "",
            "category": subject,
            "src": "ours",
        }
        for number, subject in enumerate(SUBJECTS)
    ]
    rules = {
        "punctuation:no_comma": {},
        "keywords:existence": {"keywords": ["salt", "wool"]},
        "length_constraints:number_words": {"relation": "less than", "num_words": 500},
    }
    instructions = [
        {"key": n, "prompt": f"Write. Rule {n}.", "instruction_id_list": [name], "kwargs": [kwargs]}
        for n, (name, kwargs) in enumerate(rules.items())
    ]
    wrong = {f"Incorrect Answer {n}": metal for n, metal in enumerate(("salt", "wool", "tar"), start=1)}
    questions = [
        {"Record ID": f"rec{n}", "Question": f"What metal has town {n}?", "Correct Answer": "iron", **wrong}
        for n in range(3)
    ]
    for folder in ("tasks", "texts"):
        shutil.copytree(repository_root() / "eval" / folder, root / "eval" / folder)
    core = Suite.load("core", repository_root())
    files = [root / dataset.folder / dataset.files[0] for dataset in core.datasets]
    for file in files:
        file.parent.mkdir(parents=True)
    pandas.DataFrame(choices).to_parquet(files[0])
    pandas.DataFrame(instructions).to_json(files[1], orient="records", lines=True)
    pandas.DataFrame(questions).to_csv(files[2], index=False)
    for dataset, file in zip(core.datasets, files, strict=True):
        digests = {dataset.files[0]: hashlib.sha256(file.read_bytes()).hexdigest()}
        facts = {"repository": dataset.repository, "revision": "0" * 40, "files": digests}
        (root / dataset.folder / "manifest.json").write_text(json.dumps(facts))
    tokenizer = root / "data" / "nltk" / "tokenizers"
    (tokenizer / "punkt_tab").mkdir(parents=True)
    (tokenizer / "punkt_tab.zip").write_bytes(b"")
    return core


class Said:
    """Stands for what an earlier run was answered: the same to everything."""

    def __init__(self, text):
        self.text = text
        self.asked = []

    def get(self, request):
        self.asked.append(request["payload"])
        return [[self.text, "stop", 5]]


@pytest.mark.parametrize(
    ("text", "mmlu_pro", "ifeval"),
    [
        # Of 14 items the first and the eleventh have A as their answer.
        ("Salt and wool. The answer is (A).", 2 / 14, 1),
        ("Tar, then. No letter.", 0, 1 / 3),
    ],
)
def test_core_is_scored_by_lm_evals_own_rules(add_served, stand_in, tmp_path, text, mmlu_pro, ifeval):
    one = dataclasses.replace(add_served("tiny", stand_in()), max_model_len=14_000)
    template = load("tiny").weights / "chat_template.jinja"
    (one.server.weights / template.name).write_text(template.read_text())
    core = write_core_data(tmp_path)
    scores = score(core, one, limit=None, answers=Said(text))
    assert scores.tasks["mmlu_pro"].value == pytest.approx(mmlu_pro)
    assert scores.tasks["ifeval"].value == pytest.approx(ifeval)
    gpqa = scores.tasks["gpqa_diamond"]
    assert (gpqa.item_count, gpqa.cluster_count, gpqa.output_count) == (3, 3, 9)
    assert gpqa.value in ((0, 1 / 3, 2 / 3, 1) if "(" in text else (0,))
    assert {item.index for item in scores.items if item.task == "mmlu_pro"} == set(range(14))
    assert scores.tasks["loops"].value == 1
    assert (scores.tasks["tool_calls"].item_count, scores.tasks["tool_calls"].value) == (200, 0)
    assert (scores.tasks["needle"].item_count, scores.tasks["needle"].value) == (126, 0)
    assert {path.name for path in scores.datasets} == {
        "test-00000-of-00001.parquet", "ifeval_input_data.jsonl", "gpqa_diamond.csv", "punkt_tab.zip",
        "needle.py", "needle.yaml", "tool_calls.py", "tool_calls.yaml", "technical.jsonl",
    }  # fmt: skip


@pytest.mark.engine
def test_core_goes_the_whole_way_over_a_real_server(served_tiny, tmp_path):
    """Three items a task, which the tiny model knows nothing of; a rule of IFEval it may keep by chance.

    It was not taught to call tools: test_planted_responses.py plants the calls.
    """
    core = write_core_data(tmp_path)
    (tmp_path / "weights").symlink_to(repository_root() / "weights")  # the template is the checkpoint's
    short = {"characters": [2000], "depths": [0.5], "count": 3, "seed": 1}
    needle = {
        "dataset_kwargs": {"data_files": "eval/texts/technical.jsonl", **short},
        "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0},
    }
    tasks = []
    for task in core.tasks:
        if task.name == "tool_calls":
            continue
        overrides = task.overrides or needle
        generation = overrides["generation_kwargs"] | {"max_gen_toks": 24}
        overrides = overrides | {"generation_kwargs": generation}
        tasks.append(task.model_copy(update={"repeats": min(task.repeats, 2), "overrides": overrides}))
    core = core.model_copy(update={"tasks": tuple(tasks)})
    elsewhere = dataclasses.replace(served_tiny, variant=dataclasses.replace(load("tiny"), root=tmp_path))
    scores = score(core, elsewhere, limit=3)
    assert {name: row.item_count for name, row in scores.tasks.items()} == dict.fromkeys(scores.tasks, 3)
    available = {name: row.available_count for name, row in scores.tasks.items()}
    assert available == {"mmlu_pro": 14, "ifeval": 3, "gpqa_diamond": 3, "loops": 14, "needle": 3}
    assert scores.tasks["gpqa_diamond"].output_count == 6
    assert scores.tasks["gpqa_diamond"].cluster_count == 3
    ends = {name: [item for item in scores.items if item.task == name] for name in ("mmlu_pro", "loops")}
    for item, end in zip(*ends.values(), strict=True):
        assert end.value <= (not item.truncated)
    for item in scores.items:
        if item.task == "loops":
            continue
        assert 0 < item.output_tokens <= 24
        assert not item.truncated or item.output_tokens == 24
        assert item.question
        assert item.looping is not None
        assert item.task == "ifeval" or item.expected
        assert "</think>" not in item.output
    assert all(item.expected.isdigit() for item in scores.items if item.task == "needle")
    for name in ("mmlu_pro", "ifeval", "gpqa_diamond"):
        assert scores.tasks[name].floor_verdict in ("fail", "inconclusive")
    assert scores.tasks["ifeval"].value >= 1 / 3
