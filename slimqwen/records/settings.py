"""Settings of a measurement: the YAML files eval/<folder>/<name>.yaml with prompts, sizes and limits.

An own evaluation is a folder eval/own/<name>/ with texts, questions and prompts; eval/own.yaml has the settings that
its files leave out.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slimqwen.errors import SlimqwenError

Content = TypeVar("Content")

# The settings were once called a plan, which now is a prediction of vLLM alone; records keep the old name.
SettingsName = Annotated[str, Field(min_length=1, validation_alias="plan", serialization_alias="plan")]
"""The field of a record that names the settings of its measurement."""


OWN = Path("eval") / "own"
"""Folder of own evaluations, relative to the repository."""


class SettingsError(SlimqwenError):
    """A file of eval/ that is missing or cannot be used."""


class Settings(BaseModel):
    """Base of the settings of all measurements.

    Attributes:
        folder: folder of eval/.
        section: top-level key of a file that holds them; empty for the whole file.
        own_file: file of an own evaluation that holds them, without its suffix; empty if they have no such file.
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
            name: name of the file without its suffix, or of the folder.

        Raises:
            SettingsError: the file or its section is missing, or a field is missing or wrong.
        """
        file = root / "eval" / cls.folder / f"{name}.yaml"
        if cls.own_file and not file.is_file() and (root / OWN / name).is_dir():
            return cls._load_own(name, root)
        known = sorted(path.stem for path in file.parent.glob("*.yaml"))
        missing = "does not exist"
        if cls.own_file:
            known += sorted(path.name for path in (root / OWN).glob("*/"))
            missing += f", nor does {OWN / name}"
        cure = f"choose one of: {', '.join(known)}, or write that file" if known else "write it"
        return read_yaml(
            file, root, lambda content: cls._from_content(content, name), missing=f"{missing}; {cure}"
        )

    @classmethod
    def _load_own(cls, name: str, root: Path) -> Self:
        """The settings of eval/own/<name>/: the fields that its own file sets, all others from eval/own.yaml."""
        file, own = root / f"{OWN}.yaml", root / OWN / name / f"{cls.own_file}.yaml"
        missing = f"is missing; `git checkout {OWN}.yaml` restores it"

        def read_defaults(content: Any) -> Any:
            return json.loads(re.sub(r"\bNAME\b", name, json.dumps(content[cls.own_file])))

        defaults = read_yaml(file, root, read_defaults, missing=missing)
        if not own.is_file():
            return read_yaml(file, root, lambda _: cls._from_content(defaults, name), missing=missing)
        return read_yaml(
            own,
            root,
            lambda content: cls._from_content(_replace_fields(defaults, content or {}), name),
            missing="is missing",
        )

    @classmethod
    def _from_content(cls, content: Any, name: str) -> Self:
        if not cls.section:
            return cls.model_validate({**content, "name": name})
        if cls.section not in content:
            raise ValueError(f"no section {cls.section}")
        return cls.model_validate({**content[cls.section], "name": name})

    def file(self, root: Path) -> Path:
        """The YAML file that these settings were read from; eval/own.yaml for an own evaluation without one."""
        file = root / "eval" / self.folder / f"{self.name}.yaml"
        own = root / OWN / self.name / f"{self.own_file}.yaml"
        return file if file.is_file() or not self.own_file else own if own.is_file() else root / f"{OWN}.yaml"


def _replace_fields(content: Any, replacements: Any) -> Any:
    """Content with the fields of replacements, mappings field by field."""
    if not isinstance(content, dict) or not isinstance(replacements, dict):
        return replacements
    replaced = {name: _replace_fields(content.get(name), value) for name, value in replacements.items()}
    return {**content, **replaced}


def read_yaml(file: Path, root: Path, build: Callable[[Any], Content], *, missing: str) -> Content:
    """Read a YAML file.

    Args:
        root: repository; messages name the file relative to it.
        missing: fault and cure in the message for a missing file.

    Raises:
        SettingsError: the file is missing, or `build` cannot use it; one line that names file, field and fault.
    """
    location = file.relative_to(root)
    try:
        return build(yaml.safe_load(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise SettingsError(f"{location} {missing}") from None
    except OSError as error:
        raise SettingsError(f"{location}: {error.strerror}; make it readable") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        fault = f"{field}: {first['msg']}" if field else first["msg"]
        if first["type"] == "extra_forbidden":
            fault = f"unknown key {field}"
        raise SettingsError(f"{location}: {fault}; correct it") from None
    except (yaml.YAMLError, TypeError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"{location}: unusable ({' '.join(str(error).split())[:200]}); correct it"
        ) from None
