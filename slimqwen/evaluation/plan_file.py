"""The plans under eval/: YAML that follows a schema, or one line that says what is wrong with it."""

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from slimqwen.errors import SlimqwenError

Plan = TypeVar("Plan", bound=BaseModel)


def read(
    kind: str, name: str, root: Path, schema: type[Plan], error: type[SlimqwenError], contents: str
) -> Plan:
    """Read eval/<kind>/<name>.yaml.

    Args:
        kind: the folder.
        name: the file's, without its ending.
        root: the repository.
        schema: what the file has to follow.
        error: raised where there is no such file, or a field is missing or wrong.
        contents: what to do about a missing file, such as "write its limits there".
    """
    file = root / "eval" / kind / f"{name}.yaml"
    place = f"eval/{kind}/{name}.yaml"
    try:
        return schema.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.yaml"))) or "none"
        raise error(f"{place} does not exist (there is: {known}); {contents}") from None
    except OSError as cause:
        raise error(f"{place}: {cause.strerror}; {contents}") from None
    except (yaml.YAMLError, ValidationError) as cause:
        raise error(f"{place}: unusable ({' '.join(str(cause).split())[:200]})") from None
