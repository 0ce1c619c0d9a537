"""Flags of a config.env, checked by the installed vLLM itself before anything starts.

`VLLM_<FLAG>=value` is `--<flag> value` for every option of vLLM's own parser. A key must equal a whole option string,
although argparse also accepts prefixes of options. The parser's own actions check types and choices, vLLM's config
classes (vllm/config/*.py) check ranges.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from slimqwen import host
from slimqwen.errors import suggest_name
from slimqwen.identity.effects import flag_of
from slimqwen.serving import in_process
from slimqwen.variant import OWN_KEYS, ConfigError, Setting, Variant

_SCHEDULE = "num_speculative_tokens_per_batch_size"
_SECRET = re.compile(r"(API_KEY|ACCESS_KEY|TOKEN|SECRET|PASSWORD)$")
_DEVICE_CHOICE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")

_FIELD_NAMES: Mapping[str, str] = MappingProxyType({"kv_cache_dtype": "cache_dtype"})
"""Flags whose name in the parser differs from the field of vLLM's config class, with that field."""

_OBJECTS: Mapping[str, str | None] = MappingProxyType(
    {
        "speculative-config": "SpeculativeConfig",
        "compilation-config": "CompilationConfig",
        "default-chat-template-kwargs": None,
    }
)
"""Flags whose value is a JSON object, with the class of vllm.config whose fields are its keys."""

_UNFOLLOWED: Mapping[str, Any] = MappingProxyType(
    {
        "headless": False,
        "api-server-count": 1,
        "grpc": False,
        "grpc-port": None,
        "data-parallel-multi-port-external-lb": False,
    }
)
"""Flags that only `vllm serve` follows (entrypoints/cli/serve.py), each with the value that changes nothing."""

_RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
"""A variable that `vllm serve` alone reads, too."""

_OWN_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "config": "write the lines of that file here, each as VLLM_<FLAG>, where they are checked",
        "worker-extension-cls": "remove the line: a server here has an extension of this package's own",
    }
)
"""Flags of which config.env or `serving.command` decides, with what to do instead."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of vLLM as a config.env sets it.

    Attributes:
        name: the option without its dashes, such as `max-num-seqs`.
        value: the value as vLLM's parser reads it: bool, int, float, str, a list, or decoded JSON.
        argv: the words of the command line; empty for a switch that is off.
        setting: the line of the config.env.
    """

    name: str
    value: Any
    argv: tuple[str, ...]
    setting: Setting


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a variant's lines set: flags of vLLM by name, and environment variables for vLLM."""

    flags: Mapping[str, Flag]
    environment: Mapping[str, str]


def resolve(variant: Variant) -> Resolved:
    """Check every line of a variant against the installed vLLM.

    Raises:
        ConfigError: a key is unknown, set twice or a secret, or vLLM's parser or config classes refuse a value.
    """
    for setting in variant.unset:
        _require_known(setting)
    flags: dict[str, Flag] = {}
    environment: dict[str, str] = {}
    for setting in variant.settings.values():
        _require_known(setting)
        if setting.key in OWN_KEYS:
            continue
        if setting.key not in options():
            _check_variable(setting)
            environment[setting.key] = setting.value
            continue
        _refuse_own(setting)
        flag = parse(setting)
        _require_followed(flag)
        if flag.name in flags:
            other = flags[flag.name].setting
            raise ConfigError(
                f"{setting.location}: {setting.key} is the same flag as {other.key} ({other.location}); keep one"
            )
        flags[flag.name] = flag
    _check_port(flags)
    _check_ranges(flags)
    return Resolved(MappingProxyType(flags), MappingProxyType(environment))


@functools.cache
def options() -> Mapping[str, argparse.Action]:
    """The options of vLLM's parser by their config.env key; the first call in a process takes about 15 s."""
    actions: dict[str, argparse.Action] = {}
    for action in _parser()._actions:
        for option in action.option_strings:
            is_negation = isinstance(action, argparse.BooleanOptionalAction) and option.startswith("--no-")
            if option.startswith("--") and option != "--help" and not is_negation:
                actions["VLLM_" + option.removeprefix("--").upper().replace("-", "_")] = action
    return MappingProxyType(actions)


