"""Have vLLM draft with the model class of trimmed draft vocabularies, on every device.

As a plugin of its own, the class would change VLLM_PLUGINS and so vLLM's compile key.
"""

_CLASS = "slimqwen.vllm_plugin.draft_vocabulary:DraftVocabularyMTP"


def install() -> bool:
    """Register the class in place of vLLM's own, without importing it; False if it is registered already."""
    from vllm import ModelRegistry

    module, _, name = _CLASS.partition(":")
    registered = ModelRegistry.models.get("Qwen3_5MTP")
    if getattr(registered, "module_name", None) == module:
        return False
    ModelRegistry.register_model("Qwen3_5MTP", f"{module}:{name}")
    return True
