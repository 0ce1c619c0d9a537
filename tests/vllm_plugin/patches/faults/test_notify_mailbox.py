import select
import uuid

import pytest
import zmq

from slimqwen.vllm_plugin.patches.faults import notify_mailbox


@pytest.fixture
def pair(stock_vllm, tmp_path):
    """Make a writer and a reader of vLLM's that found each other."""
    from vllm.distributed.device_communicators import shm_broadcast

    context = zmq.Context()

    def make():
        address = f"ipc://{tmp_path}/{uuid.uuid4().hex[:8]}"
        writer = shm_broadcast.SpinCondition(is_reader=False, context=context, notify_address=address)
        reader = shm_broadcast.SpinCondition(
            is_reader=True, context=context, notify_address=address, busy_loop_s=0
        )
        while not reader.local_notify_socket.poll(20):
            writer.notify()
        reader.wait(timeout_ms=1000)
        return writer, reader

    yield make
    context.destroy(linger=0)


def notified(writer, reader):
    """Whether a notification came into the reader's mailbox, where it makes the socket's descriptor readable."""
    # One that comes too soon after another is dropped by the writer's socket, as vLLM wants it.
    for _ in range(500):
        writer.notify()
        if has_post(reader, 0.02):
            return True
    return False


def has_post(reader, seconds=0.0):
    return bool(select.select([reader.local_notify_socket.getsockopt(zmq.FD)], [], [], seconds)[0])


def test_a_busy_reader_empties_its_mailbox(pair):
    assert notify_mailbox.install()
    writer, reader = pair()
    for _ in range(2):
        assert notified(writer, reader)
        for _ in range(notify_mailbox.READS - 1):
            reader.record_read()
        assert has_post(reader)
        reader.record_read()
        assert not has_post(reader)


def test_a_notification_that_came_while_busy_still_wakes_who_waits(pair):
    assert notify_mailbox.install()
    writer, reader = pair()
    assert notified(writer, reader)
    for _ in range(notify_mailbox.READS):
        reader.record_read()
    reader.last_read = 0  # idle for longer than it spins
    assert reader.local_notify_socket.poll(0)
    reader.wait(timeout_ms=10_000)
    assert not reader.local_notify_socket.poll(0)


def test_without_it_the_mailbox_is_not_emptied(pair):
    """What the fix is for: once this fails, vLLM does it."""
    writer, reader = pair()
    assert notified(writer, reader)
    for _ in range(4 * notify_mailbox.READS):
        reader.record_read()
    assert has_post(reader)
