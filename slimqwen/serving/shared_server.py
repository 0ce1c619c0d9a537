"""A server for a measurement: one that already runs the variant, or one that is started for the measurement."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from slimqwen import checkpoint
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.http_client import open_client
from slimqwen.serving.server import RunningServer, find_running, run_server
from slimqwen.serving.server_log import find_last_cause
from slimqwen.variant import Variant

_TIMEOUT_S = 30
_DEFAULT_MAX_NUM_SEQS = 16  # where the variant leaves --max-num-seqs to vLLM


class ServerLostError(SlimqwenError):
    """A server died or refused requests during a measurement, so there is no result."""


@dataclass(frozen=True)
class SharedServer:
    """A variant and the server that runs it.

    Attributes:
        already_running: whether the server ran before the measurement; it may then have other clients.
        max_model_len: longest prompt and output together that the server accepts, tokens.
    """

    variant: Variant
    server: RunningServer
    already_running: bool
    max_model_len: int

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that the server runs at once, by its flags."""
        return int(self.server.command.flags.get("max-num-seqs", _DEFAULT_MAX_NUM_SEQS))


@contextlib.contextmanager
def share_server(
    variant: Variant, *, port: int | None = None, log: Path, progress: Progress = silent
) -> Iterator[SharedServer]:
    """Use the server on the variant's port if it runs exactly this variant, else start one and stop it afterwards.

    Args:
        port: TCP port instead of the variant's own.
        log: file that receives the output of a server that is started.
        progress: receives (activity, done, total) of the start, and of hashing the checkpoint where it has to be read.

    Raises:
        ServerLostError: the server does not answer.
        SlimqwenError: the server cannot be started (see `slimqwen.serving.server.run_server`).
    """
    command = ServerCommand.resolve(variant, port=port)
    checkpoint.digest(variant.weights, progress)  # now, because the records of what follows state it
    with contextlib.ExitStack() as stack:
        running = find_running(command)
        server = running or stack.enter_context(run_server(command, log=log, progress=progress))
        yield SharedServer(variant, server, running is not None, max_model_len(server.base_url))


def max_model_len(base_url: str) -> int:
    """Longest prompt and output together that a server accepts, tokens.

    Raises:
        ServerLostError: the server does not answer, or is no vLLM.
    """
    try:
        return int(get_response(f"{base_url}/v1/models").json()["data"][0]["max_model_len"])
    except (ValueError, LookupError, TypeError) as error:
        raise ServerLostError(
            f"{base_url}/v1/models states no max_model_len, so it is no vLLM; check which program listens on that port"
        ) from error


def require_healthy(server: RunningServer, activity: str) -> None:
    """Check that a server still answers /health; the message names the `activity`.

    Raises:
        ServerLostError: the server does not answer.
    """
    try:
        get_response(f"{server.base_url}/health")
    except ServerLostError as error:
        raise server_lost(server, activity, error) from error


def server_lost(server: RunningServer, activity: str, seen: BaseException | str) -> ServerLostError:
    """Make the error for a server that failed during an activity; its cause is from the server's log.

    Args:
        activity: what was being done, for the message.
        seen: what the client saw, which is the cause if the log has none.
    """
    if isinstance(seen, BaseException):
        seen = f"{type(seen).__name__}: {seen}"
    cause = find_last_cause(server.log) if server.log else None
    where = f"its log: {server.log}" if server.log else f"the log of process {server.pid}"
    return ServerLostError(
        f"the server failed while {activity}: {cause or seen}; nothing was recorded; read why in {where}"
    )


def get_response(url: str) -> httpx.Response:
    """Send a GET request with the API key to a model server.

    Raises:
        ServerLostError: no answer, or an error status.
    """
    try:
        with open_client(_TIMEOUT_S) as client:
            return client.get(url).raise_for_status()
    except httpx.HTTPError as error:
        raise ServerLostError(
            f"{url}: {error or type(error).__name__}; start the server again, or set VLLM_API_KEY to its key"
        ) from error
