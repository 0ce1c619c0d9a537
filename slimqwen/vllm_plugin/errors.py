"""The error that code inside vLLM's processes raises; patches raise `PatchError`."""

from slimqwen.errors import SlimqwenError


class PluginError(SlimqwenError):
    """vLLM does not load a plugin of this package, or the plugin cannot do its work in vLLM's process."""
