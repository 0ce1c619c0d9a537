import importlib
import logging
import os

import pytest

from slimqwen.vllm_plugin import patches
from slimqwen.vllm_plugin.patches import upstream
from slimqwen.vllm_plugin.patches.cpu import mtp_rotary, w4a16_linear
from slimqwen.vllm_plugin.patches.serving import compile_watch
from slimqwen.vllm_plugin.patches.table import PATCHES
from slimqwen.vllm_plugin.patches.upstream import PatchError, is_replaced
from tests.vllm_plugin.patches.conftest import replaceable, replaced

OF_A_CPU = [
    patch.name for patch in PATCHES.values() if patch.function == "install" and "cpu" in patch.devices
]


class Gpu:
    """vLLM's platform for GPUs, as far as the plugin asks for it."""

    device_type = "cuda"


def code_of(patch):
    return importlib.import_module(f"slimqwen.vllm_plugin.{PATCHES[patch].module}")


def patched_values():
    from vllm import ModelRegistry
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    return (
        os.environ.get("VLLM_CPU_INT4_W4A8"),
        {platform: list(kernels) for platform, kernels in _POSSIBLE_KERNELS.items()},
        dict(MODELS_CONFIG_MAP),
        dict(ModelRegistry.models),
        causal_conv1d.F,
        gdn_attention.F,
        *(vars(owner)[name] for owner, name in replaceable()),
    )


@pytest.fixture
def needed(monkeypatch):
    """Every patch needed, whatever the machine of the test has."""
    for patch in OF_A_CPU:
        monkeypatch.setattr(code_of(patch), "is_needed", lambda: True, raising=False)


@pytest.fixture
def lines(caplog):
    """The lines that the package has logged."""
    caplog.set_level(logging.INFO, "slimqwen")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.usefixtures("stock_vllm", "needed")
def test_a_gpu_gets_the_patches_of_every_device_and_no_other(monkeypatch, lines):
    monkeypatch.setattr("vllm.platforms.current_platform", Gpu)
    patches.register()
    assert replaced() == {"_update_after_schedule", "record_read", "__init__"}
    names = "draft_head_class, padded_prompts, notify_mailbox, embedding_config"
    assert lines() == [f"4 patches of vLLM 0.32.0: {names}"]


@pytest.mark.usefixtures("stock_vllm", "needed")
def test_register_makes_each_patch_once_and_logs_them_in_one_line(lines):
    patches.register()
    made = patched_values()
    patches.register()
    assert patched_values() == made
    assert lines() == [f"{len(OF_A_CPU)} patches of vLLM 0.32.0: {', '.join(OF_A_CPU)}"]


@pytest.mark.usefixtures("stock_vllm")
def test_register_leaves_out_a_patch_that_the_machine_does_not_need(monkeypatch):
    monkeypatch.setattr(w4a16_linear, "is_needed", lambda: False)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.platforms.interface import PlatformEnum

    kernels = [kernel.__name__ for kernel in _POSSIBLE_KERNELS[PlatformEnum.CPU]]
    patches.register()
    assert kernels == [kernel.__name__ for kernel in _POSSIBLE_KERNELS[PlatformEnum.CPU][:-1]]
    assert "_expand_kernel_impl" not in replaced()


def test_a_changed_body_is_refused_with_every_module_to_adapt(stock_vllm, needed, monkeypatch, lines):
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "onednn_mm", lambda dnnl_handler, x, bias: None)
    monkeypatch.delattr(_custom_ops, "create_onednn_mm")
    with pytest.raises(PatchError) as refusal:
        patches.register()
    assert str(refusal.value) == (
        "slimqwen/vllm_plugin/patches/cpu/widened_linears.py was written for vLLM 0.32.0, this is 0.32.0: "
        "vllm._custom_ops:create_onednn_mm is gone; vllm._custom_ops:onednn_mm has another body; adapt "
        "slimqwen/vllm_plugin/patches/cpu/widened_linears.py, set ALLOW_UNTESTED_VLLM=1 in the shell to start "
        "anyway, or install 0.32.0"
    )
    assert lines() == []


@pytest.mark.usefixtures("stock_vllm", "needed")
def test_an_untested_vllm_is_refused_unless_that_is_allowed(monkeypatch, lines):
    monkeypatch.setattr("vllm.__version__", "0.32.1+cpu")
    with pytest.raises(
        PatchError, match=r"patches/table\.py .* this is 0\.32\.1: every function .* is the same; run the"
    ):
        patches.register()


@pytest.mark.usefixtures("stock_vllm", "needed")
@pytest.mark.parametrize(
    ("version", "is_made"), [("0.32.9+cpu", True), ("0.33.0", False), ("0.34.1+cpu", False)]
)
def test_a_patch_is_left_out_from_the_version_on_that_does_not_need_it(monkeypatch, lines, version, is_made):
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setenv(upstream.ALLOWED, "1")
    patches.register()
    assert is_replaced(SpinCondition, "record_read") == is_made
    warning, made = lines()
    assert warning.startswith("ALLOW_UNTESTED_VLLM=1: slimqwen/vllm_plugin/patches/table.py was written for")
    assert ("notify_mailbox" in made) == is_made


def test_a_changed_body_is_patched_if_that_is_allowed(stock_vllm, needed, monkeypatch, lines):
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def another(
        *,
        x,
        weight,
        bias,
        conv_states,
        query_start_loc,
        cache_indices,
        has_initial_state,
        silu_activation,
        is_weight_packed,
    ): ...

    monkeypatch.setattr(gdn_attention, "_causal_conv1d_fwd_cpu", another)
    monkeypatch.setenv(upstream.ALLOWED, "1")
    patches.register()
    assert is_replaced(gdn_attention, "_causal_conv1d_fwd_cpu")
    assert "patches/cpu/lone_token.py" in lines()[0]


@pytest.mark.usefixtures("stock_vllm", "needed")
def test_a_module_that_vllm_has_moved_names_the_patch(monkeypatch):
    def moved():
        raise ModuleNotFoundError("No module named 'vllm.elsewhere'")

    monkeypatch.setattr(mtp_rotary, "install", moved)
    with pytest.raises(
        PatchError, match=r"mtp_rotary\.py .* this is 0\..*: No module named 'vllm\.elsewhere'"
    ):
        patches.register()


def test_vllm_finds_the_plugins():
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    found = load_plugins_by_group(DEFAULT_PLUGINS_GROUP)
    assert found["slimqwen_engine_fixes"] is patches.register
    assert found["slimqwen_compile_watch"] is compile_watch.register
