"""Own questions are asked at the chat endpoint, each once, and what was answered before an interruption is kept."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimqwen.evals import EvalError, quality
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.suites import own_questions
from slimqwen.evals.suites.generation import PromptTooLongError
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import store
from slimqwen.serving.shared_server import ServerLostError
from slimqwen.text.files import CorpusError

ROOT = Path(__file__).parents[3]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
ROWS = [{"prompt": f"What sells town {number}?", "answer": "salt"} for number in range(6)]


@pytest.fixture
def own(tmp_path):
    folder = tmp_path / "eval" / "own" / "mine"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "eval" / "own.yaml", tmp_path / "eval")
    write(folder, ROWS)
    return folder


def write(folder, rows):
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def serve(own, add_served, stand_in, monkeypatch):
    """The variant tiny behind a stand-in, which answers "salt"."""

    def add(lives_for=None, again=None):
        server = stand_in(lives_for)
        server.plant = lambda body: {"message": {"content": "Salt."}}
        if again:
            running = SimpleNamespace(**(vars(again.server) | {"base_url": server.base_url}))
            one = dataclasses.replace(again, server=running)
        else:
            one = dataclasses.replace(add_served("tiny", server), max_model_len=400)
            (one.server.weights / "chat_template.jinja").write_text(TEMPLATE)
            if lives_for is not None:  # so that it is known which question it dies of
                one.server.command.flags["max-num-seqs"] = 1
        monkeypatch.setattr(quality, "share_server", lambda *_, **__: contextlib.nullcontext(one))
        return one, server

    return add


def measure(one, **how):
    suite = Suite.load("mine", one.variant.root)
    return quality.measure_quality(one.variant, suite, None, Invocation(["x"], **how))


def test_each_question_is_a_chat_and_its_record_says_how_it_was_asked(serve, own):
    one, server = serve()
    path = measure(one)
    record = store.read_record(path)
    assert record.tasks["mine_questions"].value == 1
    assert {body["messages"][0]["content"] for body in server.requests} == {row["prompt"] for row in ROWS}
    assert all((body["temperature"], body["max_tokens"]) == (0, 256) for body in server.requests)
    assert record.tasks["mine_questions"].settings["sampling"] == {"temperature": 0}
    assert list(record.provenance.datasets) == ["eval/own/mine/questions.jsonl"]
    assert [item["question"] for item in store.read_items(path)] == [row["prompt"] for row in ROWS]
    assert not (one.variant.root / ".cache" / "own").exists()


def test_responses_before_an_interruption_are_kept_and_asked_once(serve, own):
    one, _ = serve(lives_for=2)
    with pytest.raises(ServerLostError, match="2 responses so far are kept: run the same command again"):
        measure(one)
    again, server = serve(again=one)
    assert store.read_record(measure(again)).tasks["mine_questions"].item_count == 6
    assert len(server.requests) == 4


def test_questions_that_are_added_after_an_interruption_are_asked_with_the_others(serve, own):
    one, _ = serve(lives_for=2)
    with pytest.raises(ServerLostError):
        measure(one)
    write(own, [*ROWS, {"prompt": "And town 7?", "answer": "salt"}])
    again, server = serve(again=one)
    assert store.read_record(measure(again)).tasks["mine_questions"].item_count == 7
    assert len(server.requests) == 5


def test_questions_that_are_edited_meanwhile_stop_the_run_and_keep_its_responses(serve, own):
    one, server = serve()
    edited = [*ROWS, {"prompt": "And town 7?", "answer": "salt"}]

    def edit(body):
        write(own, edited)
        return {"message": {"content": "Salt."}}

    server.plant = edit
    with pytest.raises(
        EvalError, match=r"mine/questions\.jsonl was edited meanwhile, so nothing was recorded"
    ):
        measure(one)
    again, second = serve(again=one)
    assert store.read_record(measure(again)).tasks["mine_questions"].item_count == 7
    assert len(second.requests) == 1


def test_a_question_that_the_context_cannot_hold_is_an_error(serve, own):
    one, _ = serve()
    write(own, [*ROWS, {"prompt": "town " * 400, "answer": "salt"}])
    with pytest.raises(PromptTooLongError, match=r"takes 400, output included; raise VLLM_MAX_MODEL_LEN"):
        own_questions.ask_questions(Suite.load("mine", one.variant.root), one, limit=None)


def test_thoughts_are_no_part_of_a_response_where_the_template_switches_them_on(serve, own):
    one, server = serve()
    (own / "suite.yaml").write_text("thinking: true\n")
    server.plant = lambda body: {"message": {"content": "Wool? No.</think>Salt."}}
    (run,) = own_questions.ask_questions(Suite.load("mine", one.variant.root), one, limit=2)
    assert [(item.output, item.value) for item in run.items] == [("Salt.", 1)] * 2
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}


def test_a_message_that_no_server_takes_is_named_by_its_question(serve, own):
    one, _ = serve()
    write(own, [*ROWS, {"messages": [{"content": "no role"}], "answer": "salt"}])
    with pytest.raises(
        CorpusError, match=r"questions\.jsonl, question 7: a message has no role.*correct or remove"
    ):
        own_questions.ask_questions(Suite.load("mine", one.variant.root), one, limit=None)


def test_a_question_that_the_server_refuses_is_named(serve, own):
    one, server = serve()
    server.plant = lambda body: {"status": 400} if "town 3" in str(body["messages"]) else {}
    with pytest.raises(CorpusError, match=r"questions\.jsonl, question 4: the server refuses it \(400,"):
        own_questions.ask_questions(Suite.load("mine", one.variant.root), one, limit=None)


def test_the_content_beside_a_reasoning_parser_is_the_response_even_if_the_thoughts_are_empty(serve, own):
    one, server = serve()
    (own / "suite.yaml").write_text("thinking: true\n")
    one.server.command.flags["reasoning-parser"] = "qwen3"
    server.plant = lambda body: {"message": {"content": "Salt.", "reasoning": None}}
    (run,) = own_questions.ask_questions(Suite.load("mine", one.variant.root), one, limit=2)
    assert [(item.output, item.value) for item in run.items] == [("Salt.", 1)] * 2
