import importlib
import logging
import os

import pytest

from slimqwen.vllm_plugin import compile_watch, engine_fixes
from slimqwen.vllm_plugin.engine_fixes import FIXES, mtp_rotary, notify_mailbox, w4a16_linear
from slimqwen.vllm_plugin.engine_fixes.upstream import EngineFixError, is_replaced
from tests.vllm_plugin.engine_fixes.conftest import patched_places


class Gpu:
    """vLLM's platform for GPUs, as far as the plugin asks for it."""

    device_type = "cuda"


def patched_values():
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.sample import sampler

    return (
        os.environ.get("VLLM_CPU_INT4_W4A8"),
        {platform: list(kernels) for platform, kernels in _POSSIBLE_KERNELS.items()},
        dict(MODELS_CONFIG_MAP),
        sampler.batched_count_greater_than,
        causal_conv1d.F,
        gdn_attention.F,
        *(vars(owner)[name] for owner, name in patched_places()),
    )


@pytest.fixture
def needed(monkeypatch):
    """Every fix needed, whatever the machine of the test has."""
    for name in FIXES:
        fix = importlib.import_module(f"{engine_fixes.__name__}.{name}")
        monkeypatch.setattr(fix, "is_needed", lambda: True, raising=False)


@pytest.mark.usefixtures("stock_vllm", "needed")
def test_a_gpu_gets_the_fixes_of_schedule_and_messages_and_no_other(monkeypatch, caplog):
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr("vllm.platforms.current_platform", Gpu)
    caplog.set_level(logging.INFO, "slimqwen")
    before = patched_values()
    engine_fixes.register()
    changed = [was for was, now in zip(before, patched_values(), strict=True) if was != now]
    assert is_replaced(Scheduler, "_update_after_schedule")
    assert is_replaced(SpinCondition, "record_read")
    assert len(changed) == 2
    assert [record.args[0] for record in caplog.records] == ["padded_prompts", "notify_mailbox"]


@pytest.mark.usefixtures("stock_vllm", "needed")
def test_register_installs_and_logs_each_fix_once(caplog):
    caplog.set_level(logging.INFO, "slimqwen")
    before = patched_values()
    engine_fixes.register()
    after = patched_values()
    assert all(was != now for was, now in zip(before, after, strict=True))
    assert [record.getMessage() for record in caplog.records] == [
        f"Engine fix {name} is active: {importlib.import_module(f'{engine_fixes.__name__}.{name}').WHY}"
        for name in FIXES
    ]
    caplog.clear()
    engine_fixes.register()
    assert patched_values() == after
    assert not caplog.records


@pytest.mark.usefixtures("stock_vllm")
def test_register_leaves_out_a_fix_that_the_machine_does_not_need(monkeypatch):
    monkeypatch.setattr(w4a16_linear, "is_needed", lambda: False)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.platforms.interface import PlatformEnum
    from vllm.utils import cpu_triton_utils

    kernels = [kernel.__name__ for kernel in _POSSIBLE_KERNELS[PlatformEnum.CPU]]
    engine_fixes.register()
    assert kernels == [kernel.__name__ for kernel in _POSSIBLE_KERNELS[PlatformEnum.CPU][:-1]]
    assert not is_replaced(cpu_triton_utils, "_expand_kernel_impl")


@pytest.mark.usefixtures("stock_vllm", "needed")
@pytest.mark.parametrize(
    ("version", "is_installed"), [("0.32.9+cpu", True), ("0.33.0", False), ("0.34.1+cpu", False)]
)
def test_a_fix_is_left_out_from_the_version_on_that_has_not_its_fault(
    monkeypatch, caplog, version, is_installed
):
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setattr(engine_fixes, "FIXES", {"notify_mailbox": ("cpu",)})
    caplog.set_level(logging.INFO, "slimqwen")
    for _ in range(2):
        engine_fixes.register()
    assert is_replaced(SpinCondition, "record_read") == is_installed
    assert [record.getMessage() for record in caplog.records] == [
        f"Engine fix notify_mailbox is active: {notify_mailbox.WHY}"
        if is_installed
        else f"Engine fix notify_mailbox is not needed any more: vLLM {version} does not have the fault"
    ]


@pytest.mark.usefixtures("stock_vllm", "needed")
def test_a_module_that_vllm_has_moved_is_told_as_such(monkeypatch):
    def moved():
        raise ModuleNotFoundError("No module named 'vllm.elsewhere'")

    monkeypatch.setattr(mtp_rotary, "install", moved)
    with pytest.raises(EngineFixError, match=r"mtp_rotary: No module named 'vllm\.elsewhere'.*this is 0\."):
        engine_fixes.register()


def test_vllm_finds_the_plugins():
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    found = load_plugins_by_group(DEFAULT_PLUGINS_GROUP)
    assert found["slimqwen_engine_fixes"] is engine_fixes.register
    assert found["slimqwen_compile_watch"] is compile_watch.register
