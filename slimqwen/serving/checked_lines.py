"""Cache in .cache/flags/ of the results of `slimqwen.serving.flags`, so that unchanged lines are not checked again.

The check of a config.env imports vLLM, which takes most of its time and which a command that only starts a server does
not need otherwise. The name of a cached file is the digest of all inputs of the check; refusals are not cached.
"""

import functools
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimqwen import host
from slimqwen.identity import digest_of
from slimqwen.identity.source import reach
from slimqwen.serving import flags
from slimqwen.serving.flags import Flag, Resolved
from slimqwen.variant import OWN_KEYS, Variant


def resolve(variant: Variant) -> Resolved:
    """Flags and environment variables of a variant's lines, from the cache if the same lines were checked before.

    Raises:
        ConfigError: a key is unknown, set twice or a secret, or vLLM's parser or config classes refuse a value.
    """
    file = variant.root / ".cache" / "flags" / f"{_digest(variant)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # no file, or one that this module did not write
        return _read(json.loads(file.read_bytes()), variant)
    resolved = flags.resolve(variant)
    content = json.dumps(
        {
            "flags": {
                name: [flag.setting.key, flag.value, flag.argv] for name, flag in resolved.flags.items()
            },
            "environment": dict(resolved.environment),
        },
        default=str,
    )
    if _read(json.loads(content), variant) == resolved:  # JSON can represent every value
        with suppress(OSError):  # the folder is not writable, as in an image
            _write(file, content)
    return resolved


def _read(content: Any, variant: Variant) -> Resolved:
    return Resolved(
        MappingProxyType(
            {
                name: Flag(name, value, tuple(argv), variant.settings[key])
                for name, (key, value, argv) in content["flags"].items()
            }
        ),
        MappingProxyType(content["environment"]),
    )


def _write(file: Path, content: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as temporary:
        temporary.write(content)
    try:
        Path(temporary.name).replace(file)
    except OSError:
        Path(temporary.name).unlink()
        raise


def _digest(variant: Variant) -> str:
    """SHA-256 of all inputs of the check: lines, platform and the check itself, as hexadecimal digits."""
    facts = [
        [(each.key, each.value) for each in variant.settings.values() if each.key not in OWN_KEYS],
        [setting.key for setting in variant.unset],
        host.detect(),
        _check(),
    ]
    return digest_of(facts)


@functools.cache
def _check() -> list[object]:
    """What identifies the check itself: its code, and the versions of the packages that this imports."""
    source = reach(f"{flags.__name__}.resolve")
    return [source.digest, source.versions()]
