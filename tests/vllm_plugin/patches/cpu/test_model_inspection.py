import os

import pytest

from slimqwen.vllm_plugin.patches.cpu import model_inspection


@pytest.mark.usefixtures("stock_vllm")
def test_a_model_class_is_looked_at_in_this_process():
    from vllm.model_executor.models import registry

    assert model_inspection.install()
    assert registry._run_in_subprocess(os.getpid) == os.getpid()
