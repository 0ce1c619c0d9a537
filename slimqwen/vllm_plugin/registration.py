"""Check that vLLM will load the plugins of this package."""

from collections.abc import Mapping
from importlib.metadata import entry_points

from slimqwen.vllm_plugin.errors import PluginError

PLUGINS: Mapping[str, str] = {
    "slimqwen_engine_fixes": "vllm.general_plugins",
    "slimqwen_compile_watch": "vllm.general_plugins",
    "slimqwen_endpoints": "vllm.endpoint_plugins",
}
"""Name of each plugin -> the group of its entry point."""


def require_plugins(environment: Mapping[str, str]) -> None:
    """Check that a vLLM process with this environment will load every plugin.

    Raises:
        PluginError: a plugin is not installed, or VLLM_PLUGINS leaves it out.
    """
    allowed = environment.get("VLLM_PLUGINS", "")
    for plugin, group in PLUGINS.items():
        if plugin not in {point.name for point in entry_points(group=group)}:
            raise PluginError(f"vLLM's plugin {plugin} is not installed; `make install` installs it")
        if plugin not in allowed.split(","):
            raise PluginError(
                f"VLLM_PLUGINS={allowed} leaves out {plugin}; add this name, or unset VLLM_PLUGINS"
            )
