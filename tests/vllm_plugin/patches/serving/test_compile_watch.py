import logging
import os
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest

from slimqwen.serving import baked_cache
from slimqwen.vllm_plugin.errors import PluginError
from slimqwen.vllm_plugin.patches.serving import compile_watch
from slimqwen.vllm_plugin.patches.upstream import PatchError


@pytest.fixture
def compilations(monkeypatch):
    """vLLM's `monitor_torch_compile` as it comes, whatever an engine of this process made of it."""
    from vllm.compilation import decorators, monitor

    monkeypatch.setattr(decorators, "monitor_torch_compile", monitor.monitor_torch_compile)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(mode=None), compile_debug_dump_path=lambda: None
    )

    @contextmanager
    def seen(**said):
        with decorators.monitor_torch_compile(config, tag="backbone", **said):
            yield

    return seen


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "slimqwen")
    return caplog


def test_a_graph_that_is_loaded_is_said_to_be(compilations, log):
    compile_watch.watch_compilations(required=True)
    with compilations(announce_start=False):
        pass
    (graph,) = baked_cache.read_graphs(log.text)
    assert (graph.name, graph.loaded) == ("backbone", True)


def test_a_graph_that_is_not_there_is_compiled_and_said_to_be_with_the_reason(compilations, log):
    compile_watch.watch_compilations(required=False)
    with pytest.raises(FileNotFoundError), compilations(announce_start=False):
        raise FileNotFoundError
    with compilations():
        pass
    (graph,) = baked_cache.read_graphs(log.text)
    assert (graph.name, graph.loaded, graph.why_compiled) == ("backbone", False, "not in the cache")


def test_a_required_graph_that_cannot_be_loaded_is_not_compiled(compilations):
    compile_watch.watch_compilations(required=True)
    with pytest.raises(RuntimeError), compilations(announce_start=False):
        raise RuntimeError("Source code has changed\nsince")
    with (
        pytest.raises(PluginError, match=r"no usable graph backbone \(Source code has changed since\)"),
        compilations(),
    ):
        pytest.fail("it compiled")


def test_watching_twice_tells_once(compilations, log):
    compile_watch.watch_compilations(required=False)
    compile_watch.watch_compilations(required=False)
    with compilations():
        pass
    assert len(baked_cache.read_graphs(log.text)) == 1


def test_the_compile_key_does_not_depend_on_where_a_checkpoint_lies(monkeypatch, tmp_path):
    from vllm.config import ModelConfig

    from slimqwen import variant

    # As it comes, and put back at the end.
    stock = getattr(ModelConfig.compute_hash, "__wrapped__", ModelConfig.compute_hash)
    monkeypatch.setattr(ModelConfig, "compute_hash", stock)
    here = variant.load("tiny").weights
    (tmp_path / "tiny").symlink_to(here)
    first, second = (ModelConfig(model=str(place), dtype="bfloat16") for place in (here, tmp_path / "tiny"))
    assert first.compute_hash() != second.compute_hash()
    compile_watch.leave_checkpoint_path_out_of_key()
    assert first.compute_hash() == second.compute_hash()
    assert first.model == str(here)
    longer = ModelConfig(model=str(here), dtype="bfloat16", max_model_len=64)
    assert longer.compute_hash() != first.compute_hash()


def test_without_the_variable_nothing_is_changed(monkeypatch):
    from vllm.compilation import decorators

    monkeypatch.delenv(compile_watch.VARIABLE, raising=False)
    before = decorators.monitor_torch_compile
    compile_watch.register()
    assert decorators.monitor_torch_compile is before


@pytest.fixture
def flashinfer(monkeypatch, tmp_path):
    """FlashInfer's module of paths, which a CPU environment has not."""
    env = ModuleType("flashinfer.jit.env")
    env.FLASHINFER_AOT_DIR = tmp_path / "of-the-package"
    jit = ModuleType("flashinfer.jit")
    jit.env = env
    for module in (ModuleType("flashinfer"), jit, env):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return env


@pytest.fixture
def register(monkeypatch):
    """Register the plugin with these wishes, as far as FlashInfer is concerned."""
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    for name in ("vllm_log", "require", "leave_checkpoint_path_out_of_key", "watch_compilations"):
        monkeypatch.setattr(compile_watch, name, MagicMock())

    def register(**wishes):
        monkeypatch.setenv(compile_watch.VARIABLE, compile_watch.CachePolicy(**wishes).model_dump_json())
        compile_watch.register()

    return register


def test_flashinfer_loads_the_libraries_of_the_cache_as_prebuilt_ones(flashinfer, register, tmp_path, log):
    library = tmp_path / "cache" / "sampling" / "sampling.so"
    library.parent.mkdir(parents=True)
    library.touch()
    register(libraries=str(tmp_path / "cache"))
    assert tmp_path / "cache" == flashinfer.FLASHINFER_AOT_DIR
    assert "FlashInfer libraries from the compile cache: sampling" in log.text
    assert "FLASHINFER_DISABLE_JIT" not in os.environ


def test_without_libraries_flashinfer_is_not_even_imported(register, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # an import would fail
    register(libraries=str(tmp_path / "missing"))


def test_where_the_cache_is_required_flashinfer_compiles_nothing(register, monkeypatch, tmp_path):
    register(required=True, libraries=str(tmp_path / "missing"))
    assert os.environ["FLASHINFER_DISABLE_JIT"] == "1"


@pytest.mark.parametrize("kernels", ["", "missing"])
def test_triton_looks_into_its_cache_where_there_is_one_and_its_functions_are_known(
    register, monkeypatch, kernels
):
    looks = MagicMock()
    monkeypatch.setattr(compile_watch.triton_cache, "find_beside_group_file", looks)
    register(kernels=kernels)
    required = compile_watch.require.call_args.args
    assert ("find_beside_group_file" in required) is looks.called is bool(kernels)


def test_a_flashinfer_without_a_folder_of_prebuilt_libraries_is_refused(flashinfer, tmp_path):
    del flashinfer.FLASHINFER_AOT_DIR
    with pytest.raises(PatchError, match=r"compile_watch\.py .*flashinfer has no AOT folder"):
        compile_watch.load_flashinfer_libraries(tmp_path)
