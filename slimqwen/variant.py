"""A variant: a name -> its config.env with inheritance, its recipe, its weights, its baseline.

config.env is a list of KEY=value lines (shell quoting, `#` comments). BASE=<variant> inherits that variant's
lines; a later key overrides, `KEY=` unsets. What a key means is decided elsewhere: `slimqwen.serving.flags`.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from dotenv.parser import parse_stream

from slimqwen.errors import SlimqwenError

OWN_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "BASE": "the variant whose config.env this one starts from",
        "SOURCE": "owner/name of the hub repository that weights/<this variant> is a copy of",
        "REVISION": "the commit of SOURCE that weights/<this variant> is a copy of, 40 hexadecimal digits",
        "PLATFORM": "cuda for a variant that only a GPU can serve; unset, this machine's platform is taken",
        "EVALUATION": "what the variant is held against: the suite, and the limits of the gates, of that name in eval/",
        "REQUIRE_BAKED": "1 for a variant that is not to be served without its baked compile cache",
        "REQUIRE_WARMUP": "1 for a variant whose server ends where its warm-up fails",
        "MAX_BODY_BYTES": "the largest body of a request that is taken",
        "THINKING_TOKEN_BUDGET": "thinking tokens of a request that names no budget; unset, there is none",
        "ALLOW_UNSAFE": "1 for a variant that is served even in engine modes that were found unsafe",
    }
)
"""The keys of config.env that are neither a flag of vLLM nor an environment variable."""

_COMMITTED = "tiny"


class UnknownVariantError(SlimqwenError):
    """No folder of that name under experiments/."""


class ConfigError(SlimqwenError):
    """A config.env or measurements.json that cannot be used, with its file and line."""


@dataclass(frozen=True)
class Setting:
    """One line of a config.env: where it stands is kept, so that an error can name it."""

    key: str
    value: str
    file: Path
    line: int

    @property
    def place(self) -> str:
        """`experiments/<variant>/config.env:<line>`, however the repository is reached."""
        return f"experiments/{self.file.parent.name}/{self.file.name}:{self.line}"


@dataclass(frozen=True)
class Variant:
    """What experiments/<name>/ says, inheritance applied.

    Attributes:
        name: the folder's name.
        root: the repository that holds experiments/ and weights/.
        lineage: this variant's name, its base's, that one's base's, …
        settings: the effective lines by key, BASE left out.
        unset: the `KEY=` lines met on the way, so that their keys are checked as well.
        hypothesis: what the variant is expected to show, one sentence.
        baseline: the variant it is measured against, None for a baseline.
    """

    name: str
    root: Path
    lineage: tuple[str, ...]
    settings: Mapping[str, Setting]
    unset: tuple[Setting, ...]
    hypothesis: str
    baseline: str | None

    @property
    def folder(self) -> Path:
        """experiments/<name>/."""
        return self.root / "experiments" / self.name

    @property
    def recipe(self) -> Path | None:
        """recipe.yaml, where the variant makes weights of its own."""
        file = self.folder / "recipe.yaml"
        return file if file.is_file() else None

    @property
    def weights(self) -> Path:
        """The checkpoint folder that VLLM_MODEL names, absolute."""
        return self.root / self.settings["VLLM_MODEL"].value

    @property
    def platform(self) -> Literal["cuda"] | None:
        """What PLATFORM asks for: cuda, or None where any platform does."""
        return "cuda" if "PLATFORM" in self.settings else None

    @property
    def evaluation(self) -> str:
        """The suite, and the plans of gates, that its weights are held against where nobody names others.

        Raises:
            ConfigError: EVALUATION is unset: what is asked of one model says nothing about another.
        """
        if "EVALUATION" not in self.settings:
            raise ConfigError(
                f"experiments/{self.name}/config.env: no EVALUATION; write EVALUATION=core, or the name of another "
                "suite in eval/suites/, into it or into the variant that it starts from"
            )
        return self.settings["EVALUATION"].value

    @property
    def require_baked(self) -> bool:
        """Whether REQUIRE_BAKED=1 is set."""
        return "REQUIRE_BAKED" in self.settings

    @property
    def allow_unsafe(self) -> bool:
        """Whether ALLOW_UNSAFE=1 is set."""
        return "ALLOW_UNSAFE" in self.settings


def repository_root() -> Path:
    """The checkout this package is installed from (`make install` installs it editable)."""
    return Path(__file__).resolve().parent.parent


def names(root: Path | None = None) -> list[str]:
    """The variants there are, sorted: every folder of experiments/ with a config.env."""
    root = root or repository_root()
    return sorted(file.parent.name for file in (root / "experiments").glob("*/config.env"))


def load(name: str, root: Path | None = None) -> Variant:
    """Read a variant and everything it inherits.

    Raises:
        UnknownVariantError: no such variant, or a BASE that is none; names the nearest.
        ConfigError: a malformed line, a key twice in one file, a BASE cycle, no VLLM_MODEL, a REVISION that is
            no commit or of another file than its SOURCE, bad measurements.
    """
    root = root or repository_root()
    chain = _lineage(name, root)
    settings: dict[str, Setting] = {}
    unset: list[Setting] = []
    for lines in reversed([lines for _, lines in chain]):
        for setting in lines.values():
            if setting.key == "BASE":
                continue
            if setting.value:
                settings[setting.key] = setting
            else:
                settings.pop(setting.key, None)
                unset.append(setting)
    file = root / "experiments" / name / "config.env"
    if "VLLM_MODEL" not in settings:
        raise ConfigError(
            f"experiments/{name}/{file.name}: no VLLM_MODEL; add VLLM_MODEL=weights/<folder>, the checkpoint to serve"
        )
    for key, only, otherwise in (
        ("PLATFORM", "cuda", "any platform"),
        ("REQUIRE_BAKED", "1", "compiling where nothing is baked"),
        ("REQUIRE_WARMUP", "1", "serving cold where the warm-up fails"),
        ("ALLOW_UNSAFE", "1", "refusing engine modes that were found unsafe"),
    ):
        given = settings.get(key)
        if given is not None and given.value != only:
            raise ConfigError(
                f"{given.place}: {key}={given.value}: write {key}={only}, or {key}= for {otherwise}"
            )
    for key, least in (("MAX_BODY_BYTES", 1), ("THINKING_TOKEN_BUDGET", 0)):
        given = settings.get(key)
        if given is not None and not (
            given.value.isascii() and given.value.isdecimal() and int(given.value) >= least
        ):
            raise ConfigError(
                f"{given.place}: {key}={given.value}: write a whole number, {least} at least, or unset {key}="
            )
    _check_revision(settings)
    hypothesis, baseline = _measurements(name, root)
    return Variant(
        name=name,
        root=root,
        lineage=tuple(ancestor for ancestor, _ in chain),
        settings=MappingProxyType(settings),
        unset=tuple(unset),
        hypothesis=hypothesis,
        baseline=baseline,
    )


def making_command(weights: Path, root: Path) -> str:
    """The command that makes a checkpoint folder, for the error that says it is missing."""
    name = weights.relative_to(root / "weights").parts[0] if weights.is_relative_to(root / "weights") else ""
    folder = root / "experiments" / name
    if name == _COMMITTED:
        return "`git checkout weights/tiny` restores it, `make tiny` trains it anew"
    source = _parse(folder / "config.env").get("SOURCE") if (folder / "config.env").is_file() else None
    if name and source:
        return f"`make download VARIANT={name}` gets it"
    if not name or not (folder / "recipe.yaml").is_file():
        return (
            f"put a checkpoint into {weights.relative_to(root) if weights.is_relative_to(root) else weights}"
        )
    return f"`make recipe VARIANT={name}` makes it"


def _check_revision(settings: Mapping[str, Setting]) -> None:
    revision, source = settings.get("REVISION"), settings.get("SOURCE")
    if revision is None:
        return
    if not re.fullmatch("[0-9a-f]{40}", revision.value):
        raise ConfigError(
            f"{revision.place}: REVISION={revision.value}: no commit; write its 40 hexadecimal digits in lower case"
        )
    # Inherited apart from each other, the commit would be looked for in another repository.
    if source is None or source.file != revision.file:
        raise ConfigError(
            f"{revision.place}: REVISION is the commit of a SOURCE in the same file, and "
            f"{f'SOURCE comes from {source.place}' if source else 'there is none'}; write both, or unset REVISION="
        )


def _lineage(name: str, root: Path) -> list[tuple[str, dict[str, Setting]]]:
    chain: list[tuple[str, dict[str, Setting]]] = []
    asked_by: Setting | None = None
    while True:
        if any(name == seen for seen, _ in chain):
            assert asked_by is not None
            path = " -> ".join([*(seen for seen, _ in chain), name])
            raise ConfigError(
                f"{asked_by.place}: BASE goes in a circle: {path}; let one of them name another base"
            )
        file = root / "experiments" / name / "config.env"
        if not file.is_file():
            raise UnknownVariantError(_unknown(name, asked_by, root))
        lines = _parse(file)
        chain.append((name, lines))
        asked_by = lines.get("BASE")
        if asked_by is None or not asked_by.value:
            return chain
        name = asked_by.value


def _unknown(name: str, asked_by: Setting | None, root: Path) -> str:
    known = names(root)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`make variants` lists them"
    where = f"{asked_by.place}: BASE={name}: " if asked_by else ""
    return f"{where}there is no variant {name!r} under experiments/; {hint}"


def _parse(file: Path) -> dict[str, Setting]:
    place = f"experiments/{file.parent.name}/{file.name}"
    lines: dict[str, Setting] = {}
    try:
        stream = file.open(encoding="utf-8")
        with stream:
            bindings = list(parse_stream(stream))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 text ({error.reason}); write it as KEY=value lines") from error
    for binding in bindings:
        # The parser counts the blank and comment lines before a binding as a part of it.
        blank = len(binding.original.string) - len(binding.original.string.lstrip("\n\r\t "))
        line = binding.original.line + binding.original.string[:blank].count("\n")
        if binding.error or (binding.key is not None and binding.value is None):
            raise ConfigError(f"{place}:{line}: not a KEY=value line: {binding.original.string.strip()!r}")
        if binding.key is None:
            continue
        if binding.key in lines:
            raise ConfigError(
                f"{place}:{line}: {binding.key} stands already on line {lines[binding.key].line}; keep one of them"
            )
        lines[binding.key] = Setting(binding.key, binding.value or "", file, line)
    return lines


def _measurements(name: str, root: Path) -> tuple[str, str | None]:
    file = root / "experiments" / name / "measurements.json"
    place = f"experiments/{name}/{file.name}"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return str(content["hypothesis"]), content["baseline"]
    except FileNotFoundError:
        raise ConfigError(f"{place} is missing; write one with hypothesis and baseline") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{place}: unusable ({error!r}); it needs hypothesis and baseline") from error
