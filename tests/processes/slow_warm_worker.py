"""A warm worker without vLLM that is slow to say which process its job has (`python -m` this module <file>)."""

import time
from multiprocessing.connection import Connection
from typing import Any

from slimqwen.processes import warm_worker

_send = Connection.send


def _send_slowly(connection: "Connection[Any, Any]", message: Any) -> None:
    if message[0] == "started":
        time.sleep(0.5)
    _send(connection, message)


if __name__ == "__main__":
    Connection.send = _send_slowly  # type: ignore[method-assign]
    warm_worker._import_engine = lambda: None
    warm_worker.main()
