"""Quality that people feel, scored over planted responses: loops, tool calls, a needle."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from eval.tasks.core.tool_calls import make_tool_questions
from slimqwen import variant
from slimqwen.evals import quality
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.quality_comparison import compare_quality
from slimqwen.evals.suites import lm_eval_run, own_questions
from slimqwen.evals.suites.generation import PromptTooLongError
from slimqwen.evals.suites.loops import is_looping
from slimqwen.evals.suites.suite import Suite, SuiteTask
from slimqwen.records import store
from slimqwen.serving.server import free_port
from slimqwen.variant import repository_root
from tests.byte_tokenizer import byte_tokenizer

SENTENCE = "The town sells salt and wool. "
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
)
CHATS = """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{prompt}}"
generation_kwargs: {until: [], do_sample: true, temperature: 1.0, max_gen_toks: 64}
process_results: !function chats.said
metric_list: [{metric: exact_match}]
"""
QUESTIONS = {
    question.messages[0]["content"]: (number, question)
    for number, question in enumerate(make_tool_questions(200, 20261126))
}


def call(name, arguments):
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def right_call(question):
    return call(**question.answer)


def other_tool(question):
    """A call that fits another of the offered tools."""
    return next(
        tool["function"]["name"]
        for tool in question.tools
        if tool["function"]["name"] != question.answer["name"]
    )


def inexact(question):
    """The right arguments but one, of which each has a little too much."""
    arguments = dict(question.answer["arguments"])
    name, value = next(iter(arguments.items()))
    changed = {dict: {}, list: [], bool: not value}.get(
        type(value), f"{value} " if isinstance(value, str) else 0
    )
    return arguments | {name: changed}


MESSAGES = {
    "right": lambda q: {"content": None, "tool_calls": [right_call(q)]},
    "right, with words and thoughts": lambda q: {
        "content": "I look it up.", "reasoning": "So be it.", "tool_calls": [right_call(q)],
    },
    "another tool": lambda q: {"tool_calls": [call(other_tool(q), q.answer["arguments"])]},
    "a tool that nobody offers": lambda q: {"tool_calls": [call("do_it", q.answer["arguments"])]},
    "an inexact argument": lambda q: {"tool_calls": [call(q.answer["name"], inexact(q))]},
    "one argument more": lambda q: {
        "tool_calls": [call(q.answer["name"], q.answer["arguments"] | {"colour": "red"})]
    },
    "unparsable arguments": lambda q: {
        "tool_calls": [call(q.answer["name"], json.dumps(q.answer["arguments"])[:-1])]
    },
    "the same call twice": lambda q: {"tool_calls": [right_call(q), right_call(q)]},
    "a call that the parser did not find": lambda q: {
        "content": f"<tool_call>{json.dumps(q.answer)}</tool_call>", "tool_calls": [],
    },
}  # fmt: skip


def felt(*names, **changes):
    """Tasks of core alone, some of their fields changed."""
    core = Suite.load("core", repository_root())
    tasks = tuple(task.model_copy(update=changes) for task in core.tasks if task.name in names)
    return core.model_copy(update={"tasks": tasks, "lm_eval_folders": (), "datasets": (), "nltk": ()})


SHORT = {"overrides": {"dataset_kwargs": {
    "data_files": "eval/texts/technical.jsonl", "characters": [500, 1000, 2000], "depths": [0.1, 0.5, 0.9],
    "count": 4, "seed": 1,
}}}  # fmt: skip


@pytest.fixture
def serve(add_served, stand_in, tmp_path):
    """A variant with core's tasks, a template with tools and a token a byte, whose responses `plant` makes."""

    def add(name, plant):
        server = stand_in()
        server.plant = plant
        one = dataclasses.replace(add_served(name, server), max_model_len=1800)
        byte_tokenizer().save_pretrained(one.server.weights)
        (one.server.weights / "chat_template.jinja").write_text(TEMPLATE)
        for folder in ("tasks/core", "texts"):
            shutil.copytree(
                repository_root() / "eval" / folder, tmp_path / "eval" / folder, dirs_exist_ok=True
            )
        return one

    return add


