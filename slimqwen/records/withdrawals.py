"""results/withdrawn.yaml: the records that were removed, each with the reason.

A record is never changed. One that has to go (it contains private data, or was measured wrongly) is removed with its
items by `git rm`, an entry here gives the reason, and a new run makes a new record.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import StringConstraints, TypeAdapter, ValidationError

from slimqwen.errors import SlimqwenError

LOCATION = "results/withdrawn.yaml"

_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
_REASONS = TypeAdapter(dict[_Text, _Text])


def read(root: Path) -> Mapping[str, str]:
    """The reasons of withdrawn records by their location; empty where there is no such file.

    Raises:
        SlimqwenError: the file is no YAML mapping of text to text.
    """
    file = root / LOCATION
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
        return _REASONS.validate_python({} if content is None else content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise SlimqwenError(
            f"{LOCATION} is no mapping of record locations to reasons: {' '.join(str(error).split())}; "
            f"`git checkout HEAD -- {LOCATION}` restores what was committed"
        ) from error


def record_of(location: str) -> str:
    """The location of the record that a file belongs to: the record itself, or the record of items."""
    items = ".items.jsonl"
    return location.removesuffix(items) + ".json" if location.endswith(items) else location
