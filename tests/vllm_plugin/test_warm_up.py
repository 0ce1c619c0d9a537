"""What a server asks itself, heard by an application that stands in for vLLM's."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from slimqwen.vllm_plugin import warm_up
from slimqwen.vllm_plugin.errors import PluginError

pytestmark = pytest.mark.timeout(120)


def config(max_num_seqs=4, drafts=0, graphs=(), queue=None, caching=True, block=128, schedule=None):
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_queued_reqs=queue),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts, num_speculative_tokens_per_batch_size=schedule
        )
        if drafts
        else None,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=list(graphs)),
        cache_config=SimpleNamespace(
            enable_prefix_caching=caching, effective_attention_block_size=block, block_size=16
        ),
    )


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"max_num_seqs": 1}, [1]),
        ({"max_num_seqs": 8}, [1, 2, 4, 8]),
        ({"max_num_seqs": 6}, [1, 2, 4, 6]),
        ({"max_num_seqs": 8, "drafts": 4, "graphs": range(5, 41, 5)}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"max_num_seqs": 4, "graphs": (1, 2, 4, 8, 16)}, [1, 2, 4]),
        ({"max_num_seqs": 3, "drafts": 1, "graphs": (1, 2, 3)}, [1, 3]),
        ({"max_num_seqs": 8, "queue": 3}, [1, 2, 3]),
        (
            {"max_num_seqs": 8, "drafts": 4, "graphs": (5, 9), "schedule": [(1, 3, 4), (4, 20, 2)]},
            [1, 2, 3, 4, 8],
        ),
    ],
)
def test_batches_are_the_variants_graphs_or_doublings_up_to_what_it_takes_at_once(given, sizes):
    assert warm_up.batches(config(**given)) == sizes


class Vllm:
    """Answers as vLLM does, and keeps the questions."""

    def __init__(self, chosen, prefix_tokens=300, refuses=(), breaks=(), template="{{ messages }}", full=0):
        self._full = full
        self.asked, self.computed, self._prefix, self._refuses = [], [], prefix_tokens, refuses
        self._breaks = breaks
        self.app = Starlette(
            routes=[
                Route(path, self._answer, methods=["POST"])
                for path in ("/v1/completions", "/v1/chat/completions", "/tokenize")
            ]
        )
        self.app.state.vllm_config = chosen
        self.app.state.engine_client = self
        self.app.state.args = SimpleNamespace(chat_template=None)
        self.renderer = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template))

    async def _answer(self, request):
        path, body = request.url.path, await request.json()
        self.asked.append((path, body, request.headers.get("Authorization")))
        if self._full:
            self._full -= 1
            return JSONResponse({"error": {"message": "the queue\n is full"}}, 429)
        if path in self._refuses:
            return JSONResponse({"error": {"message": "no chat\n template"}}, 400)
        if body.get("stream"):
            last = {"error": {"message": "too\n late"}} if path in self._breaks else {"choices": []}
            return PlainTextResponse(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n")
        message = (body.get("messages") or [{"content": ""}])[0]["content"]
        return JSONResponse({"tokens": [*range(self._prefix), *message.encode(), 7, 8]})

    async def generate(self, prompt, parameters, request_id):
        self.computed.append(prompt["prompt_token_ids"])
        yield SimpleNamespace(num_cached_tokens=256 if len(self.computed) % 2 == 0 else 0)


def run(vllm):
    asyncio.run(warm_up.send_warm_up(vllm.app))


def test_every_batch_and_chats_with_thinking_on_and_off_are_asked_with_the_key(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    caplog.set_level("INFO")
    vllm = Vllm(config(max_num_seqs=2))
    run(vllm)

    completions = [body for path, body, _ in vllm.asked if path == "/v1/completions"]
    batches = [body["prompt"] for body in completions if isinstance(body["prompt"], list)]
    assert [len(prompts) for prompts in batches] == [1, 2]
    assert [body["logprobs"] for body in completions if "logprobs" in body] == [0]
    chats = [body for path, body, _ in vllm.asked if path == "/v1/chat/completions"]
    assert [(chat["chat_template_kwargs"]["enable_thinking"], "stream" in chat) for chat in chats] == [
        (True, False),
        (True, True),
        (False, False),
        (False, True),
    ]
    assert [body["prompt"] for body in completions if "stream" in body] == ["Warm-up"]
    assert {key for *_, key in vllm.asked} == {"Bearer sesame"}
    assert "batches of 1, 2, chats with thinking on and off" in caplog.text
    assert "sesame" not in caplog.text + json.dumps([body for _, body, _ in vllm.asked])


def test_clients_that_fill_the_queue_are_waited_for_and_told_of_once(monkeypatch, caplog):
    async def at_once(seconds):
        pass

    monkeypatch.setattr(asyncio, "sleep", at_once)
    caplog.set_level("WARNING")
    vllm = Vllm(config(), full=1000)
    run(vllm)
    assert vllm._full == 0
    assert caplog.text.count("the warm-up waits for room in the queue") == 1


def test_the_whole_blocks_of_the_chat_prefix_are_computed_and_a_next_chat_tells_what_it_found(caplog):
    caplog.set_level("INFO")
    vllm = Vllm(config())
    run(vllm)
    first, next_chat = vllm.computed[:2]
    # 300 tokens are two blocks of 128; the state is kept where the last whole block of a prompt ends.
    assert len(first) == 257
    assert first[:256] == next_chat[:256] == list(range(256))
    assert "thinking on: 300 tokens, of which the next chat found 256 in the prefix cache" in caplog.text


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"block": 512}, "300 tokens, computed in each request: the prefix cache holds whole blocks of 512"),
        ({"caching": False}, "300 tokens, computed in each request: prefix caching is off"),
    ],
)
def test_where_no_prefix_can_be_warm_the_log_says_why(caplog, chosen, said):
    caplog.set_level("INFO")
    vllm = Vllm(config(**chosen))
    run(vllm)
    assert vllm.computed == []
    assert caplog.text.count(said) == 2


def test_a_question_that_is_refused_is_a_warm_up_that_failed():
    with pytest.raises(PluginError, match=r"/v1/chat/completions answered 400 .*no chat.*; correct the flag"):
        run(Vllm(config(), refuses=("/v1/chat/completions",)))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_breaks_is_a_warm_up_that_failed(path):
    with pytest.raises(PluginError, match=rf"{path} answered 200 .*too\\n late"):
        run(Vllm(config(), breaks=(path,)))


def test_a_checkpoint_without_a_chat_template_is_warmed_up_for_completions(caplog):
    caplog.set_level("INFO")
    vllm = Vllm(config(), template=None)
    run(vllm)
    assert {path for path, *_ in vllm.asked} == {"/v1/completions"}
    assert "batches of 1, 2, 4, no chats" in caplog.text
