"""HTTP clients for measured servers: they use no proxy, send the API key and accept any certificate."""

import os

import httpx

from slimqwen.vllm_plugin.api_key import authorization


def open_client(timeout_s: float, base_url: str = "") -> httpx.Client:
    """Open a client of a measured server; the caller closes it.

    The server's certificate is not checked: it is made for another host name than this client uses, or self-signed.
    """
    return httpx.Client(
        base_url=base_url, headers=authorization(), timeout=timeout_s, trust_env=False, verify=False
    )


def open_async_client(
    timeout_s: float | None, base_url: str = "", connections: int = 100
) -> httpx.AsyncClient:
    """Open a client as `open_client` does, for coroutines; with `timeout_s` None it waits without limit.

    Args:
        connections: largest number of requests at a time; further ones wait.
    """
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(
        base_url=base_url,
        headers=authorization(),
        timeout=timeout_s,
        trust_env=False,
        verify=False,
        limits=limits,
    )


def bypass_proxy(host: str) -> None:
    """Set NO_PROXY for a host, so that vLLM's benchmark client and lm-eval reach it without the shell's proxy.

    Both read the variable at each request, in this process and in its child processes.
    """
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if host not in excepted.split(","):
        # Some libraries read one spelling, some the other.
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{excepted},{host}".lstrip(",")
