import logging

import pytest

from slimqwen.vllm_plugin import engine_fixes
from slimqwen.vllm_plugin.engine_fixes import (
    aligned_states,
    aot_load,
    forked_processes,
    lone_sequence,
    lone_token,
    model_inspection,
    mtp_rotary,
    notify_mailbox,
    sampling_expansion,
    short_convolution,
    short_drafts,
    synthetic_acceptance,
    w4a16_linear,
    w8a16_linear,
)
from slimqwen.vllm_plugin.engine_fixes.upstream import EngineFixError


class OtherPlatform:
    """A platform of which only one question may be asked."""

    @staticmethod
    def is_cpu():
        return False


def patched_places():
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Saved
    from vllm import _custom_ops
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils import cpu_triton_utils
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    kernels = {platform: list(those) for platform, those in _POSSIBLE_KERNELS.items()}
    return (
        kernels,
        dict(MODELS_CONFIG_MAP),
        cpu_triton_utils._expand_kernel_impl,
        cpu_triton_utils._rejection_greedy_sample_kernel_impl,
        cpu_triton_utils._rejection_random_sample_kernel_impl,
        causal_conv1d.F,
        gdn_attention.F,
        gdn_attention._spec_forward,
        gdn_attention._causal_conv1d_fwd_cpu,
        _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu,
        SpinCondition.record_read,
        MambaSpecDecodeGPUContext.run_fused_precopy,
        MambaSpecDecodeGPUContext.run_fused_postprocess,
        Saved.deserialize_compile_artifacts,
        registry._run_in_subprocess,
        CpuPlatform.check_and_update_config,
        EngineCoreProc.run_engine_core,
        WorkerProc.worker_main,
    )


@pytest.fixture
def needed(monkeypatch):
    """Every fix needed, whatever the machine of the test has."""
    for fix in (
        w4a16_linear, w8a16_linear, mtp_rotary, sampling_expansion, short_convolution, lone_token,
        lone_sequence, short_drafts, aligned_states, notify_mailbox, aot_load, synthetic_acceptance,
        forked_processes, model_inspection,
    ):  # fmt: skip
        monkeypatch.setattr(fix, "reason", lambda: "the test says so")


@pytest.mark.usefixtures("stock_vllm", "needed")
def test_register_does_nothing_where_the_platform_is_not_the_cpu(monkeypatch, caplog):
    monkeypatch.setattr("vllm.platforms.current_platform", OtherPlatform)
    caplog.set_level(logging.INFO, "slimqwen")
    before = patched_places()
    engine_fixes.register()
    assert patched_places() == before
    assert not caplog.records


@pytest.mark.usefixtures("stock_vllm", "needed")
def test_register_installs_and_logs_each_fix_once(caplog):
    caplog.set_level(logging.INFO, "slimqwen")
    before = patched_places()
    engine_fixes.register()
    after = patched_places()
    assert all(was != now for was, now in zip(before, after, strict=True))
    assert [record.getMessage() for record in caplog.records] == [
        f"Engine fix {name} is active: the test says so"
        for name in (
            "forked_processes",
            "model_inspection",
            "w4a16_linear",
            "w8a16_linear",
            "mtp_rotary",
            "sampling_expansion",
            "synthetic_acceptance",
            "short_convolution",
            "lone_token",
            "lone_sequence",
            "short_drafts",
            "aligned_states",
            "notify_mailbox",
            "aot_load",
        )
    ]
    caplog.clear()
    engine_fixes.register()
    assert patched_places() == after
    assert not caplog.records


@pytest.mark.usefixtures("stock_vllm")
def test_register_leaves_out_a_fix_that_the_machine_does_not_need(monkeypatch):
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    from vllm.platforms.interface import PlatformEnum

    kernels, _, expand, *_ = patched_places()
    engine_fixes.register()
    assert kernels[PlatformEnum.CPU] == patched_places()[0][PlatformEnum.CPU][:-1]
    assert patched_places()[2] is expand


@pytest.mark.usefixtures("needed")
def test_a_module_that_vllm_has_moved_is_told_as_such(monkeypatch):
    def moved():
        raise ModuleNotFoundError("No module named 'vllm.elsewhere'")

    monkeypatch.setattr(mtp_rotary, "install", moved)
    with pytest.raises(EngineFixError, match=r"mtp_rotary: No module named 'vllm\.elsewhere'.*this is 0\."):
        engine_fixes.register()


def test_vllm_finds_the_plugin():
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["slimqwen_engine_fixes"] is engine_fixes.register
