"""The tiny Qwen3.5: its shape, and checkpoints of it.

Head dimensions are those of the real models (attention 256, Gated DeltaNet 128, a quarter of the head rotated), so
that the engine's kernels get the shapes they were written for; hidden size and depth are for two CPU cores.
"""

import copy
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from slimqwen.models.language_model import quiet_loading
from slimqwen.models.mtp_head import PREFIX, DraftingModel, MtpHead
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


def save_drafting_model(model: DraftingModel, folder: Path) -> None:
    """Write config.json and model.safetensors (bfloat16, backbone and `mtp.*` together) in the form vLLM reads."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_loading():
        copy.deepcopy(model.backbone).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in model.head.state_dict().items():
        tensors[PREFIX + name] = tensor.detach().to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Readable by the unprivileged user of a container.
    (folder / "model.safetensors").chmod(0o644)
    # generation_config.json is written by code that knows the tokenizer's end tokens.
    (folder / "generation_config.json").unlink(missing_ok=True)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config.update(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    # Multimodal rotary keys: vLLM's draft model would apply them, its target would not.
    for key in ("mrope_section", "mrope_interleaved"):
        config["rope_parameters"].pop(key, None)
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
