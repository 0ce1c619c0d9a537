"""API key: the header in which a client sends it, and the paths that show the server's state, which need it too.

`patches/serving/engine_paths.py` adds the paths that occupy the engine.
"""

import ipaddress
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

LOOPBACK = "127.0.0.1"
"""Address of a server whose config.env names none; vLLM's own default is every interface."""

_STATE_PATHS = frozenset({"/metrics", "/load", "/version"})
"""Paths that vLLM leaves open without a key and that say what the server does and is."""


def authorization() -> dict[str, str]:
    """HTTP header with the key in VLLM_API_KEY; empty without a key."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_loopback(address: str) -> bool:
    """Whether an address belongs to this machine alone (loopback); host names other than localhost do not count."""
    if address == "localhost":
        return True
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)  # a socket for IPv6 and IPv4 shows ::ffff:127.0.0.1
    return (mapped or parsed).is_loopback


def lacks_key(scope: "Scope") -> bool:
    """Whether a request asks for the server's state from another machine without the key that the server has.

    Clients on this machine, probes and scrapers among them, need none; nor does anyone where the server has no key.
    """
    from starlette.datastructures import Headers  # clients import this module too

    key = os.environ.get("VLLM_API_KEY")
    path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
    client = scope.get("client")
    if not key or path not in _STATE_PATHS or client is None or is_loopback(client[0]):
        return False  # a Unix socket has no client
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    return not (scheme.lower() == "bearer" and secrets.compare_digest(given.encode(), key.encode()))
