"""The error of the code inside vLLM's processes; engine fixes have `EngineFixError`."""

from slimqwen.errors import SlimqwenError


class PluginError(SlimqwenError):
    """A plugin of this package that vLLM does not load, or that cannot do its work in vLLM's process."""
