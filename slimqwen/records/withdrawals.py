"""results/withdrawn.yaml: the records that were taken away, each with the reason; the only way for one to be gone.

A record is never changed, and one that should not be there (it names what is nobody's business, or was measured
wrongly) is not mended: `git rm` takes it and its items away, an entry here says so to whoever looks for it, and a new
run is a new record.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import StringConstraints, TypeAdapter, ValidationError

from slimqwen.errors import SlimqwenError

PLACE = "results/withdrawn.yaml"

_Word = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
_REASONS = TypeAdapter(dict[_Word, _Word])
_ITEMS, _RECORD = ".items.jsonl", ".json"


class WithdrawalError(SlimqwenError):
    """results/withdrawn.yaml cannot be used."""


def read(root: Path) -> Mapping[str, str]:
    """The records that were withdrawn: place from the repository's root -> reason. Empty where there is no such file.

    Args:
        root: the repository.

    Raises:
        WithdrawalError: it is no YAML mapping of text to text.
    """
    file = root / PLACE
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
        return _REASONS.validate_python({} if content is None else content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise WithdrawalError(
            f"{PLACE} is no mapping of a record's place to a reason: {' '.join(str(error).split())}; "
            f"`git checkout HEAD -- {PLACE}` restores what was committed"
        ) from error


def record_of(place: str) -> str:
    """The place of the record that a file belongs to: itself, or that of items.

    Args:
        place: of a record or of items, from the repository's root.
    """
    return place.removesuffix(_ITEMS) + _RECORD if place.endswith(_ITEMS) else place
