"""A checkpoint in memory, before it is written, and the edits that give it the forms in which people publish models."""

import json
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slimqwen.models.shape import IMAGE_PROCESSOR
from tests.checkpoints import TINY, stored

Tensors = dict[str, torch.Tensor]

TEXT_PREFIX = "model.language_model."
IDS = {
    "image_token_id": 8000,
    "video_token_id": 8001,
    "vision_start_token_id": 8002,
    "vision_end_token_id": 8003,
}
_TOWER = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 192,
    "num_position_embeddings": 16,
}
PROCESSORS = {
    "preprocessor_config.json": IMAGE_PROCESSOR,
    "video_preprocessor_config.json": {
        **{key: value for key, value in IMAGE_PROCESSOR.items() if key != "image_processor_type"},
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
}
"""The files of a multimodal checkpoint that describe images and videos to a processor."""


@dataclass
class EditableCheckpoint:
    """A checkpoint in memory.

    Attributes:
        config: config.json.
        tensors: by name.
        files: content of every other file by its path.
        shards: number of files of weights; an index where there is more than one.
        unlisted: files of weights that no index lists.
    """

    config: dict[str, Any]
    tensors: Tensors
    files: dict[str, bytes]
    shards: int = 1
    unlisted: dict[str, Tensors] = field(default_factory=dict)

    @property
    def text(self) -> dict[str, Any]:
        """The language model's part of the config."""
        part: dict[str, Any] = self.config.get("text_config", self.config)
        return part

    def write(self, folder: Path) -> Path:
        """Write it into a new folder."""
        folder.mkdir(parents=True)
        names = sorted(self.tensors)
        step = math.ceil(len(names) / self.shards)
        files = [f"model.safetensors-{i + 1:05}-of-{self.shards:05}.safetensors" for i in range(self.shards)]
        shards = {file: names[i * step : (i + 1) * step] for i, file in enumerate(files)}
        if self.shards == 1:
            shards = {"model.safetensors": names}
        else:
            weight_map = {name: file for file, held in shards.items() for name in held}
            size = sum(tensor.nbytes for tensor in self.tensors.values())
            write_json(
                folder / "model.safetensors.index.json",
                {"metadata": {"total_size": size}, "weight_map": weight_map},
            )
        contents = {file: {name: self.tensors[name] for name in held} for file, held in shards.items()}
        for file, tensors in {**contents, **self.unlisted}.items():
            held = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(held, folder / file, metadata={"format": "pt"})
        write_json(folder / "config.json", self.config)
        for path, content in self.files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(content)
        return folder


Edit = Callable[[EditableCheckpoint], None]


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON as model hubs hold it."""
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def read_editable(folder: Path) -> EditableCheckpoint:
    """A checkpoint of one file, to be edited into another form."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    return EditableCheckpoint(
        config=json.loads((folder / "config.json").read_text()),
        tensors=stored(folder),
        files={name: (folder / name).read_bytes() for name in names},
    )


def tiny() -> EditableCheckpoint:
    """The committed small Qwen3.5: text only, one file, BF16, with an MTP head.

    All share its tensors, so an edit replaces a tensor and never writes into one.
    """
    kept = _read_tiny()
    return EditableCheckpoint(deepcopy(kept.config), dict(kept.tensors), dict(kept.files))


@cache
def _read_tiny() -> EditableCheckpoint:
    return read_editable(TINY)


def dense(family: str, *, tied: bool = True) -> Callable[[], EditableCheckpoint]:
    """A small model of Llama, Qwen2 or Qwen3 with random weights and without an MTP head."""
    return lambda: _random_model(
        f"{family}ForCausalLM",
        f"{family}Config",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        **({"head_dim": 64} if family == "Qwen3" else {}),
    )


def qwen3_5_moe() -> EditableCheckpoint:
    """A small Qwen3.5 mixture of experts with random weights, untied, without an MTP head."""
    return _random_model(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        hidden_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        tie_word_embeddings=False,
    )


def _random_model(architecture: str, config: str, **dimensions: Any) -> EditableCheckpoint:
    import transformers

    editable = tiny()
    ends = {"eos_token_id": 2, "bos_token_id": None, "pad_token_id": None}
    settings = getattr(transformers, config)(
        vocab_size=8192, max_position_embeddings=4096, **ends, **dimensions
    )
    editable.tensors = _random_tensors(getattr(transformers, architecture), settings)
    if settings.tie_word_embeddings:
        editable.tensors.pop("lm_head.weight")
    editable.config = {**settings.to_dict(), "architectures": [architecture], "dtype": "bfloat16"}
    return editable


def _random_tensors(model_class: Any, settings: Any) -> Tensors:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = model_class(settings).to(torch.bfloat16).state_dict()
        # transformers begins with biases of zero, and a lost one would change nothing.
        return {
            name: torch.randn_like(tensor) if name.endswith("_proj.bias") else tensor.detach().clone()
            for name, tensor in state.items()
        }


