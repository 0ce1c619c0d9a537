"""The cause of a failure, found in a log beside all that it led to."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from slimqwen.serving.server_log import find_last_cause
from slimqwen.serving.shared_server import server_lost

WORKER = "(Worker pid=3) ERROR 11-25 17:35:35 [multiproc_executor.py:1063] "
ENGINE = "(EngineCore pid=2) ERROR 11-25 17:35:35 [core.py:1512] "
SERVER = "(APIServer pid=1) ERROR 11-25 17:35:35 [async_llm.py:906] "
DEAD_ENGINE = f"""
(APIServer pid=1) WARNING 11-25 17:30:00 [system_utils.py:255] This can cause fd limit errors like `OSError: [Errno 24]`
INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable
{WORKER}Traceback (most recent call last):
{WORKER}    raise RuntimeError("num_accepted_tokens must be in [1, seqlen], got 5")
{WORKER}RuntimeError: num_accepted_tokens must be in [1, seqlen], got 5
{WORKER}Exception raised from check at conv.cpp:12 (most recent call first):
{WORKER}frame #0: c10::Error::Error() + 0x1
{ENGINE}EngineCore encountered a fatal error.
{ENGINE}RuntimeError: Worker failed with error 'num_accepted_tokens must be in [1, seqlen], got 5
{ENGINE}frame #0: c10::Error::Error() + 0x1', please check the stack trace above for the root cause
{SERVER}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
{SERVER}asyncio.exceptions.CancelledError
{SERVER}EngineDiedError: the engine died; the server ends with exit code 1
"""  # noqa: E501
DEAD_IN_WARM_UP = f"""{DEAD_ENGINE}
(APIServer pid=1) ERROR 11-25 17:35:35 [readiness.py:147] WarmUpError: the warm-up failed: 503: {{"message":"the engine died"}}
"""  # noqa: E501
FAILED_START = f"""
{ENGINE}ValueError: No available memory for the cache blocks.
(APIServer pid=1) Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
KILLED_WORKER = f"""
{ENGINE}Worker proc VllmWorker-0 died unexpectedly, shutting down executor.
{SERVER}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DEAD_ENGINE, "RuntimeError: num_accepted_tokens must be in [1, seqlen], got 5"),
        (DEAD_IN_WARM_UP, "RuntimeError: num_accepted_tokens must be in [1, seqlen], got 5"),
        (FAILED_START, "ValueError: No available memory for the cache blocks."),
        (KILLED_WORKER, "Worker proc VllmWorker-0 died unexpectedly, shutting down executor."),
        ("error: vLLM refuses its configuration: no handler", "vLLM refuses its configuration: no handler"),
        (DEAD_ENGINE + "KeyError: 'later'", "KeyError: 'later'"),
        (f"{SERVER}x.EngineDeadError: see above", "x.EngineDeadError: see above"),
        ("INFO:     Started server process [1]\n", None),
        ("", None),
    ],
)
def test_the_last_error_that_no_other_caused_is_the_cause(
    tmp_path: Path, text: str, cause: str | None
) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(text)
    assert find_last_cause(log) == cause


def test_a_lost_server_is_an_error_with_the_cause_by_its_log_else_with_what_was_seen(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(DEAD_ENGINE)
    server = SimpleNamespace(log=log, pid=7)
    error = server_lost(server, "measuring tiny: long", "Service Unavailable")
    assert str(error) == (
        "the server failed while measuring tiny: long: RuntimeError: num_accepted_tokens must be in [1, seqlen], "
        f"got 5; nothing was recorded; read why in its log: {log}"
    )
    log.write_text("")
    assert "long: TimeoutError: 60 s; nothing" in str(
        server_lost(server, "measuring long", TimeoutError("60 s"))
    )
    server.log = None
    assert str(server_lost(server, "reading texts", "it is gone")).endswith(
        "; read why in the log of process 7"
    )
