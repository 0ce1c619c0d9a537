"""Hundreds of malformed requests to every endpoint. `make test-soak`."""

import pytest

from slimqwen.bench.fuzz import measurement
from tests.serving import real_server

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(3 * 3600)]

EXAMPLES = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with real_server.started(tmp_path_factory.mktemp("soak")) as running:
        yield running


def test_hundreds_of_requests_to_every_endpoint_give_no_server_error_that_is_not_known(server):
    found = measurement.probe(server.url, server.process.pid, EXAMPLES)
    assert (found["faults"], found["harm"]) == ((), ())
