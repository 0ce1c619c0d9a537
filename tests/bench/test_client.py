"""The streaming client: what stays open after it could not be used."""

import asyncio
from types import SimpleNamespace

import pytest

from slimqwen.bench import BenchError
from slimqwen.bench.client import StreamingClient
from slimqwen.host_load import Watch
from slimqwen.serving.server import free_port


def test_a_server_that_does_not_answer_is_one_line_and_leaves_nothing_open(tmp_path):
    server = SimpleNamespace(
        base_url=f"http://127.0.0.1:{free_port()}", model="default", log=tmp_path / "vllm.log"
    )
    client = StreamingClient(server, Watch())
    with pytest.raises(BenchError, match=r"did not answer .+; its log: "), client:
        raise AssertionError("the block must not begin")
    assert client._session.closed
    with pytest.raises(RuntimeError, match="closed"):
        client._runner.run(asyncio.sleep(0))
