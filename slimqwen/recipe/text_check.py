"""Checks the beginning of a stage's text for faults, before other stages work for hours."""

from collections.abc import Iterator

from slimqwen.errors import SlimqwenError
from slimqwen.models.outline import Outline
from slimqwen.recipe.stage import Fault
from slimqwen.text.chats import read_chat_templates, require_text_or_chat
from slimqwen.text.corpus import TextSource, find_named_corpus
from slimqwen.text.documents import Document, read_documents
from slimqwen.text.files import CorpusError
from slimqwen.variant import repository_root

_CHECKED_BYTES = 16 * 2**20
"""Bytes that are read of a larger file, in a third of a second; the rest is checked when the stage reads the text."""


def inspect_text(
    outline: Outline,
    field: str,
    source: TextSource,
    *,
    least_bytes: int = 0,
    least_documents: int = 1,
    or_prompt: bool = False,
) -> Iterator[Fault]:
    """Find the faults of a stage's text; yields nothing if its beginning is sound, or if the model itself writes it.

    Args:
        outline: outline of the stage's input, whose templates render chats.
        field: dotted name of the text among the stage's parameters.
        source: the text.
        least_bytes: least size of the file, bytes; a token has at least one.
        least_documents: least number of documents.
        or_prompt: whether the text may hold prompts.
    """
    field = f"{field}.path"
    if source.is_own:
        return  # a stage before this one writes it
    try:
        size, number, is_whole, has_chats = source.path.stat().st_size, 0, True, False
        with_tools: list[Document] = []
        for document in read_documents(source.path):
            if document.position > _CHECKED_BYTES:
                is_whole = False
                break
            if document.is_blank:
                continue
            require_text_or_chat(document, or_prompt=or_prompt)
            has_chats = has_chats or document.messages is not None
            with_tools += [document] if _has_tools(document) else []
            number += 1
        templates = read_chat_templates(outline.folder) if has_chats else {}
        if has_chats and "default" not in templates:
            raise CorpusError(
                f"{source.path} has chats, but {outline.folder} has no chat template; put its chat_template.jinja there"
            )
        if with_tools and not any("tool" in template.text for template in templates.values()):
            raise CorpusError(
                f"{with_tools[0].location}: a chat with tools ({len(with_tools)} such chats), which "
                f"{templates['default'].file} does not render; remove them, or use a template that renders tools"
            )
    except FileNotFoundError:
        named = find_named_corpus(source.path, repository_root())
        cure = "write the text into that file"
        if named:
            cure = f"`slimqwen download --corpus {named[0]} --variant {named[1]}` fetches it"
        yield Fault(
            f"{source.path}: cannot be read (No such file or directory); {cure}", field, named is not None
        )
    except OSError as error:
        yield Fault(f"{source.path}: cannot be read ({error.strerror}); write the text into that file", field)
    except SlimqwenError as error:
        yield from (Fault(fault, field) for fault in error.faults)
    else:
        if is_whole and number < least_documents:
            wanted = f"but {least_documents} are needed" if number else "but at least one is needed"
            yield Fault(f"{source.path} has {number} documents, {wanted}; add text or ask for less", field)
        elif size < least_bytes and source.path.suffix in (
            ".jsonl",
            ".txt",
        ):  # others may hold more than their size
            yield Fault(
                f"{source.path} has {size} bytes, too few for {least_bytes} tokens; add text or ask for less",
                field,
            )


def _has_tools(document: Document) -> bool:
    """Whether a document is a chat that offers tools, calls a tool, or has the result of a call."""
    messages = document.messages or ()
    return bool(document.tools) or any(
        message["role"] == "tool" or bool(message.get("tool_calls")) for message in messages
    )
