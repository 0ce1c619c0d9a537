"""Prompts of an exact number of tokens, cut from text that is never used twice."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slimqwen.text.chats import ChatRenderer
from slimqwen.text.corpus import resolve_text
from slimqwen.text.documents import read_documents
from slimqwen.text.files import CorpusError, file_format
from slimqwen.text.tables import TextRow, read_rows

Tokens = list[int]

_MOST_FAULTS = 20
"""Faults of own prompts that are named."""

_PROMPT_COLUMNS = ("prompt", "messages", "tools", "output_tokens")


class UsedUpError(CorpusError):
    """A text is too short for the prompts that are cut from it.

    Attributes:
        source: name of the text.
        lacking: number of missing tokens, by the prompts that lack them, such as "24 prompts of 256 tokens".
    """

    def __init__(self, source: str, lacking: Mapping[str, int]) -> None:
        parts = [f"{prompts} lack {tokens:,} tokens" for prompts, tokens in lacking.items()]
        whole = f", {sum(lacking.values()):,} in all" if len(parts) > 1 else ""
        super().__init__(
            f"{source} is used up: {', '.join(parts)}{whole}; add texts or divide long ones, as no two prompts share "
            "one, or ask for fewer or shorter prompts"
        )
        self.source, self.lacking = source, lacking

    def __reduce__(self) -> tuple[type["UsedUpError"], tuple[str, Mapping[str, int]]]:
        return type(self), (self.source, self.lacking)


def documents(source: str, seed: int, root: Path, *, skips_faults: bool = False) -> Iterator[str]:
    """The documents of a workload's text, each once: in file order, beginning at a document that the seed chooses.

    Args:
        source: path of a file of texts, of a .txt file with empty lines between documents; or the name of a text in
            eval/texts.
        root: folder that the path is relative to.
        skips_faults: whether to skip malformed documents instead of raising; only for checks.

    Raises:
        CorpusError: the file cannot be read or is malformed, or a document is a chat or a prompt.
    """
    file = resolve_text(source, root)
    texts: list[str] = []
    try:
        for document in read_documents(file, "paragraphs", goes_on=skips_faults):
            if document.text is None and not document.is_blank and not skips_faults:
                raise CorpusError(
                    f"{document.location}: a chat or a prompt instead of a text; write a text, or render "
                    "chats with `slimqwen recipe corpus`"
                )
            texts.append(document.text or "")
    except CorpusError:
        if not skips_faults:
            raise
    texts = [text.strip() for text in texts if text.strip()]
    start = random.Random(seed).randrange(len(texts)) if texts else 0
    yield from texts[start:] + texts[:start]


class OwnPrompt(BaseModel):
    """One row of the prompts of an own evaluation: a prompt or a chat. Other fields of a request are allowed, not sent.

    Attributes:
        prompt: text to continue; None for a chat.
        messages: messages of a chat in OpenAI's form; None for a text.
        tools: tools of the chat.
        output_tokens: number of tokens to generate; None for the workload's.
    """

    model_config = ConfigDict(
        extra="allow", frozen=True
    )  # rows may be whole requests, of which the rest is not sent

    prompt: str | None = Field(default=None, min_length=1)
    messages: list[Any] | None = Field(default=None, min_length=1)
    tools: Any = None
    output_tokens: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _is_of_one_form(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class PromptCutter:
    """Cuts prompts from a stream of documents; no two prompts share a document.

    Args:
        texts: the documents.
        tokenize: text -> token ids.
        source: name of the text, for errors.

    Attributes:
        documents_used: number of documents used so far.
        tokenize: text -> token ids.
    """

    def __init__(
        self, texts: Iterator[str], tokenize: Callable[[str], Tokens], source: str = "the text"
    ) -> None:
        self._texts = texts
        self._source = source
        self.tokenize = tokenize
        self._known_prompts: set[tuple[int, ...]] = set()
        self.documents_used = 0

    @classmethod
    def for_checkpoint(cls, weights: Path, source: str, seed: int, root: Path) -> "PromptCutter":
        """Make a cutter that reads `documents` with the tokenizer of a checkpoint.

        Args:
            weights: folder of the checkpoint.
            source: path of a file of texts, or the name of a text in eval/texts.
            seed: seed that chooses the document to begin at.
            root: folder that the path is relative to.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
        return cls(
            documents(source, seed, root),
            lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
            source,
        )

    def advance_to(self, documents_used: int, prompts: Iterable[Tokens]) -> None:
        """Continue where another cutter of the same stream stopped: skip its documents, repeat none of its prompts.

        Args:
            documents_used: number of documents that the other cutter used.
            prompts: token ids of its prompts.
        """
        for _ in range(documents_used - self.documents_used):
            next(self._texts, None)
        self.documents_used = documents_used
        self._known_prompts.update(map(tuple, prompts))

    def cut(self, count: int, length: int) -> list[Tokens]:
        """Cut the next `count` prompts of `length` tokens each; all differ from each other and from earlier ones.

        Raises:
            UsedUpError: the text is used up.
        """
        prompts: list[Tokens] = []
        while len(prompts) < count:
            tokens: Tokens = []
            while len(tokens) < length:
                text = next(self._texts, None)
                if text is None:
                    lacking = (count - len(prompts)) * length - len(tokens)
                    raise UsedUpError(self._source, {f"{count} prompts of {length} tokens": lacking})
                self.documents_used += 1
                tokens += self.tokenize(f"{text}\n")
            prompt = tokens[:length]
            if tuple(prompt) not in self._known_prompts:
                self._known_prompts.add(tuple(prompt))
                prompts.append(prompt)
        return prompts