def score(suite, server, limit=None):
    runs, _ = lm_eval_run.run_suite(suite, server, limit=limit, log=server.variant.root / "logs" / "felt.log")
    return {run.task.name: run.items for run in runs}


def test_a_tool_call_is_right_where_the_server_finds_one_with_that_name_and_these_arguments(serve):
    faults, requests = list(MESSAGES), []

    def plant(body):
        requests.append(body)
        number, question = QUESTIONS[body["messages"][0]["content"]]
        return {"message": {"role": "assistant", "content": None, **MESSAGES[faults[number % 9]](question)}}

    one = dataclasses.replace(serve("tiny", plant), max_model_len=9000)
    items = score(felt("tool_calls"), one, limit=45)["tool_calls"]
    assert len(items) == len(requests) == 45
    assert {faults[item.index % 9] for item in items} == set(faults)
    for item in items:
        assert item.value == faults[item.index % 9].startswith("right"), item
    for body in requests:
        _, question = QUESTIONS[body["messages"][0]["content"]]
        assert body["tools"] == question.tools
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        assert (body["max_tokens"], body["temperature"]) == (512, 0)
        assert "prompt" not in body


def test_tools_that_the_served_context_cannot_hold_are_an_error(serve):
    one = dataclasses.replace(serve("tiny", lambda _: pytest.fail("a request was sent")), max_model_len=500)
    with pytest.raises(
        PromptTooLongError, match=r"has \d{4} tokens and the server takes 500, output included"
    ):
        score(felt("tool_calls"), one, limit=2)


