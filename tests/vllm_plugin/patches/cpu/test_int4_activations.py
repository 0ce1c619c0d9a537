import os

import pytest

from slimqwen.vllm_plugin.patches.cpu import int4_activations

VARIABLE = "VLLM_CPU_INT4_W4A8"


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")  # so that it is as before after the test
    monkeypatch.delenv(VARIABLE)


@pytest.mark.usefixtures("unset")
def test_activations_keep_their_16_bits():
    """Fails when vLLM keeps them by default: the fix can go then."""
    from vllm import envs

    envs.disable_envs_cache()
    assert envs.VLLM_CPU_INT4_W4A8
    assert int4_activations.is_needed()
    assert int4_activations.install()
    assert not envs.VLLM_CPU_INT4_W4A8
    assert not int4_activations.is_needed()


@pytest.mark.parametrize("value", ["0", "1"])
def test_what_was_set_stays(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    assert not int4_activations.is_needed()
    assert not int4_activations.install()
    assert os.environ[VARIABLE] == value
