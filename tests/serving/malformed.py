"""Requests that no client should send: our own, and those that are drawn from a server's OpenAPI document."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, errors, given, settings
from schemathesis import GenerationMode

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
"""Path and content; each is to be refused."""

_HUGE = 2**70

_OF_BOTH: tuple[dict[str, Any], ...] = (
    *({"temperature": value} for value in (-1, 1e308, "hot", None)),
    *({"top_p": value} for value in (0, 2)),
    *({"top_k": value} for value in (-2, 10**9)),
    *({"min_p": value} for value in (-1, 2)),
    *({"repetition_penalty": value} for value in (0, -1, 1e308)),
    *({"frequency_penalty": value} for value in (99, -1e308)),
    *({"max_tokens": value} for value in (0, -5, 2**63, _HUGE, 1.5, "2", [], True)),
    *({"n": value} for value in (0, -1, 100, 10**6, _HUGE)),
    *({"seed": value} for value in (-1, 2**63, 2**64, -(2**63), 10**30)),
    *({"stop": value} for value in ("", [""], ["a"] * 10_000, [1])),
    *({"stop_token_ids": value} for value in ([-1], [10**9], [_HUGE])),
    *({"logit_bias": value} for value in ({"x": 1}, {"999999": 1}, {"-1": 1}, {"5": 1000}, 5)),
    *({"allowed_token_ids": value} for value in ([], [-1], [10**9])),
    *({"bad_words": value} for value in ([""], ["a"] * 2000)),
    *({"model": value} for value in ("none", 5, "")),
    {"user": 5},
    {"stream": "maybe"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": "x"}},
    *({"priority": value} for value in (5, _HUGE)),
    *({"truncate_prompt_tokens": value} for value in (-5, 0, 10**9)),
    *({"min_tokens": value} for value in (5, -1, _HUGE)),
    *({"request_id": value} for value in ("\n", "", "x" * 100_000)),
    {"cache_salt": ""},
    {"kv_transfer_params": {"x": 1}},
    {"vllm_xargs": {"a": {"b": 1}}},
    *({"thinking_token_budget": value} for value in (-7, _HUGE)),
    *({"structured_outputs": {"json": value}} for value in ("{", {"type": "nonsense"})),
    *({"structured_outputs": {"regex": value}} for value in ("(", "(a{1,9999}){9999}")),
    *(
        {"structured_outputs": value}
        for value in (
            {},
            {"choice": []},
            {"choice": [""]},
            {"structural_tag": "{"},
            "",
            "json",
            5,
            [],
            ["json"],
        )
    ),
    *({"response_format": {"type": value}} for value in ("json_schema", "json_object", "none")),
    *({"prompt_logprobs": value} for value in (-2, 10**6)),
    *({"logprobs": value} for value in (-2, -1, 10**6)),
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

_CHATS: tuple[dict[str, Any], ...] = (
    *(
        {"messages": value}
        for value in (
            *([], None, 5, "x", [5], [{}], [{"role": "user"}], [{"role": "none", "content": "x"}]),
            *(
                [{"role": 5, "content": "x"}],
                [{"role": "user", "content": 5}],
                [{"role": "user", "content": []}],
            ),
            [{"role": "user", "content": [{"type": "text"}]}],
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
                }
            ],
            [{"role": "user", "content": [{"type": "nonsense", "x": 1}]}],
            [{"role": "tool", "content": "x"}],
            [{"role": "user", "content": "x"}] * 2000,
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}],
            [{"role": "assistant", "tool_calls": 5}],
        )
    ),
    *(
        {"chat_template": value}
        for value in ("{{ 1/0 }}", "{% for i in range(10**9) %}x{% endfor %}", "{%", 5)
    ),
    *(
        {"chat_template_kwargs": value}
        for value in (5, {"messages": 5}, {"tools": 5}, {"enable_thinking": {}})
    ),
    *({"tools": value} for value in ([], [{}], 5, [{"type": "function", "function": {"name": "f"}}])),
    {"tool_choice": "required"},
    {"add_generation_prompt": True, "continue_final_message": True},
    *({"reasoning_effort": value} for value in ("x",)),
    *({"logprobs": True, "top_logprobs": value} for value in (-1, 10**6)),
    {"top_logprobs": 5},
    {"documents": 5},
    {"mm_processor_kwargs": {"x": 1}},
    {"max_completion_tokens": _HUGE},
)


def _requests() -> list[tuple[str, dict[str, Any]]]:
    prompt = {"prompt": "Hello", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    found = [(path, body | more) for more in _OF_BOTH for path, body in ((COMPLETIONS, prompt), (CHAT, chat))]
    found += [(COMPLETIONS, {"prompt": value, "max_tokens": 1}) for value in _PROMPTS]
    return found + [(CHAT, chat | more) for more in _CHATS]


REQUESTS = _requests()
"""Path and body: answered where vLLM makes sense of it, refused otherwise."""

UNSENDABLE: tuple[dict[str, Any], ...] = ({"top_k": _HUGE}, {"top_k": _HUGE, "n": 2})
"""What vLLM's checks let through and the message to its engine cannot hold."""

CHOSEN_LOGPROBS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        CHAT,
        {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "logprob_token_ids": [1, 2]},
    ),
    ("/generative_scoring", {"query": "Hello", "items": ["a", "b"], "label_token_ids": [1, 2]}),
)
"""Path and body: what ended a server that drafts."""

_EMPTY_GRAMMAR = (
    "the grammar has no sentence: the engine takes it, finds no token that it allows and gives the request up"
)

KNOWN: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"grammar": "root ::= root"}}, 500, _EMPTY_GRAMMAR),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"$ref": "#"}}}, 500, _EMPTY_GRAMMAR),
)
"""Path, body, status and reason of vLLM's own server errors; the server and every other request live on."""

_KNOWN_STATUSES = {
    "POST /v1/systemone": {501},  # a model with a head of its own for it has this; it says so
}


def fuzz(
    url: str, examples: int, report: Callable[[str], None] = lambda line: None
) -> dict[tuple[str, str], str]:
    """Ask what an OpenAPI document allows, and what it forbids, of every endpoint; the same at every call.

    Args:
        url: of a server.
        examples: of each kind, at most, for each endpoint.
        told: each endpoint, once it has been asked.

    Returns:
        The server errors that are not known, and the requests without an answer: endpoint and status, with a body.
    """
    found: dict[tuple[str, str], str] = {}
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = result.ok()
        for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
            # An endpoint without parameters has nothing to get wrong.
            with contextlib.suppress(errors.Unsatisfiable):
                _ask(url, operation, mode, examples, found)
        report(operation.label)
    return found


def _ask(
    url: str,
    operation: schemathesis.APIOperation,
    mode: GenerationMode,
    examples: int,
    found: dict[tuple[str, str], str],
) -> None:
    known = _KNOWN_STATUSES.get(operation.label, set())
    length = "max_output_tokens" if operation.path == "/v1/responses" else "max_tokens"

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and operation.path.startswith("/v1/"):
            case.body.setdefault(length, 2)  # else it is as many as fit
        try:
            status = case.call(base_url=url, timeout=300).status_code
        except Exception as error:
            found.setdefault((operation.label, type(error).__name__), repr(case.body)[:500])
            return
        if status >= 500 and status not in known:
            found.setdefault((operation.label, str(status)), repr(case.body)[:500])

    ask()
