"""Empty the mailbox of the sockets with which vLLM's processes wake each other, even under steady load.

The engine and its worker read each other's messages in shared memory, and check the socket beside it only after a
second without a message. The socket keeps only the last notification (ZMQ_CONFLATE), but libzmq puts a command of 40
bytes into the socket's mailbox for every notification, and removes it only when the socket is checked. So a server that
is never idle for a second grows by 40 bytes per message in both processes, 57 MiB an hour at 23 small requests per
second. On a CPU every server has a worker process; on a GPU one that shares its model among several GPUs has.

Remove this fix with support for vLLM 0.32: from 0.33 on `record_read` itself polls the socket every two seconds.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "notify_mailbox"

READS = 256
"""Messages between two checks of the socket, which take a microsecond each; so the mailbox has 10 KiB at most."""


def install() -> bool:
    """Make readers of vLLM's shared memory empty their mailbox at every 256th message.

    Returns:
        False if it is installed already in this process.
    """
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def record_and_look(record_read: Callable[[Any], None], self: Any) -> None:
        record_read(self)
        reads = getattr(self, "_reads_since_look", 0) + 1
        if reads >= READS:
            # Asking for events empties the mailbox and leaves the notification for the next reader that waits.
            self.local_notify_socket.getsockopt(zmq.EVENTS)
            reads = 0
        self._reads_since_look = reads

    return replace(_FIX, SpinCondition, "record_read", record_and_look)
