"""API key: the header that a client sends, and the paths for which vLLM asks for it."""

import os

_ENGINE_PATHS = ("/invocations", "/generative_scoring", "/scale_elastic_ep", "/tokenize", "/detokenize")
"""Paths that vLLM leaves open although they occupy the engine, or the one thread that tokenizes."""


def authorization() -> dict[str, str]:
    """Header for a server that was started under VLLM_API_KEY; empty without a key."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def guard_engine_paths() -> None:
    """Require the API key on every path that runs the engine, not only under prefixes such as /v1.

    To be removed when `GUARDED_PREFIX` in vllm/entrypoints/serve/middleware/authenticate.py holds these paths.
    """
    from vllm.entrypoints.serve.middleware import authenticate

    missing = [path for path in _ENGINE_PATHS if path not in authenticate.GUARDED_PREFIX]
    authenticate.GUARDED_PREFIX = (*authenticate.GUARDED_PREFIX, *missing)
