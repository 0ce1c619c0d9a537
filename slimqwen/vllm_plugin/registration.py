"""Check that vLLM will load the plugins of this package."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec

from slimqwen.vllm_plugin.errors import PluginError

PLUGINS: Mapping[str, str] = {
    "slimqwen_engine_fixes": "vllm.general_plugins",
    "slimqwen_compile_watch": "vllm.general_plugins",
    "slimqwen_endpoints": "vllm.endpoint_plugins",
}
"""Name of each plugin -> the group of its entry point. vLLM's compile key has the names: another one is another key."""


def require_plugins(environment: Mapping[str, str]) -> None:
    """Check that a vLLM process with this environment will load every plugin of this package.

    Args:
        environment: environment variables of the process.

    Raises:
        PluginError: a plugin is not installed, or VLLM_PLUGINS does not name it.
    """
    allowed = environment.get("VLLM_PLUGINS", "")
    for plugin, group in PLUGINS.items():
        modules = [point.module for point in entry_points(group=group) if point.name == plugin]
        # Of a module that has moved since the installation vLLM only logs that it cannot be loaded.
        if not modules or not _exists(modules[0]):
            raise PluginError(
                f"Slimqwen's plugin for vLLM, {plugin}, is not installed; `make install` installs it"
            )
        if plugin not in allowed.split(","):
            raise PluginError(
                f"VLLM_PLUGINS={allowed} leaves out {plugin}; add this name, or unset VLLM_PLUGINS"
            )


def _exists(module: str) -> bool:
    try:
        spec = find_spec(module)  # of a folder without code it has no origin
        return spec is not None and spec.origin is not None
    except ModuleNotFoundError:
        return False
