"""A stand-in for vLLM: the few answers that the clients need, and a death on request."""

import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slimqwen import variant
from slimqwen.serving.shared_server import SharedServer

WORDS = [
    "<end>",
    "<unknown>",
    "Q",
    "A",
    ":",
    "?",
    "what",
    "sells",
    "town",
    "salt",
    "wool",
    "iron",
    *map(str, range(200)),
]
MAX_MODEL_LEN = 128


class StandIn(ThreadingHTTPServer):
    """Answers like vLLM; after `lives_for` completions it closes every connection without a word.

    Attributes:
        cached_tokens: tokens of each prompt that its prefix cache holds, by its own counters; None has no such cache.
        text: of every token of a streamed response.
        token: id of every token of a response, where a request asks for ids.
        plant: fields of the choice that responds to a request, instead of the usual ones; or `status`, that of HTTP.
        refuses: whether it answers 503 to a request.
    """

    daemon_threads = True

    def __init__(self, lives_for: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lives_for = lives_for
        self.requests: list[dict] = []
        self.cached_tokens: Callable[[dict], int] | None = None
        self.hits = 0.0
        self.text = "x"
        self.token = 5
        self.plant: Callable[[dict], dict] | None = None
        self.refuses: Callable[[dict], bool] = lambda body: False
        self.lock = threading.Lock()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def dead(self) -> bool:
        return self.lives_for is not None and len(self.requests) > self.lives_for

    def count(self, body: dict) -> None:
        """Count an answer."""
        with self.lock:
            self.hits += self.cached_tokens(body) if self.cached_tokens else 0

    def metrics(self) -> str:
        """Its counters, in the form of Prometheus."""
        count = len(self.requests)
        labels = (
            f'enable_prefix_caching="{self.cached_tokens is not None}",effective_attention_block_size="16"'
        )
        cache = [
            f"vllm:prefix_cache_queries_total {100 * count}\n",
            f"vllm:prefix_cache_hits_total {self.hits}\n",
        ]
        return "".join([*cache, f"vllm:cache_config_info{{{labels}}} 1.0\n"])

    def handle_error(self, request, client_address):
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = (
        -1
    )  # head and body in one packet: the second of two waits 40 ms for the first to be acknowledged

    def do_GET(self):
        if self.server.dead:
            self.close_connection = True
            return
        if self.path == "/metrics":
            self._answer(self.server.metrics(), "text/plain")
            return
        models_list = {"data": [{"id": "default", "max_model_len": MAX_MODEL_LEN}]}
        self._answer(json.dumps(models_list if self.path == "/v1/models" else {}), "application/json")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/tokenize":  # which asks for no response
            with self.server.lock:
                self.server.requests.append({**body, "headers": dict(self.headers)})
        if self.server.dead:
            self.close_connection = True
            return
        if self.path == "/tokenize":
            count = len(json.dumps(body["messages"]).split())
            self._answer(json.dumps({"count": count, "max_model_len": MAX_MODEL_LEN}), "application/json")
            return
        if self.server.refuses(body):
            self._answer("{}", "application/json", 503)
            return
        if body.get("stream"):
            self.server.count(body)
            chunks = [
                {"choices": [{"index": 0, "text": self.server.text}]} for _ in range(body["max_tokens"])
            ]
            usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, usage]]
            self._answer("".join([*lines, "data: [DONE]\n\n"]), "text/event-stream")
            return
        choice = {"index": 0, "text": "salt", "finish_reason": "stop"}
        if body.get("return_token_ids"):
            self.server.count(body)
            choice["token_ids"] = [self.server.token] * body["max_tokens"]
        if body.get("echo"):
            count = len(body["prompt"][0]) + 1
            logprobs = {
                "token_logprobs": [None] + [-1.0] * count,
                "top_logprobs": [{"a": -1.0}] * (count + 1),
            }
            choice["logprobs"] = logprobs
        if self.server.plant:
            choice |= self.server.plant(body)
        status = choice.pop("status", 200)
        self._answer(json.dumps({"choices": [choice]}), "application/json", status)

    def log_message(self, *_):
        pass

    def _answer(self, text, kind, status=200):
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def stand_in():
    """Start stand-ins; all are stopped afterwards."""
    running = []

    def start(lives_for=None):
        server = StandIn(lives_for)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def add_served(add_variant, tmp_path):
    """A variant of a repository at tmp_path, served by a stand-in, its weights folder a tokenizer alone."""

    def add(name: str, server: StandIn) -> SharedServer:
        weights = tmp_path / "weights" / name
        tokenizer = Tokenizer(
            models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unknown>")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(weights)
        add_variant(name, f"VLLM_MODEL=weights/{name}\n")
        one = variant.load(name, tmp_path)
        command = SimpleNamespace(
            variant=one, flags={"max-num-seqs": 4, "model": str(weights)}, environment={}
        )
        running = SimpleNamespace(
            command=command,
            pid=os.getpid(),
            base_url=server.base_url,
            model="default",
            weights=weights,
            log=None,
        )
        return SharedServer(one, running, False, MAX_MODEL_LEN)

    return add


@pytest.fixture
def write_task(tmp_path):
    """Write an lm-eval task and its data below tmp_path."""

    def write(name: str, rows: list[dict], settings: str) -> Path:
        folder = tmp_path / "eval" / "tasks"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: eval/tasks/{name}.jsonl}}}}\n"
            f"test_split: test\n{settings}"
        )
        return folder

    return write
