"""Require the API key on every path that runs the engine, or occupies the one thread that tokenizes.

vLLM asks for the key on paths with a prefix such as /v1 alone (vllm#58144; pull request #58028 would turn that round).
Remove this patch when `GUARDED_PREFIX` in vllm/entrypoints/serve/middleware/authenticate.py has these paths, or every
path that is not named needs the key.
"""

_ENGINE_PATHS = ("/invocations", "/generative_scoring", "/scale_elastic_ep", "/tokenize", "/detokenize")


def guard_engine_paths() -> None:
    """Add `_ENGINE_PATHS` to the paths for which vLLM asks for the API key."""
    from vllm.entrypoints.serve.middleware import authenticate

    missing = [path for path in _ENGINE_PATHS if path not in authenticate.GUARDED_PREFIX]
    authenticate.GUARDED_PREFIX = (*authenticate.GUARDED_PREFIX, *missing)
