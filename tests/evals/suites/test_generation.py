"""What is read of a server's response."""

import pytest

from slimqwen.evals.suites.generation import Generation


@pytest.mark.parametrize(
    ("content", "thinking", "text"),
    [
        ("so </think>\n\nsalt", True, "\n\nsalt"),
        ("so and so and", True, ""),
        ("salt", False, "salt"),
        ("<think>\nso and", False, ""),
        ("<think>\nso </think>salt", False, "salt"),
        ("<think>\nso and", None, "<think>\nso and"),
    ],
)
def test_the_response_is_what_follows_the_thoughts(content, thinking, text):
    choice = {"text": content, "finish_reason": "length"}
    response = Generation.of_choice(choice, {"completion_tokens": 7}, thinking)
    assert (response, response.finish_reason, response.tokens) == (text, "length", 7)