def test_own_questions_with_tools_are_asked_and_read_in_the_same_way(serve, tmp_path):
    """The calls of an earlier turn are objects in the file and for the template, text in a request."""
    _, question = next(iter(QUESTIONS.values()))
    turns = [
        {"role": "user", "content": "What was the first?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "find_it", "arguments": {"number": 1}}}]},
        {"role": "tool", "content": "It was sent."},
        *question.messages,
    ]
    rows = [
        {"messages": turns, "tools": question.tools, "answer": question.answer},
        {
            "messages": question.messages,
            "tools": question.tools,
            "answer": {**question.answer, "arguments": {}},
        },
        {"prompt": "Sky?", "answer": "blue"},
    ]
    folder = tmp_path / "eval" / "own" / "mine"
    folder.mkdir(parents=True)
    shutil.copy(repository_root() / "eval" / "own.yaml", tmp_path / "eval")
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = []

    def plant(body):
        requests.append(body)
        return {
            "message": {"content": "Blue."}
            if len(body["messages"][-1]["content"]) < 9
            else MESSAGES["right"](question)
        }

    one = dataclasses.replace(serve("tiny", plant), max_model_len=9000)
    suite = Suite.load("mine", tmp_path)
    assert quality.with_tool_parser(one.variant, suite) != one.variant
    (run,) = own_questions.ask_questions(suite, one, limit=None)
    assert [item.value for item in run.items] == [1, 0, 1]
    assert [item.expected for item in run.items][2] == "blue"
    (first,) = [body["messages"] for body in requests if len(body["messages"]) == 4]
    call = {"name": "find_it", "arguments": '{"number": 1}'}
    assert first[1]["tool_calls"] == [{"id": "call", "type": "function", "function": call}]
    assert [len(body.get("tools", [])) for body in requests].count(0) == 1


def needle_code(body):
    prompt = byte_tokenizer().decode(body["prompt"][0])
    return re.search(r" is (\d{7})\.", prompt)[1]


def test_a_needle_is_found_by_its_code_and_never_beyond_the_served_context(serve):
    def plant(body):
        code = needle_code(body)
        others = f"{int(code) - 1}", f"The code is {code}.", code, f"{code[:3]} {code[3:]}"
        return {"text": others[int(code) % 4]}

    items = score(felt("needle", **SHORT), serve("tiny", plant))["needle"]
    assert [item.output == "" for item in items] == [False] * 24 + [True] * 12
    for item in items:
        codes = re.findall(r"\d{7}", item.output)
        assert item.value == (codes != [] and int(codes[0]) % 4 in (1, 2)), item
        assert not item.truncated
    assert {item.value for item in items} == {0, 1}


def sampled(write_task):
    """A suite whose only sampled task has sixty prompts, and the task that scores how its responses end."""
    folder = write_task("chats", [{"prompt": f"Tell of town {n}."} for n in range(60)], CHATS)
    (folder / "chats.py").write_text("def said(item, responses):\n    return {'exact_match': 0.0}\n")
    tasks = (
        SuiteTask(task="chats", measure="exact_match", non_inferiority_margin=0.1, thinking=False),
        SuiteTask(task="loops", measure="ended", responses_of="chats", non_inferiority_margin=0.1),
    )
    return felt().model_copy(update={"tasks": tasks, "tasks_folder": Path("eval/tasks")})


def ending(body):
    """Of three responses one loops, one is cut, one ends."""
    number = int(re.search(r"\d+", byte_tokenizer().decode(body["prompt"][0]))[0])
    return [
        {"text": "So it is. " + 4 * SENTENCE},
        {"text": SENTENCE, "finish_reason": "length"},
        {"text": 2 * SENTENCE + "That is all."},
    ][number % 3]


def test_a_response_that_loops_or_is_cut_does_not_end(serve, write_task):
    suite, one = sampled(write_task), serve("tiny", ending)
    runs, _ = lm_eval_run.run_suite(suite, one, limit=30, log=one.variant.root / "logs" / "felt.log")
    chats, loops = runs
    assert [item.value for item in loops.items] == [float(item.index % 3 == 2) for item in loops.items]
    assert [item.item for item in loops.items] == [item.item for item in chats.items]
    row = quality.score_task(loops)
    assert (row.value, row.item_count, row.available_count) == (pytest.approx(1 / 3), 30, 60)
    assert row.higher_is_better
    assert row.output_count is None  # nothing was generated for it
    assert row.settings["responses_of"] == "chats"


def test_planted_damage_has_its_verdict_and_an_equal_variant_passes(serve, write_task, monkeypatch):
    """Two thirds of the responses do not end, the template leaves the tools out, the needle is not found."""

    def well(body):
        if "messages" in body:
            return {"message": MESSAGES["right"](QUESTIONS[body["messages"][0]["content"]][1])}
        prompt = byte_tokenizer().decode(body["prompt"][0])
        return {"text": needle_code(body)} if "code" in prompt else {"text": SENTENCE}

    def badly(body):
        if "messages" in body:
            return {"message": {"content": "I have no tool for that."}}
        prompt = byte_tokenizer().decode(body["prompt"][0])
        return {"text": "It says none."} if "code" in prompt else ending(body)

    served = {
        name: dataclasses.replace(serve(name, plant), max_model_len=9000)
        for name, plant in (("base", well), ("same", well), ("worse", badly))
    }
    loops = sampled(write_task)
    tasks = (*loops.tasks, *felt("tool_calls").tasks, *felt("needle", **SHORT).tasks)
    suite = loops.model_copy(update={"tasks": tasks})
    monkeypatch.setattr(quality, "share_server", lambda one, **_: contextlib.nullcontext(served[one.name]))
    paths = {
        name: quality.measure_quality(one.variant, suite, None, Invocation(["x"]))
        for name, one in served.items()
    }

    def verdicts(name):
        rows = compare_quality(paths["base"], paths[name])
        return {row.task: row.judgement.verdict for row in rows if row.task != "chats"}

    assert set(verdicts("worse").values()) == {"fail"}
    assert verdicts("same")["tool_calls"] == "pass"
    assert "fail" not in verdicts("same").values()


def xml_call(name, arguments):
    """A tool call as Qwen3.5 writes it."""
    written = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()
    }
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


XML = [
    lambda q: xml_call(other_tool(q), q.answer["arguments"]),
    lambda q: xml_call(q.answer["name"], inexact(q)),
    lambda q: xml_call(**q.answer).replace("</parameter>", "", 1).replace("<parameter=", "", 1),
    lambda q: 2 * xml_call(**q.answer),
]
TOOLS = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"


