"""Give the token embedding of every model class the quantisation config, so that a packed one is loaded as such.

`VocabParallelEmbedding` asks the quantisation config how its rows are stored, but only if the model class passes config
and name. Qwen3.5 (`vllm/model_executor/models/qwen3_5.py`) and its MTP head (`qwen3_5_mtp.py`), which loads the same
tensors, pass neither, Llama passes no name: vLLM then builds the embedding in 16 bits, and loading ends at
`embed_tokens.weight_packed`.

With this patch an embedding of the model's vocabulary and hidden size that was built without a name gets both. Draft
models of other kinds name theirs, and keep what they ask for.

Remove this patch when the model classes pass both.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.patches.upstream import replace

_PATCH = "embedding_config"


def install() -> bool:
    """Pass config and name to token embeddings; False if it is installed already in this process."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    def init(
        stock: Callable[..., None],
        self: Any,
        num_embeddings: int,
        embedding_dim: int,
        *others: Any,
        **named: Any,
    ) -> None:
        if type(self) is VocabParallelEmbedding and not others and not named.get("prefix"):
            named |= _config_and_name(num_embeddings, embedding_dim)
        stock(self, num_embeddings, embedding_dim, *others, **named)

    return replace(_PATCH, VocabParallelEmbedding, "__init__", init)


def _config_and_name(rows: int, columns: int) -> dict[str, Any]:
    """The quantisation config and the name of the token embedding, if it may be packed; else nothing."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    packing = config and config.quant_config
    if packing is None or packing.get_name() != "compressed-tensors":
        return {}
    model = config.model_config
    text = model.hf_text_config
    if (rows, columns) != (text.vocab_size, text.hidden_size):
        return {}
    is_nested = model.hf_config is not text  # a model that sees images has the language model as a part
    return {
        "quant_config": packing,
        "prefix": f"{'language_model.' if is_nested else ''}model.embed_tokens",
    }
