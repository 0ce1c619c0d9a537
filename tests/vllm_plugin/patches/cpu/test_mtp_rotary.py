from types import SimpleNamespace

import pytest

from slimqwen.vllm_plugin.patches.cpu import mtp_rotary
from slimqwen.vllm_plugin.patches.upstream import PatchError

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def model_config():
    rope = {"rope_theta": 1e4, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = SimpleNamespace(rope_parameters=rope, mamba_ssm_dtype=None)
    return SimpleNamespace(hf_config=text, hf_text_config=text)


def vllm_config(method):
    draft = SimpleNamespace(method=method, draft_model_config=model_config()) if method else None
    cache = SimpleNamespace(mamba_ssm_cache_dtype="auto")
    return SimpleNamespace(model_config=model_config(), speculative_config=draft, cache_config=cache)


def hook(architecture):
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    return MODELS_CONFIG_MAP[architecture].verify_and_update_config


def rope_of(config):
    return config.hf_text_config.rope_parameters


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_draft_loses_its_mrope_fields_as_the_target_does(architecture):
    assert mtp_rotary.install()
    config = vllm_config("mtp")
    hook(architecture)(config)
    assert rope_of(config.model_config) == {"rope_theta": 1e4}
    assert rope_of(config.speculative_config.draft_model_config) == {"rope_theta": 1e4}


@pytest.mark.usefixtures("stock_vllm")
def test_a_draft_that_is_not_the_mtp_head_keeps_its_fields():
    mtp_rotary.install()
    config = vllm_config("draft_model")
    hook("Qwen3_5ForCausalLM")(config)
    assert "mrope_section" in rope_of(config.speculative_config.draft_model_config)


@pytest.mark.usefixtures("stock_vllm")
def test_a_server_without_speculation_is_left_as_it_is():
    mtp_rotary.install()
    config = vllm_config(None)
    hook("Qwen3_5ForCausalLM")(config)
    assert rope_of(config.model_config) == {"rope_theta": 1e4}


@pytest.mark.usefixtures("stock_vllm")
def test_the_fix_is_still_needed():
    """Fails when vLLM strips the draft itself: the fix can go then."""
    config = vllm_config("mtp")
    hook("Qwen3_5ForCausalLM")(config)
    assert "mrope_section" in rope_of(config.speculative_config.draft_model_config)


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_install_refuses_an_architecture_without_the_hook_and_changes_nothing(monkeypatch, architecture):
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    monkeypatch.delitem(MODELS_CONFIG_MAP, architecture)
    before = dict(MODELS_CONFIG_MAP)
    with pytest.raises(PatchError, match=architecture):
        mtp_rotary.install()
    assert before == MODELS_CONFIG_MAP
