"""A server to measure: one that already runs the variant, or one started for the measurement alone."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent
from slimqwen.serving import launch
from slimqwen.variant import Variant

_ANSWER_TIMEOUT_S = 30
_REQUESTS_AT_ONCE = 16  # where the variant leaves --max-num-seqs to vLLM


class ServerLostError(SlimqwenError):
    """The server died or refused requests while it was measured: there is no result."""


@dataclass(frozen=True)
class Served:
    """A variant and the server that runs it.

    Attributes:
        variant: what is served.
        server: where it answers, and the command it runs.
        found: it was already running, so what else it does meanwhile is unknown.
        max_model_len: tokens that it takes, prompt and output together; its own answer.
    """

    variant: Variant
    server: launch.RunningServer
    found: bool
    max_model_len: int

    @property
    def max_num_seqs(self) -> int:
        """Requests that the server works on at once, as far as its flags say."""
        return int(self.server.command.flags.get("max-num-seqs", _REQUESTS_AT_ONCE))


@contextlib.contextmanager
def serve(
    variant: Variant, *, port: int | None = None, log: Path, progress: Progress = silent
) -> Iterator[Served]:
    """Use the server on the port if it runs exactly this variant, else start one and stop it afterwards.

    Args:
        variant: what to serve.
        port: instead of the variant's own.
        log: what a started server prints.
        progress: told of the start.

    Raises:
        ServerLostError: it does not answer.
        SlimqwenError: what `slimqwen.serving.launch.serving` raises.
    """
    command = launch.resolve(variant, port=port)
    with contextlib.ExitStack() as stack:
        running = launch.find_running(command)
        server = running or stack.enter_context(launch.serving(command, log=log, progress=progress))
        yield Served(variant, server, running is not None, max_model_len(server.base_url))


def max_model_len(base_url: str) -> int:
    """The longest prompt plus output, in tokens, that the server says it takes.

    Raises:
        ServerLostError: it does not say.
    """
    try:
        return int(_get(f"{base_url}/v1/models").json()["data"][0]["max_model_len"])
    except (ValueError, LookupError, TypeError) as error:
        raise ServerLostError(f"{base_url}/v1/models has no max_model_len: is it vLLM?") from error


def require_healthy(base_url: str, doing: str, log: Path) -> None:
    """Check that the server still answers.

    Raises:
        ServerLostError: it does not.
    """
    try:
        _get(f"{base_url}/health")
    except ServerLostError as error:
        raise lost(doing, error, log) from error


def lost(doing: str, cause: BaseException, log: Path) -> ServerLostError:
    """The error for a server that failed in the middle of a measurement."""
    return ServerLostError(
        f"the server failed while {doing} ({type(cause).__name__}: {cause}); nothing was recorded, "
        f"{log.parent.name}/{log.name} and the server's own log say more"
    )


def _get(url: str) -> httpx.Response:
    try:
        # trust_env: a proxy of the shell must not stand between the client and the server it measures.
        response = httpx.get(url, headers=launch.authorization(), timeout=_ANSWER_TIMEOUT_S, trust_env=False)
        return response.raise_for_status()
    except httpx.HTTPError as error:
        raise ServerLostError(f"{url}: {error or type(error).__name__}") from error