def import_cli_args() -> Any:
    """Import the module of vLLM that makes the parser of a server's command line and checks the parsed values."""
    try:
        from vllm.entrypoints.common import cli_args
    except ImportError:  # until vLLM 0.32
        from vllm.entrypoints.launchers import cli_args
    return cli_args


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with contextlib.ExitStack() as patches:
        if current_platform.is_unspecified():
            # A GPU build that sees no GPU: the config classes need some device, and only defaults depend on which one.
            patches.enter_context(patch.object(type(current_platform), "device_type", "cpu"))
        parser: argparse.ArgumentParser = import_cli_args().make_arg_parser(FlexibleArgumentParser())
    return parser


def _require_known(setting: Setting) -> None:
    key = setting.key
    if _SECRET.search(key):
        raise ConfigError(
            f"{setting.location}: {key} is a secret; export it in the shell that runs `slimqwen serve`, never in a file"
        )
    if key in _DEVICE_CHOICE:
        raise ConfigError(
            f"{setting.location}: {key} chooses GPUs of one machine; export it in the shell that runs `slimqwen serve`"
        )
    import vllm.envs

    known = (*OWN_KEYS, *options(), *vllm.envs.environment_variables)
    if key in known or host.TORCH_VARIABLE.fullmatch(key):
        return
    flags = "`python -m vllm.entrypoints.launchers.api_server.entry --help` lists the flags"
    hint = suggest_name(key, known, flags)
    raise ConfigError(
        f"{setting.location}: {key} is neither a flag nor an environment variable of vLLM; {hint}"
    )


def _refuse_own(setting: Setting) -> None:
    """Refuse a flag whose effect would bypass the checks here, or that a server of this package sets itself."""
    name = flag_of(setting.key)
    if name in _OWN_FLAGS:
        raise ConfigError(
            f"{setting.location}: {setting.key} has no place in a config.env; {_OWN_FLAGS[name]}"
        )


def _require_followed(flag: Flag) -> None:
    """Refuse a flag that vLLM's parser takes, but that a server started by this package would not follow."""
    if flag.name in _UNFOLLOWED and flag.value != _UNFOLLOWED[flag.name]:
        raise _unfollowed(flag.setting)


def _unfollowed(setting: Setting) -> ConfigError:
    return ConfigError(
        f"{setting.location}: {setting.key}={setting.value}: only `vllm serve` follows it, a server here is one API "
        "server with its engines; remove the line (VLLM_DATA_PARALLEL_BACKEND=ray starts engines on other nodes)"
    )


def parse(setting: Setting) -> Flag:
    """Parse one line of a config.env whose key is a flag of vLLM.

    Raises:
        ConfigError: vLLM's parser refuses the value.
    """
    action = options()[setting.key]
    option = next(option for option in action.option_strings if option.startswith("--"))
    name = option.removeprefix("--")
    text = setting.value
    if action.nargs == 0:
        if text not in ("0", "1"):
            raise ConfigError(f"{setting.location}: {setting.key}={text} is neither on nor off; write 1 or 0")
        if isinstance(action, argparse.BooleanOptionalAction):
            argv: tuple[str, ...] = (option if text == "1" else f"--no-{name}",)
        else:
            argv = (option,) if text == "1" else ()
        return Flag(name, text == "1", argv, setting)
    is_json = text[:1] in ("{", "[")
    words = [text]
    if action.nargs in ("+", "*") and not is_json:
        words = [word.strip() for word in text.split(",")]
    value = _decoded_json(setting) if is_json else _parsed_by_vllm(setting, action, [option, *words])
    if name in _OBJECTS:
        _check_object(setting, _OBJECTS[name], value)
    if is_json:
        _parsed_by_vllm(setting, action, [option, *words])
    return Flag(name, value, (option, *words), setting)