@cache
def _vision_tower() -> tuple[dict[str, Any], Tensors]:
    import transformers

    settings = transformers.Qwen3_5VisionConfig(**{k: v for k, v in _TOWER.items() if k != "model_type"})
    tower = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5VisionModel
    tensors = {f"model.visual.{name}": tensor for name, tensor in _random_tensors(tower, settings).items()}
    return json.loads(json.dumps(settings.to_dict(), default=str)), tensors


def multimodal(*, preprocessor: bool = True, sections: bool = False) -> Edit:
    """As Qwen publishes: text tensors below model.language_model., a vision tower, nested configs.

    Args:
        preprocessor: whether the files that describe images and videos to a processor are there.
        sections: whether the rotary embedding has the sections of images and videos.
    """

    def edit(editable: EditableCheckpoint) -> None:
        vision, tower = _vision_tower()
        editable.tensors = {_below_text(name): tensor for name, tensor in editable.tensors.items()} | tower
        text = editable.config
        text.pop("architectures")
        if sections:
            text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
        quantisation = text.pop("quantization_config", None)
        editable.config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": vision,
            "tie_word_embeddings": text["tie_word_embeddings"],
            **IDS,
        }
        if quantisation:
            editable.config["quantization_config"] = quantisation
        if preprocessor:
            editable.files |= {name: json.dumps(content).encode() for name, content in PROCESSORS.items()}

    return edit


def _below_text(name: str) -> str:
    return TEXT_PREFIX + name.removeprefix("model.") if name.startswith("model.") else name


def shards(count: int) -> Edit:
    """Weights in several files with an index."""

    def edit(editable: EditableCheckpoint) -> None:
        editable.shards = count

    return edit


def unlisted(file: str, *, copy: bool = False) -> Edit:
    """A file of weights that no index lists: an adapter, or a copy of all tensors."""

    def edit(editable: EditableCheckpoint) -> None:
        adapter = {"base_model.model.layers.0.lora_A.weight": torch.zeros(4, 4)}
        editable.unlisted[file] = editable.tensors if copy else adapter

    return edit


def outer(**changes: Any) -> Edit:
    """Keys of config.json changed; `...` removes one."""
    return lambda editable: _change(editable.config, changes)


def inner(**changes: Any) -> Edit:
    """Keys of the text part of config.json changed; `...` removes one."""
    return lambda editable: _change(editable.text, changes)


def json_file(path: str, **changes: Any) -> Edit:
    """Keys of another JSON file changed; `...` removes one."""

    def edit(editable: EditableCheckpoint) -> None:
        content = json.loads(editable.files.get(path, b"{}"))
        _change(content, changes)
        editable.files[path] = json.dumps(content).encode()

    return edit


def files(content: Mapping[str, str]) -> Edit:
    """More files by their paths."""

    def edit(editable: EditableCheckpoint) -> None:
        for path, text in content.items():
            editable.files[path] = text.encode()

    return edit


def without_file(path: str) -> Edit:
    """A file left out."""
    return lambda editable: editable.files.pop(path) and None


def _change(content: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if value is ...:
            content.pop(key, None)
        else:
            content[key] = value


def without_mtp(*, announced: bool = False) -> Edit:
    """No MTP head; `announced`: the config still promises one, as after a careless rewrite."""

    def edit(editable: EditableCheckpoint) -> None:
        editable.tensors = {n: t for n, t in editable.tensors.items() if not n.startswith("mtp.")}
        if not announced:
            editable.text["mtp_num_hidden_layers"] = 0

    return edit


def untied(editable: EditableCheckpoint) -> None:
    """An output head of its own."""
    embedding = next(name for name in editable.tensors if name.endswith("embed_tokens.weight"))
    editable.tensors["lm_head.weight"] = editable.tensors[embedding].clone()
    for config in (editable.config, editable.text):
        config["tie_word_embeddings"] = False


def half(editable: EditableCheckpoint) -> None:
    """Every tensor in float16."""
    editable.tensors = {name: tensor.half() for name, tensor in editable.tensors.items()}
    editable.text["dtype"] = "float16"


def single_experts(editable: EditableCheckpoint) -> None:
    """The experts of a mixture one by one, as they are stored where they are quantised."""
    for name in [name for name in editable.tensors if ".experts." in name]:
        joined, prefix = editable.tensors.pop(name), name.rpartition(".")[0]
        kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert, stacked in enumerate(joined):
            for kind, weight in zip(kinds, stacked.chunk(len(kinds)), strict=True):
                editable.tensors[f"{prefix}.{expert}.{kind}.weight"] = weight.clone()


def rows(count: int) -> Edit:
    """So many rows of embedding: more than the tokenizer has ids (padded), or fewer."""

    def edit(editable: EditableCheckpoint) -> None:
        editable.text["vocab_size"] = count
        for name, tensor in editable.tensors.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                more = torch.zeros(max(0, count - len(tensor)), tensor.shape[1], dtype=tensor.dtype)
                editable.tensors[name] = torch.cat([tensor[:count], more])

    return edit
