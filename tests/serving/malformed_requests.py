"""Malformed and extreme requests, written by hand."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

BODIES: Mapping[str, tuple[str, bytes]] = {
    "nothing": (COMPLETIONS, b""),
    "cut short": (COMPLETIONS, b'{"prompt": "a", "max_tokens": 1'),
    "null": (COMPLETIONS, b"null"),
    "a list": (CHAT, b"[]"),
    "a number": (CHAT, b"1"),
    "no number": (COMPLETIONS, b"NaN"),
    "invalid UTF-8": (COMPLETIONS, b'{"prompt": "\xff\xfe", "max_tokens": 1}'),
    "half a surrogate": (COMPLETIONS, b'{"prompt": "\\ud800", "max_tokens": 1}'),
    "half a surrogate in a chat": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "\\ud83d"}], "max_tokens": 1}',
    ),
    "opened for ever": (COMPLETIONS, b"[" * 100_000),
    "deep lists": (COMPLETIONS, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "deep objects": (CHAT, b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "a number of 5,000 digits": (COMPLETIONS, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}"),
    "infinitely many tokens": (COMPLETIONS, b'{"prompt": "a", "max_tokens": 1e400}'),
    "infinite temperature": (COMPLETIONS, b'{"prompt": "a", "max_tokens": 1, "temperature": 1e400}'),
    "temperature that is no number": (CHAT, b'{"messages": [], "temperature": NaN}'),
    "longer than the context": (COMPLETIONS, b'{"prompt": "' + b"a " * 400_000 + b'", "max_tokens": 1}'),
    "larger than the limit": (CHAT, b'{"messages": "' + b"a" * 1_000_000 + b'"}'),
}
"""Path and content of requests that the server has to refuse."""

_HUGE = 2**70


def _each(name: str, *values: Any) -> list[dict[str, Any]]:
    """A body's field with each of the values."""
    return [{name: value} for value in values]


_COMMON_FIELDS: tuple[dict[str, Any], ...] = (
    *_each("temperature", -1, 1e308, "hot", None),
    *_each("top_p", 0, 2),
    *_each("top_k", -2, 10**9),
    *_each("min_p", -1, 2),
    *_each("repetition_penalty", 0, -1, 1e308),
    *_each("frequency_penalty", 99, -1e308),
    *_each("max_tokens", 0, -5, 2**63, _HUGE, 1.5, "2", [], True),
    *_each("n", 0, -1, 100, 10**6, _HUGE),
    *_each("seed", -1, 2**63, 2**64, -(2**63), 10**30),
    *_each("stop", "", [""], ["a"] * 10_000, [1]),
    *_each("stop_token_ids", [-1], [10**9], [_HUGE]),
    *_each("logit_bias", {"x": 1}, {"999999": 1}, {"-1": 1}, {"5": 1000}, 5),
    *_each("allowed_token_ids", [], [-1], [10**9]),
    *_each("bad_words", [""], ["a"] * 2000),
    *_each("model", "none", 5, ""),
    {"user": 5},
    {"stream": "maybe"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": "x"}},
    *_each("priority", 5, _HUGE),
    *_each("truncate_prompt_tokens", -5, 0, 10**9),
    *_each("min_tokens", 5, -1, _HUGE),
    *_each("request_id", "\n", "", "x" * 100_000),
    {"cache_salt": ""},
    {"kv_transfer_params": {"x": 1}},
    {"vllm_xargs": {"a": {"b": 1}}},
    *_each("thinking_token_budget", -7, _HUGE),
    *_each("structured_outputs", {"json": "{"}, {"json": {"type": "nonsense"}}),
    *_each("structured_outputs", {"regex": "("}, {"regex": "(a{1,9999}){9999}"}),
    *_each("structured_outputs", {}, {"choice": []}, {"choice": [""]}, {"structural_tag": "{"}),
    *_each("structured_outputs", "", "json", 5, [], ["json"]),
    *({"response_format": {"type": value}} for value in ("json_schema", "json_object", "none")),
    *_each("prompt_logprobs", -2, 10**6),
    *_each("logprobs", -2, -1, 10**6),
    {"prompt_embeds": "AAAA"},
    {"repetition_detection": {"max_pattern_size": -1}},
    {"echo": "x"},
    {"logprob_token_ids": [10**9]},
    {"use_beam_search": True, "n": 10**5},
    {"use_beam_search": True, "n": 0},
)

_PROMPTS: tuple[Any, ...] = (
    *([], [[]], [1, "a"], [-1], [10**9], [_HUGE], [[1], [10**9]], [1.5], {}, None, True, "", [""], 5),
    ["a"] * 1000,
    [[5]] * 1000,
)

_CHAT_FIELDS: tuple[dict[str, Any], ...] = (
    *_each("messages", [], None, 5, "x", [5], [{}], [{"role": "user"}], [{"role": "none", "content": "x"}]),
    *_each(
        "messages",
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "nonsense", "x": 1}]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x"}] * 2000,
        [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": 5}],
    ),
    *_each("chat_template", "{{ 1/0 }}", "{% for i in range(10**9) %}x{% endfor %}", "{%", 5),
    *_each("chat_template_kwargs", 5, {"messages": 5}, {"tools": 5}, {"enable_thinking": {}}),
    *_each("tools", [], [{}], 5, [{"type": "function", "function": {"name": "f"}}]),
    {"tool_choice": "required"},
    {"add_generation_prompt": True, "continue_final_message": True},
    *_each("reasoning_effort", "x"),
    *({"logprobs": True, "top_logprobs": value} for value in (-1, 10**6)),
    {"top_logprobs": 5},
    {"documents": 5},
    {"mm_processor_kwargs": {"x": 1}},
    {"max_completion_tokens": _HUGE},
)


