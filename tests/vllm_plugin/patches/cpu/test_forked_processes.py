"""Only an API server with one OpenMP thread forks; a worker has the threads and CPUs that its executor sets."""

import contextlib
import gc
import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import forked_processes


@pytest.fixture
def api_server(monkeypatch):
    """This process as `slimqwen.vllm_plugin.api_server` is."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(forked_processes, "_allowed", False)
    monkeypatch.setenv("LD_PRELOAD", "/lib/libgomp.so.1")
    forked_processes.allow()
    yield
    forked_processes.set_num_threads(threads)


def test_no_other_process_than_the_api_server_needs_the_fix(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/libgomp.so.1")
    assert not forked_processes.is_needed()


@pytest.mark.usefixtures("api_server")
def test_the_api_server_has_one_openmp_thread_and_needs_it():
    assert torch.get_num_threads() == 1
    assert forked_processes.is_needed()


@pytest.mark.usefixtures("api_server")
@pytest.mark.parametrize("preload", ["", "/lib/libiomp5.so"])
def test_another_openmp_library_leaves_vllms_start_method(monkeypatch, preload):
    monkeypatch.setenv("LD_PRELOAD", preload)
    assert not forked_processes.is_needed()


@pytest.mark.usefixtures("stock_vllm")
def test_vllms_cpu_platform_is_checked_and_then_forks(monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    checked = []

    def check_and_update_config(cls, vllm_config):
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        checked.append(vllm_config)

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
    assert forked_processes.install()
    CpuPlatform.check_and_update_config("the configuration")
    assert checked == ["the configuration"]
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("name", ["engine", "worker"])
def test_an_engine_or_worker_that_ends_searches_nothing_that_it_inherited(monkeypatch, name):
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    def end(pipe):
        gc.unfreeze()
        pipe.send(gc.get_freeze_count())

    monkeypatch.setattr(EngineCoreProc, "run_engine_core", staticmethod(end))
    monkeypatch.setattr(WorkerProc, "worker_main", staticmethod(end))
    assert forked_processes.install()
    run = {"engine": EngineCoreProc.run_engine_core, "worker": WorkerProc.worker_main}[name]
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: (gc.freeze(), run(sender)))
    process.start()
    assert receiver.poll(30)
    assert receiver.recv() > 1000
    process.join()


def _state(pipe):
    forked_processes.set_threads()
    pipe.send((torch.get_num_threads(), os.sched_getaffinity(0)))


@pytest.mark.parametrize("bound", [True, False])
def test_a_worker_has_the_threads_and_cpus_of_its_environment(monkeypatch, bound):
    here = os.sched_getaffinity(0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    if bound:
        monkeypatch.setenv("GOMP_CPU_AFFINITY", str(min(here)))
    else:
        monkeypatch.delenv("GOMP_CPU_AFFINITY", raising=False)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=_state, args=(sender,))
    worker.start()
    assert receiver.poll(30)
    assert receiver.recv() == (3, {min(here)} if bound else here)
    worker.join()


def test_a_forked_engine_lets_go_of_the_port_and_of_nothing_else(tmp_path):
    file = (tmp_path / "file").open("w+")
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()

    def close_and_answer():
        forked_processes.close_listening_sockets()
        file.write("still open")
        file.flush()
        with contextlib.suppress(OSError):
            listener.accept()
            server.sendall(b"accepted")
        server.sendall(b"done")

    engine = multiprocessing.get_context("fork").Process(target=close_and_answer)
    engine.start()
    client.settimeout(30)
    assert client.recv(8) == b"done"
    engine.join()
    assert Path(file.name).read_text() == "still open"
    socket.create_connection(listener.getsockname()).close()  # the API server still listens
    for opened in (file, client, server, listener):
        opened.close()
