"""Settings of the limits: which texts, which repeats, and how limits follow from noise."""

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slimqwen.evals import EvalError
from slimqwen.records import store
from slimqwen.records.settings import LimitSettings, Settings
from slimqwen.serving.platform import Platform

_Check = TypeVar("_Check", bound=LimitSettings)


class Repeat(BaseModel):
    """One engine in which the baseline is compared with itself.

    Attributes:
        name: name in tables.
        flags: vLLM's flags that replace the baseline's own, by name without dashes.
        platform: platform that runs it; None for any.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    flags: dict[str, Any]
    platform: Platform | None = None


class TextsSource(BaseModel):
    """The source of texts that the repository does not hold.

    Attributes:
        file: parquet or .jsonl file of a suite's data set, relative to the repository.
        columns: columns whose contents make one text, joined by line ends.
        fidelity_texts: number of texts on which distributions are compared.
        documents: number of texts that prompts are cut from; other rows than the fidelity texts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: Path
    columns: tuple[str, ...] = Field(min_length=1)
    fidelity_texts: int = Field(ge=2)
    documents: int = Field(ge=2)


class LimitsSettings(Settings):
    """eval/limits/<evaluation>.yaml.

    Attributes:
        settings: name of the files in eval/{fidelity,acceptance,engine,length_sweep}/ whose sizes and seeds are used.
        texts: texts that replace those of the fidelity file.
        documents: text that replaces the text from which those files cut prompts.
        texts_from: source from which `texts` and `documents` are made where they are missing.
        noise_factor: limit for unchanged weights, as a multiple of the largest noise of the repeats.
        changed_factor: limit for changed weights, as a multiple of what 4-bit RTN of the MLPs costs.
        group_size: weights of a row that share a scale in that rounding.
        least_share: largest loss of acceptance length that counts as equal, as the share that is left; noise can only
            lower it.
        gap_share: share of positions whose log-probability gap moves by less than near_tie_nats.
        repeats: engines; the others are compared with the first.
        timeout_s: time limit of one repeat, seconds.
    """

    folder: ClassVar[str] = "limits"

    settings: str
    texts: Path | None = None
    documents: str | None = None
    texts_from: TextsSource | None = None
    noise_factor: float = Field(ge=1)
    changed_factor: float = Field(ge=1)
    group_size: int
    least_share: float = Field(gt=0, le=1)
    gap_share: float = Field(gt=0, lt=1)
    repeats: tuple[Repeat, ...] = Field(min_length=5)
    timeout_s: float = Field(gt=0)

    @model_validator(mode="after")
    def _five_repeats_on_any_platform(self) -> Self:
        if sum(repeat.platform is None for repeat in self.repeats) < 5:
            raise ValueError("fewer than five repeats for any platform")
        return self

    def of_check(self, kind: type[_Check], root: Path) -> _Check:
        """Settings of a check with this evaluation's texts and documents; its limits are not used."""
        loaded = kind.load(self.settings, root)
        texts = {"texts": self.texts, "documents": self.documents, "text": self.documents}
        own = {name: value for name, value in texts.items() if value and name in kind.model_fields}
        return loaded.model_copy(update={"name": self.name, **own})


def make_texts(settings: LimitsSettings, root: Path) -> None:
    """Write the texts and documents that the settings make from a data set, where they are missing.

    Rows are taken in the order of their hashes, so that every machine takes the same.

    Raises:
        EvalError: the data set is not fetched, lacks a column or is too small.
    """
    source = settings.texts_from
    if source is None or settings.texts is None or settings.documents is None:
        return
    texts, documents = root / settings.texts, root / settings.documents
    if texts.is_file() and documents.is_file():
        return
    rows = sorted(_rows(source, root), key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    if len(rows) < source.fidelity_texts + source.documents:
        raise EvalError(
            f"{source.file} has {len(rows):,} different texts and eval/limits/{settings.name}.yaml asks for "
            f"{source.fidelity_texts + source.documents:,}; ask for fewer"
        )
    first, others = rows[: source.fidelity_texts], rows[source.fidelity_texts :][: source.documents]
    lines = [json.dumps({"id": f"{n:04}", "text": text}, ensure_ascii=False) for n, text in enumerate(first)]
    for file, content in ((texts, "\n".join(lines)), (documents, "\n\n".join(others))):
        file.parent.mkdir(parents=True, exist_ok=True)
        store.publish(file, f"{content}\n".encode(), replace=True)


def _rows(source: TextsSource, root: Path) -> set[str]:
    """The different texts of a data set, each without empty lines, which separate documents."""
    import pandas  # type: ignore[import-untyped]

    file = root / source.file
    if not file.is_file():
        raise EvalError(f"{source.file} is missing; `make datasets` fetches it")
    try:
        frame = pandas.read_json(file, lines=True) if file.suffix == ".jsonl" else pandas.read_parquet(file)
        columns = [frame[name] for name in source.columns]
    except (KeyError, ValueError, OSError) as error:
        raise EvalError(f"{source.file}: unusable ({error!r}); correct eval/limits/") from None
    joined = ("\n".join(map(_text, cells)) for cells in zip(*columns, strict=True))
    texts = ("\n".join(filter(str.strip, text.splitlines())) for text in joined)
    return {text for text in texts if text}


def _text(cell: Any) -> str:
    """A cell as text; a list of options is one line each."""
    return cell if isinstance(cell, str) else "\n".join(map(str, cell))
