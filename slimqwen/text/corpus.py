"""The text that a recipe names: documents of the embedded tiny world, or those of a file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from slimqwen import tinyworld
from slimqwen.checkpoint.files import sha256
from slimqwen.text.files import CorpusError, TextFile

if TYPE_CHECKING:
    from slimqwen.tinyworld.documents import Document as TinyworldDocument

END_OF_TEXT = "<|endoftext|>"

_TINYWORLD_MODULES = ("documents", "instructions", "prose", "tasks", "tokenizer", "world")
"""The modules of slimqwen.tinyworld that decide its texts."""


def _relative_to_recipe(path: Path, info: ValidationInfo) -> Path:
    return Path((info.context or {}).get("folder", Path())) / path


RecipePath = Annotated[Path, AfterValidator(_relative_to_recipe)]
"""A path relative to the recipe. The file's content enters the content key, not its path: exclude the field."""


class TextSource(BaseModel):
    """The part of a stage's parameters that says where its text comes from.

    Attributes:
        source: tinyworld for documents of the embedded world's training distribution; file for `path`.
        path: .txt or .jsonl file, relative to the recipe.
        seed: seed of the generator.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    source: Literal["tinyworld", "file"] = "tinyworld"
    path: Annotated[RecipePath | None, Field(exclude=True)] = None
    seed: int = 0

    @model_validator(mode="after")
    def _path_goes_with_file(self) -> "TextSource":
        if (self.source == "file") != (self.path is not None):
            raise ValueError("path goes with source: file, and only with it")
        return self


def digests(source: TextSource, name: str = "corpus") -> dict[str, str]:
    """The digest of the file, or of the code that with the seed decides the tiny world's texts.

    Raises:
        CorpusError: the file cannot be read.
    """
    if source.path is not None:
        return {name: file_digest(source.path, name)}
    folder = Path(tinyworld.__file__).parent
    return {
        f"{name}.{tinyworld.__name__}.{module}": sha256(folder / f"{module}.py")
        for module in _TINYWORLD_MODULES
    }


def file_digest(path: Path, name: str) -> str:
    """SHA-256 of an input file that a recipe calls `name`.

    Raises:
        CorpusError: it cannot be read.
    """
    try:
        return sha256(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror}); put the {name} there") from None


def texts(source: TextSource) -> Iterator[str]:
    """The texts of a source in their order; those of the tiny world never end.

    Raises:
        CorpusError: the file is missing or malformed.
    """
    if source.path is None:
        return (document.text for document in tinyworld_documents(source.seed))
    return file_texts(source.path)


def file_texts(path: Path) -> Iterator[str]:
    """The texts of a .txt or .jsonl file, without blank ones.

    Raises:
        CorpusError: the file is missing or malformed, or a document is a chat or a prompt.
    """
    file = TextFile(path)
    for document in file:
        if document.is_blank:
            continue
        if document.text is None:
            raise CorpusError(
                f"{file.location(document.position)}: no text in it, but a chat or a prompt; `slimqwen recipe corpus` "
                "renders chats"
            )
        yield document.text


def tinyworld_documents(seed: int, mix: Mapping[str, float] | None = None) -> "Iterator[TinyworldDocument]":
    """Documents of the embedded world without end, none of them a test item.

    Args:
        seed: seed of the generator.
        mix: share of each kind of document; by default that of training on long sequences.
    """
    # The tokenizer module of the tiny world imports transformers.
    from slimqwen.tinyworld.documents import LONG_MIX, DocumentSampler
    from slimqwen.tinyworld.tasks import left_out_texts
    from slimqwen.tinyworld.world import World

    world = World()
    return DocumentSampler(world, left_out_texts(world), mix or LONG_MIX).stream(seed)
