"""The tiny Qwen3.5: its shape, and checkpoints of it.

Head dimensions are those of the real models (attention 256, Gated DeltaNet 128, a quarter of the head rotated), so
that the engine's kernels get the shapes they were written for; hidden size and depth are for two CPU cores.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from slimqwen.models.mtp_head import DraftingModel, MtpHead, save_drafting_model
from tinyworld.tokenizer import VOCABULARY_SIZE, end_token_ids, write_generation_config


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the tiny model, named as in a Qwen3.5 config."""

    vocab_size: int = VOCABULARY_SIZE
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 256
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 2
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    max_position_embeddings: int = 2048
    """Longest sequence in training, tokens."""
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25


def text_config(shape: TinyShape) -> Qwen3_5TextConfig:
    """The transformers config of a shape: three Gated DeltaNet layers per full-attention layer, tied embeddings."""
    sizes = dataclasses.asdict(shape)
    rope = {
        "rope_type": "default",
        "rope_theta": sizes.pop("rope_theta"),
        "partial_rotary_factor": sizes.pop("partial_rotary_factor"),
    }
    config = Qwen3_5TextConfig(
        **sizes,
        rope_parameters=rope,
        tie_word_embeddings=True,
        eos_token_id=end_token_ids()[0],
        # No pad_token_id: transformers would freeze that token's embedding, but here it ends every prose text.
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    return config


def build(shape: TinyShape, seed: int) -> DraftingModel:
    """A randomly initialised model in float32; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = text_config(shape)
        backbone = Qwen3_5ForCausalLM(config)
        _initialise_memory(backbone)
        return DraftingModel(backbone, MtpHead(config))


def _initialise_memory(backbone: Qwen3_5ForCausalLM) -> None:
    """Initialise the time steps of every Gated DeltaNet head so that it remembers, as the paper's own code does.

    transformers sets all time steps to softplus(1), with which nearly every head forgets within a token: a placeholder
    for loaded weights, unsuitable for training from scratch.
    """
    for module in backbone.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            low, high = math.log(1e-3), math.log(1e-1)
            step = torch.exp(torch.rand(module.num_v_heads) * (high - low) + low)
            with torch.no_grad():
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def write_checkpoint(model: DraftingModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights (bfloat16), config, tokenizer, chat template and generation config into one folder."""
    save_drafting_model(model, folder)
    tokenizer.save_pretrained(folder)
    write_generation_config(folder)
