"""Give the MTP head of a text-only Qwen3.5 the positions that its rotary embedding expects, on a CPU.

For a text-only Qwen3.5, `Qwen3_5ForCausalLMConfig` in `vllm/model_executor/models/config.py` removes the M-RoPE
fields from the target's configuration, but not from the draft's, which is read from the same config.json. The
proposer (`vllm/v1/spec_decode/llm_base_proposer.py`) reads the draft's configuration and prepares positions of shape
[3, tokens]; the MTP head is built from the target's configuration, with a rotary embedding for [tokens]. The C++ kernel
works on as many positions as it gets, three times the tokens, and writes past the end of query and key: heap
corruption, a crash or a hang. On CUDA a fused kernel uses only the first row of the positions, which hides the fault;
no CPU has that kernel, with or without Triton.

Remove this fix when vLLM removes the fields from both configurations, or when the checkpoint's config.json has none.
"""

from typing import Any

from slimqwen.vllm_plugin.patches.upstream import expect, expect_parameters

_FIX = "mtp_rotary"
_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
_FIELDS = ("mrope_section", "mrope_interleaved")


def without_mrope(model_config: Any) -> None:
    """Remove the M-RoPE fields from a vLLM ModelConfig, in place."""
    for config in (model_config.hf_config, model_config.hf_text_config):
        rope = getattr(config, "rope_parameters", None) or {}
        for field in _FIELDS:
            rope.pop(field, None)


def install() -> bool:
    """Extend vLLM's configuration hook of the text-only architectures.

    Returns:
        False if it is installed already in this process.
    """
    from vllm.model_executor.models import config as upstream

    stock = getattr(upstream, "Qwen3_5ForCausalLMConfig", None)
    expect(_FIX, isinstance(stock, type), "vllm.model_executor.models.config has no Qwen3_5ForCausalLMConfig")
    expect_parameters(_FIX, upstream.Qwen3_5ForCausalLMConfig.verify_and_update_config, ("vllm_config",))
    hooks = upstream.MODELS_CONFIG_MAP
    if all(getattr(hooks.get(name), "strips_the_draft", False) for name in _ARCHITECTURES):
        return False
    for name in _ARCHITECTURES:
        expect(_FIX, hooks.get(name) is stock, f"MODELS_CONFIG_MAP[{name!r}] is {hooks.get(name)}")

    class TextOnlyConfig(upstream.Qwen3_5ForCausalLMConfig):  # type: ignore[misc] # vLLM is not followed
        strips_the_draft = True

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            upstream.Qwen3_5ForCausalLMConfig.verify_and_update_config(vllm_config)
            speculative = vllm_config.speculative_config
            # Only the MTP head shares the target's rotary embedding; other draft models have their own.
            if speculative is not None and speculative.method == "mtp":
                without_mrope(speculative.draft_model_config)

    hooks.update(dict.fromkeys(_ARCHITECTURES, TextOnlyConfig))
    return True
