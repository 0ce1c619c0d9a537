"""What is wrong with the text of a stage, as far as its beginning shows: before hours of work on other stages."""

from collections.abc import Iterator

from slimqwen.errors import SlimqwenError
from slimqwen.models.outline import Outline
from slimqwen.recipe.stage import Fault
from slimqwen.text.chats import read_chat_templates, require_text_or_chat
from slimqwen.text.corpus import TextSource
from slimqwen.text.files import CorpusError, Document, TextFile

_CHECKED_BYTES = 16 * 2**20
"""Of a larger file only so much is read, within a third of a second; the rest is checked when its stage reads it."""


def inspect_text(
    outline: Outline,
    field: str,
    source: TextSource,
    *,
    least_bytes: int = 0,
    least_documents: int = 1,
    or_prompt: bool = False,
) -> Iterator[Fault]:
    """The first fault of a stage's text.

    Args:
        outline: the stage's input, whose templates render chats.
        field: dotted name of the text among the stage's parameters.
        least_bytes: bytes that the file must have; a token has at least one.
        least_documents: documents that it must have.
        or_prompt: whether it may hold prompts.
    """
    field = f"{field}.path"
    if "path" not in source.model_fields_set and not outline.is_embedded:
        yield Fault(
            f"{field} is missing, its default is text of the embedded model; name a file of yours", field
        )
        return
    try:
        size, number, is_whole, has_chats = source.path.stat().st_size, 0, True, False
        with_tools: list[Document] = []
        file = TextFile(source.path)
        for document in file:
            if document.position > _CHECKED_BYTES:
                is_whole = False
                break
            if document.is_blank:
                continue
            require_text_or_chat(file, document, or_prompt=or_prompt)
            has_chats = has_chats or document.messages is not None
            with_tools += [document] if _has_tools(document) else []
            number += 1
        templates = read_chat_templates(outline.folder) if has_chats else {}
        if has_chats and "default" not in templates:
            raise CorpusError(
                f"{source.path} has chats, {outline.folder} no chat template; put its chat_template.jinja there"
            )
        if with_tools and not any("tool" in template.text for template in templates.values()):
            raise CorpusError(
                f"{file.location(with_tools[0].position)}: a chat with tools ({len(with_tools)} such chats), which "
                f"{templates['default'].file} does not render; remove them, or put a template with tools there"
            )
    except OSError as error:
        yield Fault(f"{source.path}: cannot be read ({error.strerror}); put the text there", field)
    except SlimqwenError as error:
        yield Fault(str(error), field)
    else:
        if is_whole and number < least_documents:
            wanted = f"{least_documents} are needed" if number else "it needs some text"
            yield Fault(f"{source.path} has {number} documents, {wanted}; add text or ask for less", field)
        elif size < least_bytes:
            yield Fault(
                f"{source.path} has {size} bytes, too few for {least_bytes} tokens; add text or ask for less",
                field,
            )


def _has_tools(document: Document) -> bool:
    """Whether a chat offers tools, calls one, or has the result of a call."""
    messages = document.messages or ()
    return bool(document.tools) or any(
        message["role"] == "tool" or bool(message.get("tool_calls")) for message in messages
    )
