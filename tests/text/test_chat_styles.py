"""Rows of published chats, read as OpenAI's messages and tools."""

import json

import pytest

from slimqwen.text.chat_styles import read_content

CHAT = [{"role": "user", "content": "Who keeps the ferry?"}, {"role": "assistant", "content": "Nula."}]
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("row", "messages", "tools"),
    [
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "Rain?"},
                    {"from": "function_call", "value": '{"name": "weather", "arguments": {"days": 1}}'},
                    {"from": "observation", "value": "dry"},
                    {"from": "gpt", "value": "No."},
                ],
                "tools": json.dumps([WEATHER]),
            },
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Rain?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "weather", "arguments": {"days": 1}}}
                    ],
                },
                {"role": "tool", "content": "dry"},
                {"role": "assistant", "content": "No."},
            ],
            [{"type": "function", "function": WEATHER}],
        ),
        ({"system": "Be brief.", "conversations": CHAT}, [{"role": "system", "content": "Be brief."}, *CHAT], None),
        (
            {"instruction": "Add.", "input": "1 + 1", "output": "2", "history": [["Hello", "Hi"]], "text": "x"},
            [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi"},
                {"role": "user", "content": "Add.\n\n1 + 1"},
                {"role": "assistant", "content": "2"},
            ],
            None,
        ),
    ],
)  # fmt: skip
def test_tools_systems_and_earlier_turns_become_openais(row, messages, tools):
    content = read_content(row)
    assert (content.messages, content.tools) == (messages, tools)
