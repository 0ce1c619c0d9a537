"""Hundreds of malformed requests to every endpoint. `make test-soak`."""

import psutil
import pytest

from tests.serving import malformed, real_server

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(3 * 3600)]

EXAMPLES = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with real_server.started(tmp_path_factory.mktemp("soak")) as running:
        yield running


def test_hundreds_of_requests_to_every_endpoint_give_no_server_error_that_is_not_known(server):
    assert malformed.fuzz(server.url, EXAMPLES) == {}
    server.wait_for(running=0, waiting=0)
    assert real_server.is_ready(server.url)
    assert all(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in server.family())
