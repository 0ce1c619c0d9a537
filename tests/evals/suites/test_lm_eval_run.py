"""lm-eval against a running server: which items are sent, how they are rendered, and their scores."""

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil

import pandas
import pytest

from slimqwen.evals import EvalError
from slimqwen.evals.suites import lm_eval_run
from slimqwen.evals.suites.generation import PromptTooLongError
from slimqwen.evals.suites.suite import Suite
from slimqwen.variant import load, repository_root
from tests.evals.small_suite import GENERATE, SMALL, facts_alone, score
from tests.stand_in import WORDS


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


def test_several_parts_of_a_task_are_numbered_one_after_the_other(recorded):
    samples = recorded["samples"]["small_facts"]
    items = lm_eval_run.parse_samples(
        SMALL.tasks[0], {"a": 10, "b": 5}, [{"b": samples[:1], "a": samples[1:]}]
    )
    assert [item.index for item in items] == [1, 2, 10]


@pytest.mark.parametrize(
    ("metric", "damage", "cause"),
    [
        ("accuracy", lambda sample: None, "no accuracy"),
        ("exact_match", lambda sample: sample.update(exact_match=float("nan")), "not a number"),
        ("exact_match", lambda sample: sample.update(doc_id=1), "several filters"),
    ],
)
def test_items_without_one_finite_score_are_an_error(recorded, parse, metric, damage, cause):
    damage(recorded["samples"]["small_facts"][0])
    with pytest.raises(EvalError, match=cause):
        parse("small_facts", measure=metric)


def test_a_prefix_that_the_tokenizer_lacks_is_named(add_served, stand_in, small_suite):
    suite = small_suite.model_copy(update={"text_prefix": "<|endoftext|>"})
    one = add_served("tiny", stand_in())
    with pytest.raises(EvalError, match=r"<\|endoftext\|>"):
        score(suite, one, limit=2)


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


def test_thoughts_that_the_limit_cut_are_no_response_where_the_template_thinks(
    small_suite, add_served, stand_in
):
    one = add_served("tiny", stand_in())
    for ending, output in (("<think>", ""), ("A", "salt")):
        template = "{% for m in messages %}Q {{ m.content }}{% endfor %}" + ending
        (one.server.weights / "chat_template.jinja").write_text(template)
        items = score(small_suite.model_copy(update={"chat_template": True}), one, limit=2).items
        assert {item.output for item in items if item.output is not None} == {output}


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
