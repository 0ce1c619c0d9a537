"""vLLM has to load every plugin of this package."""

import pytest

from slimqwen.serving import checks
from slimqwen.vllm_plugin import registration
from slimqwen.vllm_plugin.errors import PluginError


@pytest.mark.parametrize("plugin", registration.PLUGINS)
def test_a_list_that_leaves_out_one_of_the_plugins_is_refused(servable, plugin):
    others = ",".join(name for name in registration.PLUGINS if name != plugin)
    with pytest.raises(PluginError, match=f"VLLM_PLUGINS={others} leaves out {plugin}; add this name"):
        checks.check_command(servable(f"VLLM_PLUGINS={others}"))


def test_a_plugin_that_is_not_installed_is_refused(servable, monkeypatch):
    monkeypatch.setattr(registration, "entry_points", lambda group: ())
    with pytest.raises(PluginError, match="slimqwen_engine_fixes, is not installed; `make install`"):
        checks.check_command(servable())
