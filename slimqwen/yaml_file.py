"""YAML files that people write: reads them with line numbers, and reports faults with file, line and nearest name."""

import hashlib
import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from slimqwen.errors import SlimqwenError, suggest_name

Content = TypeVar("Content")
YamlPath = tuple[int | str, ...]


@dataclass(frozen=True, order=True)
class YamlPart:
    """The part of a YAML file that a measurement reads; its digest ignores the rest of the file, and comments.

    Attributes:
        keys: the keys that lead to the part.
    """

    file: Path
    keys: tuple[str, ...]

    def __str__(self) -> str:
        """The file and the keys, as records name the part."""
        return f"{self.file}#{'.'.join(self.keys)}"

    def read(self) -> Any:
        """The part's content; None if there is none, or the file is missing or not YAML."""
        try:
            content = yaml.safe_load(self.file.read_bytes())
        except (OSError, yaml.YAMLError, ValueError):
            return None
        for key in self.keys:
            content = content.get(key) if isinstance(content, dict) else None
        return content

    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(json.dumps(self.read(), sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class YamlText:
    """The content of a YAML file or of a part of it, with line numbers.

    Attributes:
        file: the file as messages name it.
        content: the content as Python values.
        node: the node of the content, which has the line numbers; None for an empty file.
        error: class of the errors about the file.
    """

    file: Path
    content: Any
    node: yaml.Node | None
    error: type[SlimqwenError]

    def part(self, key: str) -> "YamlText":
        """The part of the text that is the value of a key.

        Raises:
            SlimqwenError: of the class `error`; there is no such key.
        """
        if not isinstance(self.content, dict) or key not in self.content:
            raise self.error(f"{self.place(())}: {key} is missing; add it")
        return YamlText(self.file, self.content[key], self._find((key,))[1], self.error)

    def validate(self, form: type[Content], content: Any) -> Content:
        """Validate content of this text with pydantic, and return it as an object of `form`.

        Args:
            form: the type to validate against, such as a pydantic model or dict[str, int].
            content: the content as Python values, usually `self.content`.

        Raises:
            SlimqwenError: of the class `error`; the message names all faults with their lines.
        """
        try:
            return TypeAdapter(form).validate_python(content)
        except ValidationError as error:
            raise self.error(*self.list_faults(error, (), form)) from None

    def list_faults(self, error: ValidationError, path: YamlPath, form: object) -> list[str]:
        """A line with location and cure for each problem that pydantic found in the value at `path`.

        Args:
            error: the problems.
            path: keys and list indices that lead from the text's top to the value.
            form: type against which the value was validated; its keys are suggested for unknown ones.
        """
        problems = error.errors()
        # A misspelt key is often the reason for a missing one, which is then not reported.
        unknown = {problem["loc"][:-1] for problem in problems if problem["type"] == "extra_forbidden"}
        faults = []
        for problem in problems:
            inner, given = problem["loc"], problem["input"]
            name = ".".join(part for part in inner if isinstance(part, str)) or "the file"
            if problem["type"] == "extra_forbidden":
                fault = (
                    f"unknown key {inner[-1]!r}; {suggest_name(str(inner[-1]), _keys_at(form, inner[:-1]))}"
                )
            elif problem["type"] == "missing":
                if inner[:-1] in unknown:
                    continue
                fault = f"{name} is missing; add it"
            elif given is None:
                fault = f"{name} is not filled in; write a value"
            else:
                is_block = problem["type"] in ("model_type", "dict_type")
                reason = "Input should be keys with values" if is_block else problem["msg"]
                shown = f", here is {given!r}" if isinstance(given, str | int | float) else ""
                fault = f"{name}: {reason.removeprefix('Value error, ')}{shown}"
            faults.append(f"{self.place((*path, *inner))}: {fault}")
        return list(dict.fromkeys(faults))

    def place(self, path: YamlPath) -> str:
        """file:line of the innermost part of `path` that exists in the text."""
        return f"{self.file}:{self._find(path)[0] + 1}"

    def places(self, path: YamlPath) -> dict[str, str]:
        """file:line of the value at `path`, under the name "", and of the keys inside it by their dotted names."""
        places = {"": self.place(path)}
        pending = [("", self._find(path)[1])]
        while pending:
            prefix, node = pending.pop()
            for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
                places[prefix + key.value] = f"{self.file}:{key.start_mark.line + 1}"
                pending.append((f"{prefix}{key.value}.", value))
        return places

    def _find(self, path: YamlPath) -> tuple[int, yaml.Node | None]:
        """Line, counted from 0, and node of the innermost part of `path` that exists."""
        node = self.node
        line = node.start_mark.line if node else 0
        for part in path:
            if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
            elif isinstance(node, yaml.MappingNode):
                pair = next(((key, value) for key, value in node.value if key.value == str(part)), None)
                if pair is not None:
                    line, node = pair[0].start_mark.line, pair[1]
                elif isinstance(part, str):
                    break
                # Any other index is that of the only entry of a list which the reader made of a single value.
        return line, node


def read_yaml(file: Path, *, shown: Path | None = None, error: type[SlimqwenError], missing: str) -> YamlText:
    """Read a YAML file; a key that is written twice is an error.

    Args:
        shown: the file as messages name it; None for its path.
        error: class of the errors about the file.
        missing: fault and cure in the message for a missing file.

    Raises:
        SlimqwenError: of the class `error`; the file is missing, or is not YAML in UTF-8.
    """
    shown = shown or file
    try:
        loader = _UniqueKeysLoader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        return YamlText(shown, loader.construct_document(node) if node else None, node, error)
    except FileNotFoundError:
        raise error(f"{shown} {missing}") from None
    except OSError as fault:
        raise error(f"{shown}: cannot be read ({fault.strerror}); make it readable") from None
    except UnicodeDecodeError as fault:
        raise error(f"{shown}: not UTF-8 ({fault.reason}); save it as UTF-8") from None
    except yaml.MarkedYAMLError as fault:
        line = fault.problem_mark.line + 1 if fault.problem_mark else 1
        raise error(
            f"{shown}:{line}: not usable YAML: {fault.problem or fault.context}; correct that line"
        ) from None
    except (yaml.YAMLError, ValueError) as fault:
        raise error(f"{shown}: not usable YAML: {' '.join(str(fault).split())}; correct it") from None


class _UniqueKeysLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key that is written twice, of which plain YAML would drop the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping; an error if a key is written twice."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # `super` refuses it
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is written twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _keys_at(form: object, path: YamlPath) -> list[str]:
    """The keys that `form`, a type for validation, knows at a path."""
    models = list(_models_in(form))
    for part in path:
        inner = [
            found
            for model in models
            for name, field in model.model_fields.items()
            if part == (field.alias or name)
            for found in _models_in(field.annotation)
        ]
        models = inner or models  # the index or the name of an entry is no field
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models in a type annotation such as `tuple[Model, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
