"""Requests to an application in this process."""

import asyncio
from typing import Any

import httpx


def request(app: Any, method: str, path: str, *, raises: bool = True, **content: Any) -> httpx.Response:
    """What an application answers.

    Args:
        raises: whether what the application raises is raised here; otherwise it is status 500.
        content: as for httpx: json, content, headers.
    """

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=raises)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **content)

    return asyncio.run(answer())