@pytest.mark.engine
@pytest.mark.usefixtures("servers_are_no_forks")
def test_a_real_parser_reads_planted_calls_where_the_template_shows_the_tools(tmp_path, monkeypatch):
    """The responses are planted in the engine; server and parser are vLLM's."""
    responses = {
        text: (xml_call(**question.answer) if number % 4 else XML[number // 4 % 4](question))
        for text, (number, question) in QUESTIONS.items()
    }
    shutil.copy(Path(__file__).with_name("planted_responses.py"), tmp_path)
    (tmp_path / "responses.json").write_text(json.dumps(responses))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    without_tools = variant.load("tiny")
    template = tmp_path / "tools.jinja"
    template.write_text(TOOLS + (without_tools.weights / "chat_template.jinja").read_text())
    lines = {
        "VLLM_LOGITS_PROCESSORS": "planted_responses:PlantedResponses",
        "VLLM_TOOL_CALL_PARSER": "qwen3_coder",
        "VLLM_CHAT_TEMPLATE": str(template),
        "VLLM_PORT": str(free_port()),
    }
    path = quality.measure_quality(
        without_tools.with_lines(lines), felt("tool_calls"), 16, Invocation(["x"], folder=str(tmp_path))
    )
    items = list(store.read_items(path))
    assert len(items) == 16
    for item in items:
        assert item["value"] == (item["index"] % 4 > 0), item


def rolls(folder):
    """A suite that has tiny go on with twenty rolls of names, each to the end of its line, and scores how that ends."""
    passages = (repository_root() / "eval" / "texts" / "tinyworld_passages.jsonl").read_text().splitlines()
    texts = [text for line in passages if (text := json.loads(line)["text"]).startswith("The roll")]
    rows = [{"prompt": " ".join(text.split()[:12]), "answer": ""} for text in texts[:20]]
    (folder / "rolls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = {
        "dataset_kwargs": {"data_files": {"test": str(folder / "rolls.jsonl")}},
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 96},
    }
    asked = {"definition": "tinyworld_facts", "measure": "exact_match", "overrides": overrides}
    tasks = (
        SuiteTask(task="rolls", non_inferiority_margin=0.1, **asked),
        SuiteTask(task="loops", non_inferiority_margin=0.1, measure="ended", responses_of="rolls"),
    )
    return Suite.load("tinyworld", repository_root()).model_copy(update={"tasks": tasks})


@pytest.mark.engine
def test_a_checkpoint_that_lost_its_repetition_penalty_loops_and_fails(served_tiny, tmp_path, monkeypatch):
    """Tiny repeats one name of a roll to its end, but where generation_config.json has a penalty, as Qwen2.5's has."""
    lost, weights = served_tiny.variant, tmp_path / "weights"
    weights.mkdir()
    files = {file.name: file for file in lost.weights.iterdir()}
    del files["manifest.json"]  # it has the digest of the other defaults
    defaults = json.loads(files.pop("generation_config.json").read_text())
    (weights / "generation_config.json").write_text(json.dumps({**defaults, "repetition_penalty": 1.5}))
    for name, file in files.items():
        (weights / name).symlink_to(file)
    kept = lost.with_lines({"VLLM_MODEL": str(weights), "VLLM_PORT": str(free_port())})

    def measure(one, folder):
        here = Invocation(["x"], folder=str(tmp_path / folder))
        return quality.measure_quality(one, rolls(tmp_path), None, here)

    before = measure(kept, "kept")
    monkeypatch.setattr(quality, "share_server", lambda *_, **__: contextlib.nullcontext(served_tiny))
    after = measure(lost, "lost")
    _, loops = compare_quality(before, after)
    assert (loops.task, loops.judgement.verdict) == ("loops", "fail")
    repeats = [
        sum(is_looping(item["output"]) for item in store.read_items(path) if item["task"] == "rolls")
        for path in (before, after)
    ]
    assert repeats[0] <= 5
    assert repeats[1] >= 18
