"""Whether a model thinks before it responds: who decides it, and templates that cannot do what a suite asks for."""

import pytest

from slimqwen.evals import EvalError
from slimqwen.evals.suites.thinking import resolve_thinking
from tests.evals.small_suite import facts_alone

QUESTION = "{% for m in messages %}Q {{ m.content }}{% endfor %}"
THINKS = QUESTION + "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"


@pytest.fixture
def resolve(small_suite, add_served, stand_in, tmp_path):
    one = add_served("tiny", stand_in())
    (tmp_path / "eval" / "suites").mkdir(parents=True, exist_ok=True)
    (tmp_path / "eval" / "suites" / "small.yaml").touch()

    def resolve(suite_says, server_says, template):
        file = one.server.weights / "chat_template.jinja"
        file.write_text(template) if template else file.unlink(missing_ok=True)
        one.server.command.flags["default-chat-template-kwargs"] = server_says
        suite = facts_alone(small_suite, thinking=suite_says)
        return resolve_thinking(suite, suite.tasks[0], one)

    return resolve


@pytest.mark.parametrize(
    ("suite_says", "server_says", "template", "thinks"),
    [
        (False, {"enable_thinking": True}, THINKS, False),
        (True, {"enable_thinking": False}, THINKS, True),
        (None, {"enable_thinking": False}, THINKS, False),
        (None, {"tools": []}, THINKS, True),
        (None, None, QUESTION, False),
    ],
)
def test_the_suite_decides_else_the_server_else_the_template(
    resolve, suite_says, server_says, template, thinks
):
    assert resolve(suite_says, server_says, template) == thinks


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "weights/tiny has no chat template, which the suite small needs; put the chat_template.jinja of its"),
        (QUESTION, r"tiny ignores enable_thinking, .* small sets; remove `thinking` from eval/suites/small\.yaml"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_do_what_the_suite_says_is_named(resolve, template, reason):
    with pytest.raises(EvalError, match=reason):
        resolve(False, None, template)
