"""Paths of the texts that recipes and workloads name, and what a recipe may name instead of a path."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from slimqwen.checkpoint.files import sha256, tree_records
from slimqwen.text.files import CorpusError
from slimqwen.variant import repository_root
from slimqwen.workspace import list_files, locate

END_OF_TEXT = "<|endoftext|>"

SELF: Final = Path("self")
"""In a recipe: text that the model itself writes (the stage `write_text`)."""

OWN_TEXT: Final = "own_text.jsonl"
"""The file beside a checkpoint with text that its model wrote."""

_OF_RECIPE = Path()
"""A path that is not said: that of the recipe's `corpus`."""


def resolve_text(name: str | Path, folder: Path) -> Path:
    """The path of a text.

    Args:
        name: a path; or, without slash and suffix, the name of a text in eval/texts of this repository.
        folder: folder that the path is relative to.
    """
    if Path(name).suffix or len(Path(name).parts) > 1:
        return folder / name
    return locate(f"eval/texts/{name}.jsonl", repository_root())


def named_corpus_path(name: str, base: str, root: Path) -> Path:
    """Path of a mix of eval/corpora/ as `slimqwen download --corpus` writes it for the base of a recipe.

    Args:
        name: name of the mix.
        base: the recipe's base: a variant or a hub repository.
        root: the workspace.
    """
    return root / "corpora" / f"{name}-{base.replace('/', '--').replace('@', '--')}.jsonl"


def find_named_corpus(path: Path, root: Path) -> tuple[str, str] | None:
    """Names of the mix and of the base for a path that `named_corpus_path` gives; None for any other path."""
    names = (file.stem for file in list_files("eval/corpora/*.yaml", root))
    for name in sorted(names, key=len, reverse=True):
        base = path.stem.removeprefix(f"{name}-")
        if path == named_corpus_path(name, base, root):
            return name, base
    return None


def _relative_to_recipe(path: Path, info: ValidationInfo) -> Path:
    return Path((info.context or {}).get("folder", Path())) / path


def _text_of_recipe(path: Path, info: ValidationInfo) -> Path:
    context: Mapping[str, Any] = info.context or {}
    if path == _OF_RECIPE:
        path = Path(context.get("corpus", SELF))
    if path == SELF:
        return SELF
    root = repository_root()
    if locate(f"eval/corpora/{path}.yaml", root).is_file():
        return named_corpus_path(str(path), context.get("base", "base"), root)
    return Path(os.path.normpath(resolve_text(path, _relative_to_recipe(Path(), info))))


RecipePath = Annotated[Path, AfterValidator(_relative_to_recipe)]
"""A path relative to the recipe. Exclude such a field: the content key has the content of the file, not its path."""

TextPath = Annotated[Path, AfterValidator(_text_of_recipe), Field(exclude=True)]
"""The path of a text, relative to the recipe; the name of one in eval/corpora or eval/texts; or `SELF`."""


class TextSource(BaseModel):
    """The part of a stage's parameters that says where its text comes from.

    Attributes:
        path: file or folder of texts or chats, relative to the recipe; general or another mix of eval/corpora; the name
            of a text in eval/texts; or self, what the model itself writes. That of the recipe's `corpus` if not said.
        seed: seed of the order of the text's documents.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    path: TextPath = _OF_RECIPE
    seed: int = 0

    @property
    def is_own(self) -> bool:
        """Whether the model itself writes the text."""
        return self.path == SELF

    def file(self, folder: Path) -> Path:
        """The file or folder of the text for a stage whose input is the checkpoint `folder`."""
        return folder / OWN_TEXT if self.is_own else self.path

    def digests(self, name: str) -> dict[str, str]:
        """What `Stage.data` says of this text: {name: SHA-256}; empty if the model itself writes the text.

        Args:
            name: the stage's parameter that names the text, such as corpus.

        Raises:
            CorpusError: the text cannot be read.
        """
        return {} if self.is_own else {name: file_digest(self.path, name)}


def file_digest(path: Path, name: str) -> str:
    """SHA-256 of an input file that a recipe calls `name`; of a folder, that of its files' names and digests.

    Raises:
        CorpusError: the file cannot be read.
    """
    try:
        return text_digest(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror}); put the {name} there") from None


def text_digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and digests of a folder's files; OSError if it cannot be read."""
    if not path.is_dir():
        return sha256(path)
    files = {name: record.sha256 for name, record in tree_records(path).items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
