"""The YAML files of eval/ that plans are made and judged by."""

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from slimqwen.errors import SlimqwenError

Content = TypeVar("Content")


def read(root: Path, file: Path, form: type[Content], error: type[SlimqwenError]) -> Content:
    """The content of a file of a repository, checked against its form.

    Raises:
        SlimqwenError: an `error`, if the file is missing, is not YAML, or breaks its schema.
    """
    try:
        content = yaml.safe_load((root / file).read_text(encoding="utf-8"))
        return TypeAdapter(form).validate_python(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as fault:
        reason = " ".join(str(fault).split())
    except ValidationError as fault:
        first = fault.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise error(f"{file}: {reason}; `git checkout {file}` restores it")