def _requests() -> list[tuple[str, dict[str, Any]]]:
    prompt = {"prompt": "Hello", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    bodies = ((COMPLETIONS, prompt), (CHAT, chat))
    requests = [(path, body | fields) for fields in _COMMON_FIELDS for path, body in bodies]
    requests += [(COMPLETIONS, {"prompt": value, "max_tokens": 1}) for value in _PROMPTS]
    return requests + [(CHAT, chat | fields) for fields in _CHAT_FIELDS]


REQUESTS = _requests()
"""Path and body of requests that vLLM may answer or refuse."""

UNSENDABLE: tuple[dict[str, Any], ...] = ({"top_k": _HUGE}, {"top_k": _HUGE, "n": 2})
"""Fields that pass vLLM's checks, but that the message to its engine cannot hold."""

CHOSEN_LOGPROBS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        CHAT,
        {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "logprob_token_ids": [1, 2]},
    ),
    ("/generative_scoring", {"query": "Hello", "items": ["a", "b"], "label_token_ids": [1, 2]}),
)
"""Path and body of requests that crashed a server with speculative decoding."""

KNOWN: tuple[tuple[str, dict[str, Any], int], ...] = (
    # A grammar without a sentence: the engine accepts it, finds no allowed token and gives up the request.
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"grammar": "root ::= root"}}, 500),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"$ref": "#"}}}, 500),
)
"""Path, body and status of server errors of vLLM's own that the server survives."""


def sent(client: httpx.Client) -> Iterator[tuple[str, httpx.Response, bool]]:
    """Send every request: its beginning, the answer, and whether that is what it should be."""
    known = {(path, _content(body)): status for path, body, status in KNOWN}
    forbidden = [
        *BODIES.values(),
        *((COMPLETIONS, _content({"prompt": "The", **fields})) for fields in UNSENDABLE),
    ]
    allowed = [*((path, _content(body)) for path, body in (*REQUESTS, *CHOSEN_LOGPROBS)), *known]
    for path, content in (*forbidden, *allowed):
        answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
        is_right = _is_refusal(answer) or answer.status_code == known.get((path, content))
        if (path, content) in allowed:
            is_right |= answer.status_code == httpx.codes.OK
        yield f"{path} {content[:300].decode(errors='replace')}", answer, is_right


def _content(body: object) -> bytes:
    return json.dumps(body).encode()


def _is_refusal(answer: httpx.Response) -> bool:
    """Whether an answer blames the request, with a reason."""
    if not answer.is_client_error:
        return False
    said = answer.json()
    return bool((said.get("error") or {}).get("message") or said.get("detail"))