def parse_own_prompts(file: Path) -> list[OwnPrompt]:
    """Read the prompts of an own evaluation: rows of a table, or texts of a JSON list.

    Raises:
        CorpusError: the file cannot be read, a row does not have exactly one of `prompt` and `messages`, or there are
            fewer than two rows; the message names each faulty row, up to 20.
    """
    parsed: list[OwnPrompt] = []
    faults: list[str] = []
    for row in read_rows(file, _PROMPT_COLUMNS):
        try:
            if row.fault is not None:
                raise ValueError(row.fault)
            parsed.append(OwnPrompt.model_validate(_prompt_fields(row)))
        except ValueError as error:  # among them pydantic's
            faults += _unusable_prompt(row.location, error).faults
    found = len(parsed) + len(faults)
    if found < 2:
        faults.append(f"{file}: {found} prompts are too few for an interval; write 2 or more")
    if faults:
        raise _unusable_prompts(file, faults)
    return parsed


def _prompt_fields(row: TextRow) -> object:
    """The fields of an `OwnPrompt`; in a cell of a table, a chat and its tools are JSON, and an empty one says nothing.

    Raises:
        ValueError: a cell is not JSON.
    """
    if isinstance(row.content, str):
        return {"prompt": row.content}
    if file_format(row.file) not in (".csv", ".tsv") or not isinstance(row.content, Mapping):
        return row.content
    cells = {name: value for name, value in row.content.items() if value}
    return {
        name: json.loads(value) if name in ("messages", "tools") else value for name, value in cells.items()
    }


def read_own_prompts(file: Path, weights: Path) -> list[tuple[Tokens, int | None]]:
    """Read the user's own prompts as token ids; the checkpoint's chat template renders messages.

    Returns:
        For each prompt its token ids, and the number of tokens to generate (None where the row has none).

    Raises:
        CorpusError: the file cannot be read, rows are malformed or fewer than two, or chats cannot be rendered; the
            message names each faulty row.
    """
    renderer = ChatRenderer(weights)
    prompts: list[tuple[Tokens, int | None]] = []
    faults: list[str] = []
    for number, own in enumerate(parse_own_prompts(file), start=1):
        try:
            text = own.prompt or renderer.render(own.messages or [], own.tools, to_continue=True)
        # Templates raise exceptions of any type.
        except Exception as error:
            faults += _unusable_prompt(f"{file}, prompt {number}", error).faults
            continue
        tokens = list(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append((tokens, own.output_tokens))
    if faults:
        raise _unusable_prompts(file, faults)
    return prompts


def _unusable_prompt(place: str, error: Exception) -> CorpusError:
    reason = " ".join(str(error).split())[:200]
    return CorpusError(f"{place}: unusable prompt ({reason}); correct or remove it")


def _unusable_prompts(file: Path, faults: Sequence[str]) -> CorpusError:
    total = f"{file}: {len(faults):,} faults in all, of which these are the first {_MOST_FAULTS}"
    return CorpusError(*faults[:_MOST_FAULTS], *([total] if len(faults) > _MOST_FAULTS else []))


def digest(prompts: list[Tokens]) -> str:
    """SHA-256 of the token ids of prompts, in order."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
