"""config.env: KEY=value lines (shell quoting, `#` comments), inheritance by BASE, and the keys that are slimqwen's own.

BASE=<variant> inherits that variant's lines; a later key overrides, `KEY=` unsets. Keys that are flags or environment
variables of vLLM are interpreted by `slimqwen.serving.flags`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dotenv.parser import parse_stream

from slimqwen.errors import SlimqwenError, suggest_name
from slimqwen.workspace import list_files, locate, repository_root

OWN_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "BASE": "variant whose config.env this one inherits",
        "SOURCE": "owner/name of the hub repository, or owner/name/file.gguf, that weights/<this variant> is a copy of",
        "REVISION": "commit of SOURCE that weights/<this variant> is a copy of, 40 hexadecimal digits",
        "PLATFORM": "cuda for a variant that only a GPU can serve; unset: the platform of this machine",
        "EVALUATION": "suite and gate limits of the variant, by their name in eval/",
        "REQUIRE_BAKED": "1 for a variant that must not be served without its baked compile cache",
        "REQUIRE_PLAN": "1 for a variant that is served only with a plan, and only if the engine agrees with it",
        "REQUIRE_WARMUP": "1 for a variant whose server stops if its warm-up fails",
        "MAX_BODY_BYTES": "largest accepted request body, bytes",
        "THINKING_TOKEN_BUDGET": "thinking tokens of a request that sets no budget; unset: unlimited",
        "ALLOW_UNSAFE": "1 for a variant that is served in spite of known trouble",
        "ALLOW_OPEN": "1 for a variant that is served to other machines without an API key",
        "ALLOW_REMOTE_CODE": "1 for a variant whose checkpoint brings Python code that vLLM is to run",
    }
)
"""The keys of config.env that are neither a flag of vLLM nor an environment variable."""

_ONLY_VALUE = {
    "PLATFORM": ("cuda", "run on any platform"),
    "REQUIRE_BAKED": ("1", "compile where no cache is baked"),
    "REQUIRE_PLAN": ("1", "serve without a plan, or with an engine that differs from it"),
    "REQUIRE_WARMUP": ("1", "serve cold if the warm-up fails"),
    "ALLOW_UNSAFE": ("1", "refuse settings that are known to kill the server or to give other tokens"),
    "ALLOW_OPEN": ("1", "refuse to serve other machines without VLLM_API_KEY"),
    "ALLOW_REMOTE_CODE": ("1", "refuse --trust-remote-code"),
}
"""Key -> the only value it may have, and what an unset key does."""

_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]")
_LEAST_VALUE = {"MAX_BODY_BYTES": 1, "THINKING_TOKEN_BUDGET": 0}


class ConfigError(SlimqwenError):
    """A variant that does not exist, or a config.env or measurements.json that cannot be used."""


@dataclass(frozen=True)
class Setting:
    """One line of a config.env, with its location for error messages."""

    key: str
    value: str
    file: Path
    line: int

    @property
    def location(self) -> str:
        """`experiments/<variant>/config.env:<line>`, the same wherever the repository is."""
        return f"experiments/{self.file.parent.name}/{self.file.name}:{self.line}"


def config_env(name: str, root: Path) -> Path:
    """experiments/<name>/config.env of the workspace, else of the installation."""
    return locate(f"experiments/{name}/config.env", root)


def quoted(value: str) -> str:
    """A value as text for a line of config.env, in quotes if it would be read differently without."""
    if re.fullmatch(r"[\w./:@+,=~-]*", value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def local_names(root: Path) -> list[str]:
    """Sorted names of the variants that have a folder in the workspace: own ones, and shipped ones measured here."""
    return [name for name in names(root) if (root / "experiments" / name).is_dir()]


def names(root: Path | None = None) -> list[str]:
    """Sorted names of all variants, shipped ones included: every folder of experiments/ with a config.env."""
    return sorted(
        file.parent.name for file in list_files("experiments/*/config.env", root or repository_root())
    )


def inherit(name: str, root: Path) -> tuple[tuple[str, ...], Mapping[str, Setting], tuple[Setting, ...]]:
    """Read the config.env of a variant and of every variant that it inherits from.

    Returns:
        `lineage`, `settings` and `unset` of the `Variant`.

    Raises:
        ConfigError: an unknown variant, a malformed line, a repeated key, a cycle of bases, no VLLM_MODEL, or an
            unusable value of one of slimqwen's own keys.
    """
    chain = _lineage(name, root)
    settings: dict[str, Setting] = {}
    unset: list[Setting] = []
    for lines in reversed(chain.values()):
        for setting in lines.values():
            if setting.key == "BASE":
                continue
            if setting.value:
                settings[setting.key] = setting
            else:
                settings.pop(setting.key, None)
                unset.append(setting)
    if "VLLM_MODEL" not in settings:
        raise ConfigError(
            f"experiments/{name}/config.env: no VLLM_MODEL; add VLLM_MODEL=weights/<folder>, the checkpoint to serve"
        )
    _check_path(settings["VLLM_MODEL"])
    _check_own_keys(settings)
    return tuple(chain), MappingProxyType(settings), tuple(unset)


def read_config_env(file: Path) -> dict[str, Setting]:
    """Read the lines of one config.env by key.

    Raises:
        ConfigError: not UTF-8, a malformed line, a repeated key, or a control character in a value.
    """
    location = f"experiments/{file.parent.name}/{file.name}"
    settings: dict[str, Setting] = {}
    try:
        with file.open(encoding="utf-8") as stream:
            bindings = list(parse_stream(stream))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{location}: not UTF-8 text ({error.reason}); write it as KEY=value lines"
        ) from error
    for binding in bindings:
        # The parser counts the blank and comment lines before a binding as a part of it.
        blank = len(binding.original.string) - len(binding.original.string.lstrip("\n\r\t "))
        line = binding.original.line + binding.original.string[:blank].count("\n")
        if binding.error or (binding.key is not None and binding.value is None):
            raise ConfigError(
                f"{location}:{line}: not a KEY=value line: {binding.original.string.strip()!r}; write KEY=value and "
                "close every quote"
            )
        if binding.key is None:
            continue
        setting = Setting(binding.key, binding.value or "", file, line)
        if _CONTROL_CHARACTER.search(setting.key + setting.value):
            raise ConfigError(
                f"{location}:{line}: {setting.key!r} has a line break or another control character; "
                "write key and value on one line and close the quotes"
            )
        if setting.key in settings:
            raise ConfigError(
                f"{location}:{line}: {setting.key} is already set on line {settings[setting.key].line}; keep one"
            )
        settings[setting.key] = setting
    return settings


def _lineage(name: str, root: Path) -> dict[str, dict[str, Setting]]:
    chain: dict[str, dict[str, Setting]] = {}
    base: Setting | None = None
    while True:
        if name in chain:
            assert base is not None
            cycle = " -> ".join([*chain, name])
            raise ConfigError(f"{base.location}: BASE forms a cycle: {cycle}; change one BASE")
        if name not in names(root):
            raise ConfigError(_unknown_variant(name, base, root))
        chain[name] = read_config_env(config_env(name, root))
        base = chain[name].get("BASE")
        if base is None or not base.value:
            return chain
        name = base.value


def _unknown_variant(name: str, base: Setting | None, root: Path) -> str:
    hint = suggest_name(name, names(root), "`slimqwen variant list` shows them all")
    location = f"{base.location}: BASE={name}: " if base else ""
    return f"{location}there is no variant {name!r} under experiments/; {hint}"


def read_token_count(text: str) -> int:
    """Read a number of tokens as vLLM's parser does: 4096, 4k (4,000), 4K (4,096), 1.5k; -1 for "auto".

    It repeats `human_readable_int_or_auto` of vllm/utils/argparse_utils.py, whose import takes seconds.

    Raises:
        ValueError: vLLM would refuse it.
    """
    text = text.strip()
    if text.lower() == "auto":
        return -1
    unit = "kmgt".find(text[-1:].lower()) + 1 if text else 0
    if not unit:
        return int(text)
    if not re.fullmatch(r"\d+(\.\d+)?", text[:-1]):
        raise ValueError(f"{text} is not a number")
    return int(float(text[:-1]) * 1000**unit) if text[-1].islower() else int(text[:-1]) * 1024**unit


def _check_own_keys(settings: Mapping[str, Setting]) -> None:
    for key, (value, default) in _ONLY_VALUE.items():
        setting = settings.get(key)
        if setting is not None and setting.value != value:
            raise ConfigError(
                f"{setting.location}: {key}={setting.value} has no meaning; write {key}={value}, or {key}= to {default}"
            )
    for key, least in _LEAST_VALUE.items():
        setting = settings.get(key)
        if setting is None:
            continue
        text = setting.value
        if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) >= least):
            raise ConfigError(
                f"{setting.location}: {key}={text} is no whole number of at least {least}; write one, or {key}= to "
                "unset it"
            )
    _check_revision(settings)


def _check_path(setting: Setting) -> None:
    """Check that a file system accepts a value as a path: 255 bytes per name, 4,096 with the repository's path."""
    lengths = [len(name.encode()) for name in setting.value.split("/")]
    if max(lengths) > 255 or sum(lengths) > 3000:
        raise ConfigError(f"{setting.location}: {setting.key} is too long for a path; write weights/<folder>")


def _check_revision(settings: Mapping[str, Setting]) -> None:
    revision, source = settings.get("REVISION"), settings.get("SOURCE")
    if revision is None:
        return
    if not re.fullmatch("[0-9a-f]{40}", revision.value):
        raise ConfigError(
            f"{revision.location}: REVISION={revision.value}: not a commit; write the 40 hexadecimal "
            "digits of a commit in lower case"
        )
    # If they are inherited from different files, the commit belongs to another repository.
    if source is None or source.file != revision.file:
        raise ConfigError(
            f"{revision.location}: REVISION has to be a commit of the SOURCE in the same file, and SOURCE "
            f"{f'comes from {source.location}' if source else 'is unset'}; write both there, or REVISION= to unset it"
        )
