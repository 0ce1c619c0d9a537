"""Public mixes of calibration text for recipes (eval/corpora/): data sets of the hub, mixed for a recipe's base.

A model must not be quantised or pruned on text that a suite asks about: a document that shares 13 tokens in a row with
an item is left out (`slimqwen.text.overlap`). The manifest names the suites whose data are not here to compare.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from slimqwen import checkpoint
from slimqwen.evals.suites.datasets import MANIFEST, HubDataset, fetch_dataset, is_fetched
from slimqwen.evals.suites.suite import Suite
from slimqwen.models.vocabulary import read_tokenizer
from slimqwen.progress import Progress, silent
from slimqwen.records.settings import Settings
from slimqwen.text import chat_styles
from slimqwen.text.calibration_mix import Public, Source, build_calibration_text
from slimqwen.text.corpus import named_corpus_path
from slimqwen.text.files import CorpusError, file_format, open_bytes
from slimqwen.text.overlap import Overlap
from slimqwen.text.tables import is_table, read_rows
from slimqwen.variant import Variant, making_command
from slimqwen.workspace import list_files, locate, relative

_BYTES_PER_TOKEN = 16
"""Bytes of a part that are read for each token that is taken of it: enough for what duplicates and overlaps cost."""


class Part(BaseModel):
    """A data set in a mix.

    Attributes:
        repository: owner/name on the hub.
        revision: commit of 40 hexadecimal digits; None for the newest commit of the branch main.
        files: paths in the hub's repository, or patterns such as "*/test.parquet".
        licence: licence of the data set, by its card.
        share: share of the mix's tokens.
        fields: the data set's names of fields, with those of `chat_styles.COLUMNS` that they stand for.
        where: allowed values by field: only rows that have one of them are taken; empty for all rows.
        longest: characters of a text that are taken, from its beginning; None for all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    repository: str
    revision: str | None = None
    files: tuple[str, ...]
    licence: str
    share: PositiveFloat
    fields: Mapping[str, str] = {}
    where: Mapping[str, tuple[str, ...]] = {}
    longest: PositiveInt | None = None


class Corpus(Settings):
    """A mix of data sets: eval/corpora/<name>.yaml.

    Attributes:
        tokens: size of the mix, tokens.
        parts: the data sets by name.
    """

    folder: ClassVar[str] = "corpora"

    tokens: PositiveInt
    parts: Mapping[str, Part] = Field(min_length=1)


def fetch_corpus(name: str, base: Variant, progress: Progress = silent) -> list[str]:
    """Fetch the data sets of a mix and mix them for a base, unless that is done already.

    Args:
        name: file of eval/corpora/.
        base: variant whose checkpoint a recipe transforms; its tokenizer counts the tokens.
        progress: receives (activity, done, total).

    Returns:
        A line for each data set, and one for the mix.

    Raises:
        SettingsError: the file of the mix is missing or cannot be used.
        HubError: the hub cannot be reached, or refuses or lacks a data set.
        EvalError: a data set that is here is of another commit, or was changed.
        CorpusError: a data set has no row that can be used.
        MissingCheckpointError, CorruptCheckpointError: the base's checkpoint is missing or damaged.
    """
    root, weights = base.root, base.weights
    corpus = Corpus.load(name, root)
    destination = named_corpus_path(name, base.name, root)
    if destination.is_file():
        return [f"{destination.relative_to(root)} is present; delete it to mix it anew"]
    checkpoint.check_folder(weights, making_command(weights, root))
    command = f"`slimqwen download --corpus {name} --variant {base.name}`"
    lines = []
    for key, part in corpus.parts.items():
        dataset = HubDataset(
            repository=part.repository, revision=part.revision, folder=_folder(name, key), files=part.files
        )
        lines.append(fetch_dataset(dataset, root, progress, command))
    destination.parent.mkdir(exist_ok=True)
    tokenizer = read_tokenizer(weights / "tokenizer.json")
    items, missing = list_item_files(root)
    progress("reading the suites' items", 0, 0)
    known = (text for file in items for text in _list_texts(file))
    overlap = Overlap(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, known)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as scratch:
        sources = [
            Source(key, _spool(part, root / _folder(name, key), corpus.tokens, Path(scratch)), part.share)
            for key, part in corpus.parts.items()
        ]
        facts: dict[str, Any] = {
            "licences": {key: part.licence for key, part in corpus.parts.items()},
            "compared_with": [str(relative(file, root)) for file in items],
            "suites_without_data": missing,
        }
        manifest = build_calibration_text(
            weights,
            sources,
            corpus.tokens,
            0,
            destination,
            progress,
            public=Public(overlap.is_in, facts),
        )
    left = sum(row["overlapping"] for row in manifest["sources"])
    found = f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens of {base.name}"
    line = f"{destination.relative_to(root)}: {found}; {left:,} left out for what they share with items"
    return [*lines, line]


def list_item_files(root: Path) -> tuple[list[Path], list[str]]:
    """List the files with items or texts that judge models, and the names of suites whose data are not here.

    Args:
        root: folder of the workspace or checkout.
    """
    files: set[Path] = set(list_files("eval/texts/*.jsonl", root))
    missing: list[str] = []
    for settings in list_files("eval/suites/*.yaml", root):
        suite = Suite.load(settings.stem, root)
        folders = [root / dataset.folder for dataset in suite.datasets if is_fetched(dataset.folder, root)]
        missing += [settings.stem] if len(folders) < len(suite.datasets) else []
        folders += [locate(suite.tasks_folder, root)] if suite.tasks_folder else []
        files |= {file for folder in folders for file in folder.rglob("*")}
    files |= set((root / "eval" / "own").rglob("*"))
    tables = (file for file in files if file.is_file() and file.name != MANIFEST and is_table(file))
    return sorted(tables), missing


def _folder(name: str, part: str) -> Path:
    return Path("data") / "corpora" / f"{name}-{part.replace(' ', '-')}"


def _spool(part: Part, folder: Path, tokens: int, scratch: Path) -> Path:
    """Write the rows of a part in the fields of `chat_styles`, those that nobody can read left out."""
    destination = scratch / f"{folder.name}.jsonl"
    most = int(_BYTES_PER_TOKEN * tokens * part.share)
    columns = {*chat_styles.COLUMNS, *part.fields, *part.where}
    files = sorted(file for file in folder.rglob("*") if file.name != MANIFEST and is_table(file))
    rows = itertools.chain.from_iterable(read_rows(file, columns) for file in files)
    with destination.open("w", encoding="utf-8") as stream:
        for row in rows:
            if row.fault is not None or not isinstance(row.content, Mapping):
                continue
            if any(str(row.content.get(key)) not in values for key, values in part.where.items()):
                continue
            content = {
                part.fields.get(key, key): value for key, value in row.content.items() if value is not None
            }
            if part.longest and isinstance(content.get("text"), str):
                content["text"] = content["text"][: part.longest]
            try:
                chat_styles.read_content(content)
            except ValueError:
                continue
            stream.write(json.dumps(content, ensure_ascii=False, default=str) + "\n")
            if stream.tell() > most:
                break
    if not destination.stat().st_size:
        raise CorpusError(
            f"{folder} has no usable row; correct `fields` and `where` of this data set in eval/corpora/"
        )
    return destination


def _list_texts(file: Path) -> Iterator[str]:
    """Every text in the rows of a table, at any depth; a .csv or .tsv file whole, whatever its columns are."""
    if file_format(file) in (".csv", ".tsv"):
        with open_bytes(file) as stream:
            yield stream.read().decode(errors="replace")
    else:
        yield from _texts_in([row.content for row in read_rows(file, ())])


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_in(each)
