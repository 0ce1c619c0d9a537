"""Finds whether a model thinks before it responds to a task: the suite decides, else the server, else the template."""

from slimqwen.evals import EvalError
from slimqwen.evals.suites.suite import Suite, SuiteTask
from slimqwen.serving import chat_template
from slimqwen.serving.shared_server import SharedServer


def resolve_thinking(suite: Suite, task: SuiteTask, server: SharedServer) -> bool:
    """Whether the model thinks before it responds to a task whose prompts go through the chat template.

    Raises:
        EvalError: the server has no chat template, or one that ignores the thinking switch that the suite sets.
    """
    flags, weights = server.server.command.flags, server.server.weights
    template = chat_template.served_templates(server.variant, flags).get("default")
    if template is None:
        raise EvalError(
            f"weights/{weights.name} has no chat template, which the suite {suite.name} needs; put the "
            "chat_template.jinja of its model there, or name a file with VLLM_CHAT_TEMPLATE in config.env"
        )
    if task.thinking is not None and not chat_template.heeds_thinking(template, weights):
        raise EvalError(
            f"the chat template of weights/{weights.name} ignores enable_thinking, which the suite {suite.name} sets; "
            f"remove `thinking` from {suite.files(server.variant.root)[-1].relative_to(server.variant.root)}"
        )
    served = (flags.get("default-chat-template-kwargs") or {}).get("enable_thinking")
    said = task.thinking if task.thinking is not None else served
    return chat_template.thinks_by_default(template, weights) if said is None else bool(said)
