"""Chats as text, rendered as vLLM's server renders the messages and tools of a request."""

import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from slimqwen.checkpoint.stored_file import refuse_pointer, remove_mark
from slimqwen.text.documents import Document, read_documents
from slimqwen.text.files import CorpusError, without_nulls

_TEXT_MODEL = SimpleNamespace(
    enable_prompt_embeds=False,
    multimodal_config=None,
    revision=None,
    code_revision=None,
    trust_remote_code=False,
)
"""The attributes of a ModelConfig that vLLM's renderer reads for a chat of text alone."""


TEMPLATE_DATE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""What strftime_now of a template gives here, so that the same texts give the same bytes on any day. A server gives its
clients the present day."""


class ChatTemplate(NamedTuple):
    """A chat template, and the file that it is in."""

    text: str
    file: Path


def read_chat_templates(weights: Path) -> dict[str, ChatTemplate]:
    """The chat templates of a checkpoint by name, as vLLM's server finds them.

    `default` renders chats, and `tool_use`, if there is one, chats with tools. Other templates serve only requests that
    name them.

    Raises:
        CorpusError: a file cannot be read.
        CorruptCheckpointError: a file is a git-lfs pointer or begins with a byte order mark.
    """
    file = weights / "tokenizer_config.json"
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("chat_template") or []
        if isinstance(named, str):
            named = {"default": named}
        if isinstance(named, Mapping):
            named = [{"name": name, "template": template} for name, template in named.items()]
        templates = {each["name"]: ChatTemplate(each["template"], file) for each in named}
        additional = sorted((weights / "additional_chat_templates").glob("*.jinja"))
        in_files: dict[str, ChatTemplate] = {}
        for file in [*additional, weights / "chat_template.jinja"]:
            if file.is_file():
                refuse_pointer(file)
                name = file.stem if file in additional else "default"
                in_files[name] = ChatTemplate(file.read_text(encoding="utf-8"), file)
        templates = in_files or templates
        file = weights / "chat_template.json"
        if file.is_file() and not additional and (weights / "preprocessor_config.json").is_file():
            # vLLM takes the processor's template for chats without tools, and the tokenizer's for chats with tools.
            own = templates.get("tool_use") or templates.get("default")
            legacy = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
            templates = {"default": ChatTemplate(legacy, file)} | ({"tool_use": own} if own else {})
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise CorpusError(
            f"{file} has no key chat_template; take the file of the original checkpoint, or delete it, if "
            "tokenizer_config.json or chat_template.jinja has the template"
            if file.name == "chat_template.json" and isinstance(error, LookupError | TypeError)
            else f"{file} cannot be read ({error}); make or download the checkpoint anew"
        ) from None
    return templates


def refuse_mark(template: ChatTemplate) -> None:
    """Refuse a chat template that begins with a byte order mark: vLLM would put it before every prompt.

    Raises:
        CorpusError: it does.
    """
    if template.text.startswith("\ufeff"):
        in_json = template.file.suffix == ".json"
        cure = "remove \\ufeff at the beginning of chat_template" if in_json else remove_mark(template.file)
        raise CorpusError(f"chat template {template.file} begins with a byte order mark; {cure}")


def content_form(template: str, tools: list[Any] | None = None) -> str:
    """The form in which vLLM gives the contents of messages to a template: "string", or "openai" for lists of parts."""
    # Slow to import, and needed for chats alone.
    from vllm.renderers.hf import resolve_chat_template_content_format

    stand_in: Any = SimpleNamespace(name_or_path="", get_chat_template=lambda text, tools: text)
    model: Any = _TEXT_MODEL
    return str(resolve_chat_template_content_format(template, tools, "auto", stand_in, model_config=model))


class ChatRenderer:
    """Renders chats with the chat templates and the tokenizer of a checkpoint.

    Args:
        weights: folder of the checkpoint.

    Raises:
        CorpusError: a template cannot be read, or begins with a byte order mark.
        CorruptCheckpointError: a file is a git-lfs pointer or begins with a byte order mark.
    """

    def __init__(self, weights: Path) -> None:
        import transformers  # slow to import

        self.templates = read_chat_templates(weights)
        for template in self.templates.values():
            refuse_mark(template)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(weights)

    @property
    def date(self) -> str | None:
        """The day that a template takes for today; None if no template asks for it."""
        asks = any("strftime_now" in template.text for template in self.templates.values())
        return TEMPLATE_DATE.date().isoformat() if asks else None

    def text_of(self, document: Document, *, to_continue: bool = False) -> str:
        """The text of a document, rendered if it is a chat.

        Args:
            to_continue: whether to drop the assistant's messages at the end and stop where the model's would begin.

        Raises:
            CorpusError: the document is a prompt, the server would refuse the chat, or the template fails or leaves out
                a part of it; the message has the location of the document.
        """
        if document.text is not None:
            return document.text
        try:
            if document.messages is None:
                raise ValueError("it is a prompt, not a chat")
            messages = document.messages
            while to_continue and messages and messages[-1].get("role") == "assistant":
                messages = messages[:-1]
            return self.render(messages, document.tools, to_continue=to_continue)
        # Templates raise exceptions of any type.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise CorpusError(
                f"{document.location}: the chat cannot be rendered ({reason}); correct or remove it"
            ) from None

    def render(self, messages: list[Any], tools: Any = None, *, to_continue: bool = False) -> str:
        """The text of a chat; arguments of tool calls whose value is null are left out.

        Args:
            tools: list of tools, or the JSON of that list.
            to_continue: whether the text ends where the model's next message begins.

        Raises:
            ValueError: the server would refuse the chat, or the template leaves out a message, tools or their calls.
            Exception: the template fails.
        """
        if isinstance(tools, str):
            tools = json.loads(tools or "null")
        template = (self.templates.get("tool_use") if tools else None) or self.templates.get("default")
        if template is None:
            raise ValueError("the checkpoint has no chat_template.jinja")
        messages = [check_message(message) for message in messages]
        tools = [check_tool(tool) for tool in tools] if tools else None
        text = self._render(template.text, messages, tools, to_continue)
        self._require_contents(template.text, messages, tools, to_continue)
        without_calls = [{**message, "tool_calls": []} for message in messages]
        if tools and self._render(template.text, messages, None, to_continue) == text:
            raise ValueError("the template leaves out the tools")
        has_calls = any(message.get("tool_calls") for message in messages)
        if has_calls and self._render(template.text, without_calls, tools, to_continue) == text:
            raise ValueError("the template leaves out the tool calls")
        text.encode()
        return text

    def _require_contents(
        self, template: str, messages: list[Any], tools: list[Any] | None, to_continue: bool
    ) -> None:
        """Raise a ValueError if the template leaves out a message: a mark in its place has to be in the text."""
        marked = [_marked(message, number) for number, message in enumerate(messages)]
        try:
            text = self._render(template, [message for message, _ in marked], tools, to_continue)
        # A template may refuse contents other than these.
        except Exception:
            return
        for number, (_, marks) in enumerate(marked):
            if any(mark not in text for mark in marks):
                raise ValueError(
                    f"the template leaves out message {number + 1}, of the role {messages[number]['role']!r}"
                )

    def _render(self, template: str, messages: list[Any], tools: list[Any] | None, to_continue: bool) -> str:
        # Slow to import, and needed for chats alone.
        from vllm.renderers.chat_utils import parse_chat_messages
        from vllm.renderers.hf import safe_apply_chat_template

        conversation, _, _ = parse_chat_messages(messages, _TEXT_MODEL, content_form(template, tools))
        return str(
            safe_apply_chat_template(
                _TEXT_MODEL,
                self.tokenizer,
                conversation,
                tools=tools,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=to_continue,
                strftime_now=TEMPLATE_DATE.strftime,
            )
        )


def read_texts(path: Path, weights: Path) -> Iterator[str]:
    """The texts of a file or folder except blank ones; chats are rendered with the templates of a checkpoint.

    Raises:
        CorpusError: the file cannot be read, a document is neither text nor chat, or a chat cannot be rendered.
    """
    chats = None
    for document in read_documents(path):
        if document.is_blank:
            continue
        if document.text is None:
            require_text_or_chat(document)
            chats = chats or ChatRenderer(weights)
            yield chats.text_of(document)
        else:
            yield document.text


def require_text_or_chat(document: Document, *, or_prompt: bool = False) -> None:
    """Check without a template that a document is a text, or a chat whose messages have roles.

    Args:
        or_prompt: whether the document may also be a prompt.

    Raises:
        CorpusError: the document is something else.
    """
    roles = [isinstance(each, dict) and isinstance(each.get("role"), str) for each in document.messages or ()]
    if (
        document.text is None
        and not (or_prompt and document.prompt is not None)
        and not all(roles or [False])
    ):
        form = 'give {"text": …} or {"messages": [{"role": …, "content": …}, …]}'
        also = ', or {"prompt": …}' if or_prompt else ""
        raise CorpusError(f"{document.location}: neither a text nor a chat; {form}{also}")


def check_message(message: Any) -> dict[str, Any]:
    """Check a message of a chat, and return it as vLLM's server would read it from a request.

    Raises:
        ValueError: the message has no role, content that is not text, or a tool call that the server would refuse.
    """
    from vllm.renderers.chat_utils import has_non_text_content

    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message has no role: {str(message)[:80]}")
    checked: dict[str, Any] = {
        key: without_nulls(value) for key, value in message.items() if value is not None
    }
    if not isinstance(checked.get("content", ""), str | list) or has_non_text_content([checked]):
        raise ValueError("a message has content that is not text")
    thoughts = checked.pop("reasoning_content", None)
    if thoughts is not None:
        checked.setdefault("reasoning", thoughts)
    if "tool_calls" in checked:
        checked["tool_calls"] = [_checked_call(call) for call in checked["tool_calls"]]
    return checked


def _marked(message: Mapping[str, Any], number: int) -> tuple[dict[str, Any], list[str]]:
    """A message with a mark of letters and digits instead of each text that is not blank, and these marks."""
    content, marks = message.get("content"), list[str]()

    def mark(text: Any) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        marks.append(f"message{number}part{len(marks)}end")
        return marks[-1]

    if isinstance(content, str):
        content = mark(content)
    elif content:
        content = [
            {**part, "text": mark(part["text"])} if isinstance(part, Mapping) and "text" in part else part
            for part in content
        ]
    return ({**message, "content": content} if "content" in message else dict(message)), marks


def _checked_call(call: Any) -> dict[str, Any]:
    """Check a tool call, and return it with its arguments as an object instead of JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('a tool call has no function; write {"function": {"name": …, "arguments": {…}}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"the arguments of a call of {function['name']} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a call of {function['name']} are not a JSON object")
    return {**call, "function": {**function, "arguments": without_nulls(arguments)}}


def check_tool(tool: Any) -> dict[str, Any]:
    """Check a tool with vLLM's own model of requests, and return it as vLLM's server passes it to the template.

    Raises:
        ValueError: the server would refuse the tool (pydantic's ValidationError).
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    dumped: dict[str, Any] = ChatCompletionToolsParam.model_validate(tool).model_dump()
    return dumped
