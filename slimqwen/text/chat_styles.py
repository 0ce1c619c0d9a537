"""The styles in which people keep chats: each becomes messages and tools in OpenAI's form, which chat templates take.

Alpaca: https://github.com/tatsu-lab/stanford_alpaca. ShareGPT: the fields and roles of LLaMA-Factory's data/README.md.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

COLUMNS: Final = (
    *(
        "text",
        "messages",
        "conversations",
        "conversation",
        "instruction",
        "input",
        "output",
        "system",
        "history",
    ),
    *("tools", "prompt", "id"),
)
"""Fields that are read; others are ignored."""

FORM: Final = 'give {"text": …} or {"messages": […]}'
_SHARE_GPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "function_call": "assistant",
}


class RowContent(NamedTuple):
    """Content of a row: a chat with its tools, a text, or a prompt; `style` names the style for messages."""

    style: str
    text: str | None = None
    messages: list[Any] | None = None
    tools: Any = None
    prompt: str | None = None


def read_content(row: Any) -> RowContent:
    """Recognise the style of a row, and return its content.

    Raises:
        ValueError: the row is of no known style; the message is cause and cure.
    """
    row = row if isinstance(row, Mapping) else {}
    for field in ("messages", "conversations", "conversation"):
        chat = _decoded(row.get(field))
        if isinstance(chat, list):
            system = row.get("system")
            is_share_gpt = any(isinstance(each, Mapping) and "from" in each for each in chat)
            messages = _share_gpt(chat) if is_share_gpt else chat
            if isinstance(system, str) and system.strip() and not _begins_with_system(messages):
                messages = [{"role": "system", "content": system}, *messages]
            style = "ShareGPT chat" if is_share_gpt else "OpenAI chat"
            return RowContent(style, messages=messages, tools=_tools(row.get("tools")))
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output", ""), str):
        return RowContent("Alpaca chat", messages=_alpaca(row))
    text, prompt = (row[name] if isinstance(row.get(name), str) else None for name in ("text", "prompt"))
    if text is None and prompt is None:
        names = f"the fields are {', '.join(map(str, list(row)[:8]))}; " if row else ""
        raise ValueError(f"neither a text nor a chat; {names}{FORM}")
    return RowContent("text" if text is not None else "prompt", text=text, prompt=prompt)


def _decoded(value: Any) -> Any:
    """The list or object that a cell of a .csv file holds as JSON; other values as they are."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"a chat or tools that are not JSON ({error}); correct them") from None
    return value


def _begins_with_system(messages: list[Any]) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping) and messages[0].get("role") == "system"


def _share_gpt(chat: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, each in enumerate(chat, start=1):
        name = each.get("from") if isinstance(each, Mapping) else None
        role = _SHARE_GPT_ROLES.get(name.lower()) if isinstance(name, str) else None
        value = each.get("value") if isinstance(each, Mapping) else None
        if role is None:
            known = ", ".join(_SHARE_GPT_ROLES)
            raise ValueError(f'message {number} is "from" {name!r}; use one of {known}')
        if not isinstance(value, str):
            raise ValueError(f'message {number} has no text as its "value"; write it there')
        if str(name).lower() == "function_call":
            messages.append({"role": role, "content": "", "tool_calls": _calls(value, number)})
        else:
            messages.append({"role": role, "content": value})
    return messages


def _calls(value: str, number: int) -> list[dict[str, Any]]:
    """The tool calls of a function_call, whose value is the JSON of one call or of a list of them."""
    try:
        calls = json.loads(value)
    except ValueError as error:
        raise ValueError(f"message {number} is a function_call, but not JSON ({error}); correct it") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f'message {number} is a function_call; write {{"name": …, "arguments": {{…}}}}')
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]


def _tools(value: Any) -> Any:
    """Tools in OpenAI's form; ShareGPT keeps the functions alone, often as JSON text."""
    tools = _decoded(value)
    if not isinstance(tools, list):
        return tools or None
    is_bare = [isinstance(tool, Mapping) and "function" not in tool and "name" in tool for tool in tools]
    return [
        {"type": "function", "function": tool} if bare else tool
        for tool, bare in zip(tools, is_bare, strict=True)
    ] or None


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": row["system"]})
    for turn in _decoded(row.get("history")) or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(each, str) for each in turn)):
            raise ValueError("history is no list of pairs; write [[instruction, output], …]")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    asked = [row["instruction"], row.get("input") or ""]
    if not isinstance(asked[1], str):
        raise ValueError("the input is no text; write it as text")
    if not str(row.get("output") or "").strip():
        return []  # nothing to learn from
    question = "\n\n".join(part for part in asked if part.strip())
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
