from types import SimpleNamespace

import pytest
import torch

from slimqwen.formats.compressed_tensors import config_group, settings_of
from slimqwen.vllm_plugin.patches.faults import embedding_config

ROWS, COLUMNS = 128, 64
PACKED = settings_of({"e": config_group("re:^(?!mtp).*embed_tokens$", 8, 32)}, ["re:.*proj$"])


@pytest.fixture
def embedding(stock_vllm, monkeypatch):
    """embedding(rows=…, name="", packed=True, nested=False): how vLLM builds one, without a model around it."""
    import vllm.config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)

    def build(rows=ROWS, packed=True, nested=False, **named):
        text = SimpleNamespace(vocab_size=ROWS, hidden_size=COLUMNS)
        model = SimpleNamespace(hf_text_config=text, hf_config=SimpleNamespace() if nested else text)
        config = SimpleNamespace(
            model_config=model,
            quant_config=CompressedTensorsConfig.from_config(dict(PACKED)) if packed else None,
        )
        monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: config)
        return VocabParallelEmbedding(rows, COLUMNS, disable_tp=True, params_dtype=torch.bfloat16, **named)

    return build


def parts(embedding):
    return {name for name, _ in embedding.named_parameters()}


def test_without_the_patch_a_packed_embedding_is_built_in_16_bits(embedding):
    assert parts(embedding()) == {"weight"}


@pytest.mark.parametrize(("nested", "name"), [(False, ""), (True, "language_model.")])
def test_an_embedding_without_a_name_is_built_as_the_config_says(embedding, nested, name):
    assert embedding_config.install()
    built = embedding(nested=nested)
    assert parts(built) == {"weight_packed", "weight_scale", "weight_shape"}
    assert built.prefix == f"{name}model.embed_tokens"


@pytest.mark.parametrize(
    "other",
    [{"packed": False}, {"rows": 2 * ROWS}, {"prefix": "draft.embed_tokens"}],
    ids=["a model in 16 bits", "another table", "a draft model's own"],
)
def test_other_embeddings_stay_as_they_are(embedding, other):
    assert embedding_config.install()
    assert parts(embedding(**other)) == {"weight"}


def test_a_class_that_passes_config_and_name_gets_what_it_asks_for(embedding):
    assert embedding_config.install()
    left = embedding(quant_config=None, prefix="model.embed_tokens")
    assert parts(left) == {"weight"}
    assert not embedding_config.install()
