"""Whether vLLM will load a plugin of this package."""

from importlib.metadata import entry_points

from slimqwen.vllm_plugin.errors import PluginError


def require(plugin: str, group: str, allowed: str) -> None:
    """Check that a plugin is installed and allowed.

    Args:
        plugin: name of its entry point.
        group: group of the entry point.
        allowed: value of VLLM_PLUGINS.

    Raises:
        PluginError: it is not.
    """
    if plugin not in {point.name for point in entry_points(group=group)}:
        raise PluginError(f"vLLM's plugin {plugin} is not installed; `make install` installs it")
    if plugin not in allowed.split(","):
        raise PluginError(f"VLLM_PLUGINS={allowed} leaves out {plugin}; add it, or unset VLLM_PLUGINS=")
