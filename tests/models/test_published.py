"""Sizes of published checkpoints from config.json and names alone, against real checkpoints of every format."""

from pathlib import Path

import pytest

from slimqwen.checkpoint import read_config
from slimqwen.checkpoint.tensors import list_tensors, tensor_bytes
from slimqwen.formats.format import UnsupportedFormatError
from slimqwen.models.published import published_tensors
from slimqwen.models.shape import Tensors
from tests.zoo.published_forms import PUBLISHED_FORMS

FORMATS = [
    *("text", "untied", "no-mtp", "multimodal", "multimodal-w4a16-mtp", "multimodal-fp8", "multimodal-gptq"),
    *(
        "w4a16",
        "w4a16-patterns",
        "w4a16-zero-points",
        "w4a16-g128",
        "w4a16-head",
        "w4a16-embedding",
        "w8a16",
        "w8a8",
        "fp8-rows",
    ),
    *("mixed", "fp8-blocks", "fp8-blocks-mtp16", "gptq", "gptq-act-order", "auto-round", "awq", "nvfp4"),
    *("llama", "qwen2", "qwen3", "qwen3.5-moe", "qwen3.5-moe-w4a16", "mtp-lost"),
]
BY_NAMES_ALONE = {
    "gptq-act-order",  # its MTP layer is quantised, though its config leaves out whatever has attn in its name
    "mtp-lost",  # config.json promises what is lost
}


def size(tensors: Tensors) -> int:
    return sum(tensor_bytes(*each) for each in tensors.values())


@pytest.mark.parametrize("published", FORMATS)
def test_bytes_are_those_of_the_stored_checkpoint_to_a_thousandth(published: str, tmp_path: Path):
    folder = PUBLISHED_FORMS[published].build(tmp_path / "checkpoint")
    config, stored = read_config(folder), list_tensors(folder)
    on_disk = sum(info.end - info.start for name, info in stored.items() if "visual." not in name)

    assert size(published_tensors(config, stored.keys())) == pytest.approx(on_disk, rel=1e-3)
    if published not in BY_NAMES_ALONE:
        assert size(published_tensors(config)) == pytest.approx(on_disk, rel=1e-3)


MLP = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 32, "num_hidden_layers": 1, "head_dim": 16}
CONFIG = {
    **MLP,
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
UP = "model.layers.0.mlp.up_proj"


def test_nvfp4_of_modelopt_has_two_weights_in_a_byte_and_a_scale_for_sixteen():
    form = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "model.layers.*.self_attn*"],
    }
    stored = published_tensors({**CONFIG, "quantization_config": form})
    assert stored[f"{UP}.weight"] == ("U8", (128, 32))
    assert stored[f"{UP}.weight_scale"] == ("F8_E4M3", (128, 4))
    assert stored[f"{UP}.weight_scale_2"] == ("F32", (1,))
    assert stored["model.layers.0.self_attn.q_proj.weight"] == ("BF16", (64, 64))
    assert stored["lm_head.weight"] == ("BF16", (32, 64))


def test_fp8_without_blocks_has_one_scale_and_leaves_whole_modules_by_name():
    form = {"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "layers.0.mlp.down"]}
    stored = published_tensors({**CONFIG, "quantization_config": form})
    assert stored[f"{UP}.weight_scale"] == ("BF16", (1,))
    assert "model.layers.0.self_attn.q_proj.weight_scale" not in stored
    # An entry names whole parts of a name: down is not down_proj.
    assert stored["model.layers.0.mlp.down_proj.weight"] == ("F8_E4M3", (64, 128))


def test_gptq_quantises_the_output_head_where_it_says_so():
    form = {"quant_method": "gptq", "bits": 8, "group_size": -1, "lm_head": True}
    stored = published_tensors({**CONFIG, "quantization_config": form})
    assert stored["lm_head.qweight"] == ("I32", (16, 32))
    assert stored["lm_head.scales"] == ("F16", (1, 32))
    assert stored["model.embed_tokens.weight"] == ("BF16", (32, 64))


@pytest.mark.parametrize(
    "form", [{"quant_method": "bitsandbytes"}, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}]
)
def test_a_format_without_known_sizes_is_one_line(form):
    with pytest.raises(
        UnsupportedFormatError, match=f"format {form['quant_method']} are not known here; take"
    ):
        published_tensors({**CONFIG, "quantization_config": form})
