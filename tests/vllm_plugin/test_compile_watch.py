import logging
import os
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch._dynamo.package import SystemInfo
from torch._inductor.codecache import CacheBase

from slimqwen.serving import baked_cache
from slimqwen.vllm_plugin import compile_watch, registration
from slimqwen.vllm_plugin.engine_fixes.upstream import EngineFixError
from slimqwen.vllm_plugin.errors import PluginError


@pytest.fixture
def an_a10g(monkeypatch):
    """A machine with one A10G, as far as torch tells."""
    bus = {"pci_domain_id": 0, "pci_bus_id": 1, "pci_device_id": 0}
    properties = SimpleNamespace(
        name="NVIDIA A10G", major=8, minor=6, total_memory=24 << 30, uuid="ab", **bus
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: properties.name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    # As they come, and put back whatever a test makes of them.
    stock = CacheBase.__dict__["get_system"].__func__
    monkeypatch.setattr(CacheBase, "get_system", staticmethod(getattr(stock, "__wrapped__", stock)))
    monkeypatch.setattr(SystemInfo, "current", classmethod(SystemInfo.__dict__["current"].__func__))
    return properties


def keys():
    return CacheBase.get_system()["hash"], SystemInfo.current().gpu_name


def test_an_a10g_called_a40_has_the_compile_keys_of_an_a40(an_a10g):
    of_an_a10g = keys()
    an_a10g.name = "NVIDIA A40"
    of_an_a40 = keys()
    an_a10g.name = "NVIDIA A10G"
    compile_watch.name_device_in_keys("NVIDIA A40", "8.6")
    assert keys() == of_an_a40
    assert of_an_a40 != of_an_a10g


def test_what_asks_the_device_itself_hears_its_own_name(an_a10g):
    compile_watch.name_device_in_keys("NVIDIA A40", "8.6")
    keys()
    assert torch.cuda.get_device_properties(0).name == "NVIDIA A10G"
    assert torch.cuda.get_device_name() == "NVIDIA A10G"
    assert baked_cache.this_device("cuda") == "NVIDIA A10G"


def test_vllms_memory_plan_is_still_the_devices_own(an_a10g, monkeypatch):
    from vllm.v1.worker import startup_plan

    a_gpu = SimpleNamespace(
        get_device_name=lambda: torch.cuda.get_device_name(0),
        get_device_total_memory=lambda: torch.cuda.get_device_properties(0).total_memory,
        get_device_capability=lambda: (8, 6),
    )
    monkeypatch.setattr(startup_plan, "current_platform", a_gpu)

    def plan():
        return startup_plan.compute_plan_fingerprint(SimpleNamespace(compute_hash=lambda: "same"), 0, 1)

    of_an_a10g = plan()
    compile_watch.name_device_in_keys("NVIDIA A40", "8.6")
    keys()
    assert plan() == of_an_a10g
    an_a10g.name = "NVIDIA A40"
    assert plan() != of_an_a10g


@pytest.mark.usefixtures("an_a10g")
@pytest.mark.parametrize("ask", [lambda: CacheBase.get_system(), lambda: SystemInfo.current()])
def test_another_compute_capability_is_refused_in_words(ask):
    compile_watch.name_device_in_keys("NVIDIA L4", "8.9")
    with pytest.raises(PluginError, match=r"NVIDIA L4 of compute capability 8\.9 and NVIDIA A10G has 8\.6"):
        ask()


@pytest.mark.usefixtures("an_a10g")
def test_the_device_is_not_asked_before_vllm_asks_for_a_key(monkeypatch):
    def too_early(device=None):
        raise AssertionError("a plugin that touches the GPU breaks vLLM's forks")

    monkeypatch.setattr(torch.cuda, "get_device_properties", too_early)
    monkeypatch.setattr(torch.cuda, "current_device", too_early)
    compile_watch.name_device_in_keys("NVIDIA A40", "8.6")


@pytest.mark.usefixtures("an_a10g")
def test_a_torch_without_these_keys_is_refused(monkeypatch):
    monkeypatch.setattr(SystemInfo, "current", lambda: None)
    with pytest.raises(EngineFixError, match=r"compile_watch: .* takes \(\), not \(cls\)"):
        compile_watch.name_device_in_keys("NVIDIA A40", "8.6")


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
    compile_watch.watch(required=True)
    with compilations(announce_start=False):
        pass
    (graph,) = baked_cache.graphs(log.text)
    assert (graph.name, graph.loaded) == ("backbone", True)


def test_a_graph_that_is_not_there_is_compiled_and_said_to_be_with_the_reason(compilations, log):
    compile_watch.watch(required=False)
    with pytest.raises(FileNotFoundError), compilations(announce_start=False):
        raise FileNotFoundError
    with compilations():
        pass
    (graph,) = baked_cache.graphs(log.text)
    assert (graph.name, graph.loaded, graph.why_compiled) == ("backbone", False, "not in the cache")


def test_a_required_graph_that_cannot_be_loaded_is_not_compiled(compilations):
    compile_watch.watch(required=True)
    with pytest.raises(RuntimeError), compilations(announce_start=False):
        raise RuntimeError("Source code has changed\nsince")
    with (
        pytest.raises(PluginError, match=r"no usable graph backbone \(Source code has changed since\)"),
        compilations(),
    ):
        pytest.fail("it compiled")


def test_watching_twice_tells_once(compilations, log):
    compile_watch.watch(required=False)
    compile_watch.watch(required=False)
    with compilations():
        pass
    assert len(baked_cache.graphs(log.text)) == 1


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


def test_a_start_that_would_not_load_the_plugin_is_refused(monkeypatch):
    compile_watch.require_registered({})
    compile_watch.require_registered({"VLLM_PLUGINS": "slimqwen_engine_fixes,slimqwen_compile_watch"})
    with pytest.raises(
        PluginError, match="VLLM_PLUGINS=slimqwen_engine_fixes leaves out slimqwen_compile_watch"
    ):
        compile_watch.require_registered({"VLLM_PLUGINS": "slimqwen_engine_fixes"})
    monkeypatch.setattr(registration, "entry_points", lambda group: ())
    with pytest.raises(PluginError, match="is not installed; `make install` installs it"):
        compile_watch.require_registered({})


def test_without_the_variable_nothing_is_changed(monkeypatch):
    from vllm.compilation import decorators

    monkeypatch.delenv(compile_watch.VARIABLE, raising=False)
    before = decorators.monitor_torch_compile
    compile_watch.register()
    assert decorators.monitor_torch_compile is before


def test_vllm_finds_the_plugin():
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["slimqwen_compile_watch"] is compile_watch.register


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
    for name in ("vllm_log", "leave_checkpoint_path_out_of_key", "watch"):
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


def test_a_flashinfer_without_a_folder_of_prebuilt_libraries_is_refused(flashinfer, tmp_path):
    del flashinfer.FLASHINFER_AOT_DIR
    with pytest.raises(EngineFixError, match="compile_watch: flashinfer has no AOT folder"):
        compile_watch.load_flashinfer_libraries(tmp_path)
