"""What a variant's config.env says about serving, seen on one real server that follows all of it.

The last test ends the server. Prefix caching is on and the chat template begins with more than a block of tokens;
SLIMQWEN_TEST_VARIANT names the variant whose checkpoint it takes, compiled if that one is.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from slimqwen import variant
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port, run_server
from slimqwen.vllm_plugin.api_key import authorization
from tests.serving import real_server

pytestmark = pytest.mark.engine

KEY = "sesame-open"
RULES = "Answer in one short sentence and name the person, the place and the year. " * 24
CONFIG = """\
REQUIRE_WARMUP=1
MAX_BODY_BYTES=100000
THINKING_TOKEN_BUDGET=6
VLLM_MODEL=weights/v
VLLM_SERVED_MODEL_NAME=default
VLLM_HOST=127.0.0.1
VLLM_DTYPE=bfloat16
VLLM_MAX_MODEL_LEN=2048
VLLM_MAX_NUM_SEQS=4
VLLM_ENABLE_PREFIX_CACHING=1
VLLM_CHAT_TEMPLATE=experiments/v/chat.jinja
VLLM_REASONING_PARSER=qwen3
VLLM_DEFAULT_CHAT_TEMPLATE_KWARGS='{"enable_thinking": false}'
VLLM_OVERRIDE_GENERATION_CONFIG='{"temperature": 0.0, "repetition_penalty": 1.5, "max_new_tokens": 600}'
VLLM_MAX_NUM_QUEUED_REQS=6
VLLM_SHUTDOWN_TIMEOUT=12
VLLM_CPU_KVCACHE_SPACE=1
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The server; its key comes from the environment alone."""
    root = tmp_path_factory.mktemp("policy")
    folder = root / "experiments/v"
    folder.mkdir(parents=True)
    tried = variant.load(real_server.SERVED)
    graphs = tried.settings.get("VLLM_ENFORCE_EAGER")
    (folder / "config.env").write_text(CONFIG + (f"VLLM_ENFORCE_EAGER={graphs.value}\n" if graphs else ""))
    (folder / "measurements.json").write_text('{"hypothesis": "policy is followed", "baseline": null}')
    (root / "weights").mkdir()
    (root / "weights/v").symlink_to(tried.weights)
    template = (tried.weights / "chat_template.jinja").read_text()
    (folder / "chat.jinja").write_text(f"<|im_start|>system\n{RULES}<|im_end|>\n" + template)
    command = ServerCommand.resolve(variant.load("v", root), port=free_port(), platform="cpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_API_KEY", KEY)
        with run_server(command, log=root / "vllm.log") as server:
            client = httpx.Client(
                base_url=server.base_url,
                headers=authorization(),
                timeout=600,
                trust_env=False,
            )
            with client:
                yield SimpleNamespace(server=server, client=client, log=root / "vllm.log")


def _chat(text="Hello", **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def test_health_answers_200_only_after_the_warm_up(served):
    log = served.log.read_text()
    warmed = log.index("Warm-up took")
    assert '"GET /health HTTP/1.1" 200' not in log[:warmed]
    assert '"GET /health HTTP/1.1" 200' in log[warmed:]
    assert "batches of 1, 2, 4, chats with thinking on and off" in log[warmed:]
    assert [served.client.get(path).status_code for path in ("/health", "/ping")] == [200, 200]


def test_the_first_chat_of_a_client_finds_the_chat_prefix_warm(served):
    said = re.findall(
        r"Chat prefix with thinking (on|off): (\d+) tokens, of which the next chat found (\d+) in the prefix cache "
        r"\(blocks of (\d+)\)",
        served.log.read_text(),
    )
    assert [thinking for thinking, *_ in said] == ["on", "off"]
    for _, tokens, result, block in said:
        assert int(result) == int(tokens) // int(block) * int(block) > 0
    before = _counter(served, "vllm:prefix_cache_hits_total")
    assert served.client.post("/v1/chat/completions", json=_chat("Who is new here?")).status_code == 200
    assert _counter(served, "vllm:prefix_cache_hits_total") - before == int(said[0][2])


def _counter(served, name):
    lines = served.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/generative_scoring", "/tokenize"])
def test_questions_need_the_key_of_the_environment(served, path):
    assert httpx.post(served.server.base_url + path, json=_chat(), trust_env=False).status_code == 401
    assert served.client.post(path, json=_chat()).status_code in (200, 400)


def test_the_key_is_in_no_argument_and_no_line_of_the_log(served):
    command = served.server.command
    assert KEY not in " ".join(command.argv) + command.as_shell() + served.log.read_text()
    assert KEY not in Path(f"/proc/{served.server.pid}/cmdline").read_text()


def _answered(served, path, body, **more):
    answer = served.client.post(path, json=body, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _refused(served, path, body, **more):
    answer = served.client.post(path, json=body, **more)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def test_a_body_over_the_limit_is_refused(served):
    answer = served.client.post("/v1/completions", json={"prompt": "x" * 100_000})
    assert answer.status_code == 413
    assert "100000 bytes" in answer.json()["error"]["message"]


def test_a_request_that_can_never_fit_is_refused_with_the_reason(served):
    path = "/v1/completions"
    assert "2048" in _refused(served, path, {"prompt": [5] * 3000, "max_tokens": 1})
    assert "max_model_len" in _refused(served, path, {"prompt": "The", "max_tokens": 3000})
    said = _refused(served, path, {"prompt": [5] * 2000, "max_tokens": 49})
    assert "at most 48 for a prompt of 2000 tokens" in said
    assert "at most 600" in _refused(served, path, {"prompt": [5], "max_tokens": 601})
    assert "at most 600" in _refused(served, "/v1/chat/completions", _chat() | {"max_tokens": 601})
    fits = {"prompt": [5] * 2000, "max_tokens": 48, "ignore_eos": True}
    assert _answered(served, path, fits)["usage"]["completion_tokens"] == 48


def test_overload_is_refused_at_once_and_says_when_to_come_back(served):
    body = {"prompt": "The", "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda _: served.client.post("/v1/completions", json=body), range(16)))
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["Retry-After"] == "1"
        else:
            assert answer.json()["usage"]["completion_tokens"] == 200


def test_sampling_defaults_are_the_variants_and_a_request_overrides_them(served):
    body = {"prompt": "The The The The", "max_tokens": 24, "ignore_eos": True}
    by_default = [_answered(served, "/v1/completions", body)["choices"][0]["text"] for _ in range(2)]
    said = {"temperature": 0.0, "repetition_penalty": 1.5}
    assert by_default == [_answered(served, "/v1/completions", body | said)["choices"][0]["text"]] * 2
    other = _answered(served, "/v1/completions", body | {"repetition_penalty": 1.0})["choices"][0]["text"]
    assert other != by_default[0]


def _thoughts(served, **more):
    """How many tokens a chat thinks, of 40; it would never end its thoughts by itself."""
    settings = json.loads((served.server.weights / "tokenizer.json").read_text())
    end = next(token["id"] for token in settings["added_tokens"] if token["content"] == "</think>")
    body = _chat("Where does the weaver live?", return_token_ids=True, logit_bias={str(end): -100}, **more)
    body |= {"max_tokens": 40, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": True}}
    ids = _answered(served, "/v1/chat/completions", body)["choices"][0]["token_ids"]
    return ids.index(end) if end in ids else len(ids)


def test_thinking_is_off_by_default_where_the_variant_says_so(served):
    tokens = [
        _answered(served, "/tokenize", _chat(**more))["tokens"]
        for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}})
    ]
    said = _answered(served, "/v1/chat/completions", _chat())
    assert said["usage"]["prompt_tokens"] == len(tokens[1])
    thinking = _answered(
        served, "/v1/chat/completions", _chat(chat_template_kwargs={"enable_thinking": True})
    )
    assert thinking["usage"]["prompt_tokens"] != len(tokens[1])


def test_a_request_without_a_thinking_budget_gets_the_variants(served):
    assert _thoughts(served, thinking_token_budget=1000) == 40
    # The line break that the template puts after <think> is the first of them.
    assert _thoughts(served) == 5
    assert _thoughts(served, thinking_token_budget=None) == 5
    assert _thoughts(served, thinking_token_budget=3) == 2


def test_told_to_stop_it_is_ready_no_more_refuses_what_is_new_and_ends_what_it_began(served):
    body = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        process = psutil.Process(served.server.pid)
        process.terminate()
        statuses = set()
        while statuses != {503}:
            statuses = {served.client.get(path).status_code for path in ("/health", "/ping")}
        refused = served.client.post("/v1/completions", json={"prompt": "The"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    process.wait(60)
    assert "force killing" not in served.log.read_text()
