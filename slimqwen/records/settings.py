"""Settings of a measurement: the YAML files eval/<folder>/<name>.yaml with prompts, sizes and limits."""

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


class SettingsError(SlimqwenError):
    """A file of eval/ that is missing or cannot be used."""


class Settings(BaseModel):
    """Base of the settings of all measurements.

    Attributes:
        folder: folder of eval/.
        section: top-level key of a file that holds them; empty for the whole file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: ClassVar[str]
    section: ClassVar[str] = ""

    name: str = ""

    @classmethod
    def load(cls, name: str, root: Path) -> Self:
        """Read eval/<folder>/<name>.yaml of a repository.

        Args:
            name: name of the file without its suffix.

        Raises:
            SettingsError: the file or its section is missing, or a field is missing or wrong.
        """
        file = root / "eval" / cls.folder / f"{name}.yaml"
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.yaml"))) or "none"
        return read_yaml(
            file,
            root,
            lambda content: cls._from_content(content, name),
            missing=f"does not exist; choose one of: {known}, or write that file",
        )

    @classmethod
    def _from_content(cls, content: Any, name: str) -> Self:
        if not cls.section:
            return cls.model_validate({**content, "name": name})
        if cls.section not in content:
            raise ValueError(f"no section {cls.section}")
        return cls.model_validate({**content[cls.section], "name": name})

    def file(self, root: Path) -> Path:
        """The file in a repository."""
        return root / "eval" / self.folder / f"{self.name}.yaml"


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
        raise SettingsError(
            f"{location}: {field + ': ' if field else ''}{first['msg']}; correct it"
        ) from None
    except (yaml.YAMLError, TypeError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"{location}: unusable ({' '.join(str(error).split())[:200]}); correct it"
        ) from None
