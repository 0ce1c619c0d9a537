"""API key: the header with the key that a client sends, and the paths for which vLLM requires the key."""

import os

_ENGINE_PATHS = ("/invocations", "/generative_scoring", "/scale_elastic_ep", "/tokenize", "/detokenize")
"""Paths that vLLM leaves open without a key although they occupy the engine, or the one thread that tokenizes."""


def authorization() -> dict[str, str]:
    """Header for a server that was started under VLLM_API_KEY; empty without a key."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def guard_engine_paths() -> None:
    """Require the API key on every path that runs the engine, not only under prefixes such as /v1.

    Remove this function when `GUARDED_PREFIX` in vllm/entrypoints/serve/middleware/authenticate.py has these paths.
    """
    from vllm.entrypoints.serve.middleware import authenticate

    missing = [path for path in _ENGINE_PATHS if path not in authenticate.GUARDED_PREFIX]
    authenticate.GUARDED_PREFIX = (*authenticate.GUARDED_PREFIX, *missing)