def _decoded_json(setting: Setting) -> Any:
    try:
        return json.loads(setting.value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{setting.location}: {setting.key} is not JSON ({error}); correct it") from None


def _parsed_by_vllm(setting: Setting, action: argparse.Action, argv: list[str]) -> Any:
    error_output = io.StringIO()
    try:
        with contextlib.redirect_stderr(error_output):
            return getattr(_parser().parse_args(argv), action.dest)
    except SystemExit:
        lines = error_output.getvalue().strip().splitlines()[-1:] or ["refused"]
        reason = lines[0].rpartition("error: ")[2]
    except Exception as error:
        reason = str(error)
    raise _refusal(setting, reason)


def _check_object(setting: Setting, config_class: str | None, value: Any) -> None:
    """Check that a value is a JSON object or null whose keys are fields of vLLM's config class."""
    from vllm import config

    if value is None:
        return
    if not isinstance(value, dict):
        raise _refusal(setting, 'expected a JSON object such as {"key": 1}')
    if config_class is None:
        return
    owner = getattr(config, config_class)
    fields = owner.__pydantic_fields__
    for key, part in value.items():
        if key not in fields:
            hint = suggest_name(key, fields, f"vllm.config.{config_class} has all of them")
            raise _refusal(setting, f"{key!r} is unknown; {hint}")
        try:
            _validator(owner, key)(value=part)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, (key, *first["loc"][1:])))
            raise _refusal(setting, f"{field}: {first['msg']}") from None
    if value.get(_SCHEDULE) is not None:
        _check_depth_schedule(setting, value)


def _check_depth_schedule(setting: Setting, speculation: Mapping[str, Any]) -> None:
    """Check the draft depths by batch size, which vLLM checks only after it has loaded weights and silently lowers."""
    from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

    try:
        schedule = validate_and_normalize_dynamic_sd_schedule(speculation[_SCHEDULE])
    except ValueError as error:
        raise _refusal(setting, f"{_SCHEDULE}: {error}") from None
    drafts = speculation.get("num_speculative_tokens")
    deepest = max(depth for _, _, depth in schedule)
    if drafts is not None and deepest > drafts:
        raise ConfigError(
            f"{setting.location}: {setting.key}={setting.value}: {_SCHEDULE} asks for {deepest} drafts, but vLLM "
            f"would silently draft {drafts}; raise num_speculative_tokens to {deepest}"
        )


def _check_variable(setting: Setting) -> None:
    """Have vLLM itself parse the value of one of its environment variables."""
    import vllm.envs

    if setting.key == _RUST_FRONTEND and setting.value != "0":
        raise _unfollowed(setting)
    read = vllm.envs.environment_variables.get(setting.key)
    if read is None:
        return
    try:
        with in_process.environment({setting.key: setting.value}):
            read()
    except Exception as error:
        raise _refusal(setting, str(error)) from None


def _check_port(flags: Mapping[str, Flag]) -> None:
    port = flags.get("port")
    if port is not None and not 1 <= port.value <= 65535:
        raise ConfigError(
            f"{port.setting.location}: {port.setting.key}={port.value} is no port; write a number from 1 to 65535"
        )


def _check_ranges(flags: Mapping[str, Flag]) -> None:
    """Validate each value by itself as a field of vLLM's config classes; a start of vLLM validates them together."""
    from vllm import config

    classes = (
        config.ModelConfig,
        config.CacheConfig,
        config.SchedulerConfig,
        config.ParallelConfig,
        config.LoadConfig,
        config.CompilationConfig,
        config.ObservabilityConfig,
    )
    for flag in flags.values():
        name = flag.name.replace("-", "_")
        name = _FIELD_NAMES.get(name, name)
        owner = next((owner for owner in classes if name in owner.__pydantic_fields__), None)
        if owner is None:
            continue
        try:
            _validator(owner, name)(value=flag.value)
        except ValidationError as error:
            raise _refusal(flag.setting, error.errors()[0]["msg"]) from None


@functools.cache
def _validator(owner: Any, name: str) -> type[BaseModel]:
    """A pydantic model of one field of `owner`, because most of vLLM's config classes need a checkpoint to be built."""
    annotation = owner.__pydantic_fields__[name].rebuild_annotation()
    return create_model("Field", __config__=ConfigDict(arbitrary_types_allowed=True), value=(annotation, ...))


def _refusal(setting: Setting, reason: str) -> ConfigError:
    return ConfigError(
        f"{setting.location}: vLLM refuses {setting.key}={setting.value} ({' '.join(reason.split())}); correct or "
        "remove it"
    )
