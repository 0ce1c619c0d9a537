"""Measurement of a fuzz: requests written by hand, then generated ones, by the server's OpenAPI document.

A request may be answered or refused with a reason. A server error that is not known, a lost connection, and a refusal
without a reason are faults; so is a server that no longer serves as before.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from slimqwen.bench import BenchError
from slimqwen.bench.client import unfinished_requests
from slimqwen.bench.fuzz.record import Fault, Fuzz
from slimqwen.bench.fuzz.requests import BODIES, CHOSEN_LOGPROBS, COMPLETIONS, KNOWN, REQUESTS, UNSENDABLE
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port, run_server
from slimqwen.serving.shared_server import ServerLostError, get
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from slimqwen.vllm_plugin.api_key import authorization

ANSWERED, REFUSED, KNOWN_ERROR = "answered", "refused", "known server error"

_TIMEOUT_S = 300

_SHOWN_CHARACTERS = 300
"""Beginning of a body that a fault shows."""

_KNOWN_STATUSES = {
    "POST /v1/systemone": {501},  # a model without a head for this endpoint refuses with 501
}
_JSON = {"Content-Type": "application/json"}


@dataclass
class _Outcomes:
    """Requests by outcome, and the first fault of each place and outcome."""

    requests: Counter[str] = field(default_factory=Counter)
    faults: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, place: str, outcome: str, body: str = "") -> None:
        self.requests[outcome] += 1
        if outcome not in (ANSWERED, REFUSED, KNOWN_ERROR):
            self.faults.setdefault((place, outcome), body[:_SHOWN_CHARACTERS])


def write(
    variant: Variant, examples: int, log: Path, *, command: Sequence[str], progress: Progress = silent
) -> Path:
    """Start a variant's server, send it malformed requests and write the record.

    Args:
        examples: largest number of valid requests, and of invalid ones, for each endpoint.

    Raises:
        BenchError: `examples` is less than 1.
        ServingError: the server did not start.
        ServerLostError: the server ended during the requests.
    """
    if examples < 1:
        raise BenchError(f"{examples} requests for each endpoint test nothing; give 1 or more")
    started = provenance.utc_now()
    with run_server(ServerCommand.resolve(variant, port=free_port()), log=log) as server:
        figures = probe(server.base_url, server.pid, examples, progress)
    record = Fuzz(
        variant=variant.name, provenance=provenance.of_served_variant(variant, command, started), **figures
    )
    return store.write(variant.root / "results", record)


def probe(url: str, pid: int, examples: int, progress: Progress = silent) -> dict[str, Any]:
    """Send malformed requests to a server that is ready, and judge it.

    Returns:
        The fields of `Fuzz` except variant and provenance.

    Raises:
        ServerLostError: the server ended during the requests.
    """
    outcomes = _Outcomes()
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        _send_handwritten(url, outcomes, progress)
        endpoints = _send_generated(url, examples, outcomes, progress)
        harm = tuple(_harm(url, family))
    except (psutil.Error, httpx.HTTPError) as error:
        raise ServerLostError(
            f"the server was lost under malformed requests ({error!r}); its log says why"
        ) from None
    faults = tuple(
        Fault(request=f"{place} {body}".strip(), outcome=outcome)
        for (place, outcome), body in outcomes.faults.items()
    )
    return {
        "examples": examples,
        "endpoints": endpoints,
        "requests": dict(outcomes.requests),
        "faults": faults,
        "harm": harm,
        "verdict": Verdict.FAIL if faults or harm else Verdict.PASS,
    }


def _send_handwritten(url: str, outcomes: _Outcomes, progress: Progress) -> None:
    """Send the requests of `requests`: those that have to be refused, then those that may be answered too."""
    forbidden = [*BODIES.values(), *((COMPLETIONS, _body({"prompt": "The", **body})) for body in UNSENDABLE)]
    known = {(path, _body(body)): status for path, body, status in KNOWN}
    allowed = [*((path, _body(body)) for path, body in (*REQUESTS, *CHOSEN_LOGPROBS)), *known]
    # vLLM and httpx both close connections that are idle for 5 s; a request sent at that moment would be lost.
    limits = httpx.Limits(keepalive_expiry=2)
    with httpx.Client(
        base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits, headers=authorization()
    ) as client:
        for done, (path, content) in enumerate([*forbidden, *allowed]):
            progress("send malformed requests", done, len(forbidden) + len(allowed))
            excerpt = content[:_SHOWN_CHARACTERS].decode(errors="replace")
            try:
                answer = client.post(path, content=content, headers=_JSON)
            except httpx.HTTPError as error:
                outcomes.add(path, f"lost: {type(error).__name__}", excerpt)
                continue
            is_known = answer.status_code == known.get((path, content))
            outcomes.add(path, KNOWN_ERROR if is_known else _outcome(answer, done >= len(forbidden)), excerpt)


def _body(fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _outcome(answer: httpx.Response, may_be_answered: bool) -> str:
    """Answered or refused; any other text names a fault."""
    status = answer.status_code
    if status == httpx.codes.OK:
        return ANSWERED if may_be_answered else "answered, though it makes no sense"
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return str(status)
    with contextlib.suppress(ValueError, AttributeError):
        refusal = answer.json()
        if (refusal.get("error") or {}).get("message") or refusal.get("detail"):
            return REFUSED
    return f"{status} without a reason"


def _send_generated(url: str, examples: int, outcomes: _Outcomes, progress: Progress) -> int:
    """Send each endpoint requests that the OpenAPI document allows, then forbidden ones; the number of endpoints.

    They are the same at every call.
    """
    import schemathesis
    from hypothesis import errors

    document: Any = schemathesis.openapi.from_dict(get(f"{url}/openapi.json").json())
    operations = [result.ok() for result in document.get_all_operations()]
    for done, operation in enumerate(operations):
        progress("draw requests for each endpoint", done, len(operations))
        for mode in schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE:
            # An endpoint without parameters has nothing to get wrong.
            with contextlib.suppress(errors.Unsatisfiable):
                _send_examples(url, operation, mode, examples, outcomes)
    return len(operations)


def _send_examples(url: str, operation: Any, mode: Any, examples: int, outcomes: _Outcomes) -> None:
    from hypothesis import HealthCheck, Phase, given, settings

    known = _KNOWN_STATUSES.get(operation.label, set())
    length = "max_output_tokens" if operation.path == "/v1/responses" else "max_tokens"

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and operation.path.startswith("/v1/"):
            case.body.setdefault(length, 2)  # the default is as many as fit
        try:
            status = case.call(base_url=url, headers=authorization(), timeout=_TIMEOUT_S).status_code
        except Exception as error:  # schemathesis raises errors of requests, urllib3 and its own
            outcomes.add(operation.label, f"lost: {type(error).__name__}", repr(case.body))
            return
        if status in known:
            outcomes.add(operation.label, KNOWN_ERROR)
        elif status >= httpx.codes.INTERNAL_SERVER_ERROR:
            outcomes.add(operation.label, str(status), repr(case.body))
        else:
            outcomes.add(operation.label, REFUSED if status >= httpx.codes.BAD_REQUEST else ANSWERED)

    ask()


def _harm(url: str, family: Sequence[psutil.Process]) -> Iterator[str]:
    """Faults of the server after the requests."""
    if unfinished := unfinished_requests(url):
        yield f"{unfinished:g} requests never ended"
    if any(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in family):
        yield "a process of the server had ended"
    if httpx.get(f"{url}/health", timeout=_TIMEOUT_S, trust_env=False).status_code != httpx.codes.OK:
        yield "it was not ready"
    question = {"prompt": "The", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(
        f"{url}{COMPLETIONS}", json=question, headers=authorization(), timeout=_TIMEOUT_S, trust_env=False
    )
    if answer.status_code != httpx.codes.OK or answer.json()["usage"]["completion_tokens"] != 4:
        yield "it gave no whole answer"
