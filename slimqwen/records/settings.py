"""Settings of measurements, read from YAML files eval/<folder>/<name>.yaml: prompts, sizes and limits.

An own evaluation is a folder eval/own/<name>/ with texts, questions and prompts; eval/own.yaml has the settings that
the YAML files of the folder leave out.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.errors import SlimqwenError
from slimqwen.text.tables import find_table, is_text
from slimqwen.variant import Variant
from slimqwen.workspace import list_files, locate, relative
from slimqwen.yaml_file import YamlPart, YamlText, read_yaml

# Settings were once called a plan, which now means a prediction of vLLM; records keep the old name.
SettingsName = Annotated[str, Field(min_length=1, validation_alias="plan", serialization_alias="plan")]
"""Type of a record's field that names the settings of the measurement."""


OWN = Path("eval") / "own"
"""Folder of own evaluations, relative to the repository."""


class SettingsError(SlimqwenError):
    """A settings file of eval/ is missing or cannot be used."""


class Settings(BaseModel):
    """Base class of the settings of all measurements, one subclass for each section or file of eval/.

    Attributes:
        folder: folder of eval/ with the files of these settings.
        section: top-level key of the file under which these settings are; empty for the whole file.
        own_file: name, without suffix, of the file of an own evaluation for these settings; empty for none.
        name: name of the file without its suffix, or of the own evaluation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: ClassVar[str]
    section: ClassVar[str] = ""
    own_file: ClassVar[str] = ""

    name: str = ""

    @classmethod
    def load(cls, name: str, root: Path) -> Self:
        """Read eval/<folder>/<name>.yaml of a repository, or the settings of the own evaluation eval/own/<name>/.

        Args:
            name: name of the file without its suffix, or of the own evaluation's folder.

        Raises:
            SettingsError: the file or its section is missing, or fields are missing or wrong.
        """
        file = locate(f"eval/{cls.folder}/{name}.yaml", root)
        if cls.own_file and not file.is_file() and (root / OWN / name).is_dir():
            return cls._load_own(name, root)
        known = [path.stem for path in list_files(f"eval/{cls.folder}/*.yaml", root)]
        missing = "does not exist"
        if cls.own_file:
            known += sorted(path.name for path in (root / OWN).glob("*/"))
            missing += f", nor does {OWN / name}"
        cure = f"choose one of: {', '.join(known)}, or write it like one of these" if known else "write it"
        return cls._from_text(read_settings(file, root, missing=f"{missing}; {cure}"), name)

    @classmethod
    def _load_own(cls, name: str, root: Path) -> Self:
        """Read the settings of eval/own/<name>/: fields that its file sets, and all others from eval/own.yaml."""
        file, own = locate(f"{OWN}.yaml", root), root / OWN / name / f"{cls.own_file}.yaml"
        text = read_settings(file, root).part(cls.own_file)
        filled = re.sub(r"\bNAME\b", name, json.dumps(text.content))
        if not (own.parent / "texts.jsonl").exists():  # the texts may have another format
            filled = filled.replace("/texts.jsonl", f"/{find_table(own.parent, 'texts', is_text).name}")
        defaults = json.loads(filled)
        settings = cls._from_text(replace(text, content=defaults), name)
        if not own.is_file():
            return settings
        text = read_settings(own, root)
        return cls._from_text(replace(text, content=_replace_fields(defaults, text.content or {})), name)

    @classmethod
    def _from_text(cls, text: YamlText, name: str) -> Self:
        """Make the settings from the text of a file or of a part of eval/own.yaml; subclasses may use other keys."""
        if cls.section:
            text = text.part(cls.section)
        content = text.content
        return text.validate(cls, {**content, "name": name} if isinstance(content, dict) else content)

    @classmethod
    def top_keys(cls) -> dict[str, Any]:
        """The top-level keys of a file that these settings read, each with its type and field for a pydantic model."""
        if cls.section:
            return {cls.section: (cls, ...)}
        own = ((name, field) for name, field in cls.model_fields.items() if name != "name")
        return {field.alias or name: (field.annotation, field) for name, field in own}

    def files(self, root: Path) -> list[Path]:
        """The YAML files that these settings come from; for an own evaluation eval/own.yaml, then its own file."""
        file = locate(f"eval/{self.folder}/{self.name}.yaml", root)
        if file.is_file() or not self.own_file:
            return [file]
        own = root / OWN / self.name / f"{self.own_file}.yaml"
        return [locate(f"{OWN}.yaml", root), *([own] if own.is_file() else [])]

    def inputs(self, root: Path) -> Sequence[Path | YamlPart]:
        """Files that a measurement with these settings reads: a section of the YAML files, and texts that it names."""
        if not self.section:
            return [*self.files(root)]
        own = locate(f"{OWN}.yaml", root)
        parts = [
            YamlPart(file, (self.own_file, self.section) if file == own else (self.section,))
            for file in self.files(root)
        ]
        return [part for part in parts if part.file == own or part.read() is not None]


def _replace_fields(content: Any, replacements: Any) -> Any:
    """`content` with the fields of `replacements`; nested mappings are merged field by field."""
    if not isinstance(content, dict) or not isinstance(replacements, dict):
        return replacements
    replaced = {name: _replace_fields(content.get(name), value) for name, value in replacements.items()}
    return {**content, **replaced}


def find_own_evaluation(variant: Variant) -> Path | None:
    """The folder of the own evaluation that a variant's EVALUATION names; None if it names none."""
    name = variant.settings.get("EVALUATION")
    folder = variant.root / OWN / name.value if name else None
    return folder if folder and folder.is_dir() else None


def read_settings(file: Path, root: Path, *, missing: str = "") -> YamlText:
    """Read a YAML file of the repository `root`; error messages name it relative to `root`.

    Args:
        missing: end of the message for a missing file, with fault and cure; empty if `git checkout` restores it.

    Raises:
        SettingsError: the file is missing, or is not YAML.
    """
    shown = relative(file, root)
    missing = missing or f"is missing; `git checkout {shown}` restores it"
    return read_yaml(file, shown=shown, error=SettingsError, missing=missing)
