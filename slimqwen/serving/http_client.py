"""HTTP clients of measured servers: past the shell's proxy, with the API key, whatever certificate they have."""

import os

import httpx

from slimqwen.vllm_plugin.api_key import authorization


def open_client(timeout_s: float, base_url: str = "") -> httpx.Client:
    """A client of a measured server, to be closed.

    Its certificate is not checked: it names the server for users, and may be signed by itself.
    """
    return httpx.Client(
        base_url=base_url, headers=authorization(), timeout=timeout_s, trust_env=False, verify=False
    )


def open_async_client(timeout_s: float | None) -> httpx.AsyncClient:
    """As `open_client`, for coroutines; without a timeout it waits as long as the server does."""
    return httpx.AsyncClient(headers=authorization(), timeout=timeout_s, trust_env=False, verify=False)


def bypass_proxy(host: str) -> None:
    """Have the clients of libraries, vLLM's benchmark and lm-eval, reach a host without the shell's proxy.

    They read the variable when they send a request, in this process and in those that it starts.
    """
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if host not in excepted.split(","):
        # Some read one spelling, some the other.
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{excepted},{host}".lstrip(",")
