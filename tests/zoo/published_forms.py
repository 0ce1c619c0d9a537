"""The zoo: the small model in every form in which models are published, as a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.zoo import quantised
from tests.zoo.editable_checkpoint import (
    Edit,
    EditableCheckpoint,
    dense,
    files,
    half,
    inner,
    json_file,
    multimodal,
    outer,
    qwen3_5_moe,
    rows,
    shards,
    single_experts,
    tiny,
    unlisted,
    untied,
    without_file,
    without_mtp,
)
from tests.zoo.quantised import compressed_tensors, floats, fp8_blocks, gptq, int8, integers


@dataclass(frozen=True)
class PublishedForm:
    """A published form of checkpoint.

    Attributes:
        form: what is special about it, as a table says it.
        edits: what makes it from `start`.
        refuses: verbs (of `tests.zoo.verbs`) that it is not meant for, with a regular expression of what they say; `*`
            is every verb.
        start: makes the editable to begin with.
        on_cpu: whether vLLM's CPU build has a kernel for it.
    """

    form: str
    edits: tuple[Edit, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)
    start: Callable[[], EditableCheckpoint] = tiny
    on_cpu: bool = True

    def build(self, folder: Path) -> Path:
        """Write the checkpoint into a new folder."""
        return self._editable.write(folder)

    @cached_property
    def _editable(self) -> EditableCheckpoint:
        editable = self.start()
        for edit in self.edits:
            edit(editable)
        return editable


_PACKED = {"calibrate": "is quantised already"}
_FOREIGN = _PACKED | dict.fromkeys(
    ("calibrate mtp", "quantise_lm_head", "quantise_embedding"), "in the format .*; take the 16-bit"
)
_GPU_ALONE = dict.fromkeys(("serve", "serve with drafts"), "no kernel for .*; serve it on a GPU")
_PACKED_MTP = {"redistill_mtp": "MTP head is quantised"}
_NO_MTP = {
    "serve with drafts": "has none; remove VLLM_SPECULATIVE_CONFIG",
    "trim_draft_vocab": "nothing drafts; remove trim_draft_vocab",
    "calibrate mtp": "no mtp layers; remove mtp",
    "redistill_mtp": "has no MTP head; remove redistill_mtp",
}
_EXPERTS = (
    _NO_MTP
    | dict.fromkeys(
        ("calibrate", "calibrate mtp"), "whose experts llmcompressor does not see; use a published"
    )
    | {"trim_draft_vocab": "is a mixture of experts"}
)

_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

PUBLISHED_FORMS: dict[str, PublishedForm] = {
    "text": PublishedForm("text only, one file"),
    "multimodal": PublishedForm("multimodal, three shards and an index", (multimodal(), shards(3))),
    "multimodal-bare": PublishedForm(
        "multimodal without preprocessor files", (multimodal(preprocessor=False),)
    ),
    "multimodal-sections": PublishedForm(
        "multimodal, rotary sections", (multimodal(sections=True), shards(3))
    ),
    "multimodal-w4a16": PublishedForm(
        "multimodal, W4A16 group 32, MTP head in 16 bits",
        (multimodal(), shards(3), compressed_tensors(integers())),
        refuses=_PACKED,
    ),
    "multimodal-w4a16-mtp": PublishedForm(
        "multimodal, W4A16 group 32, MTP layer too",
        (multimodal(), compressed_tensors(integers(), integers(quantised.MTP_LAYER), ignore="patterns")),
        refuses=_PACKED | _PACKED_MTP,
    ),
    "multimodal-bare-names": PublishedForm(
        "multimodal, W4A16, `ignore` without the prefix language_model",
        (multimodal(), compressed_tensors(integers(), prefix="model.")),
        refuses={"*": "in_proj_a is stored in 16 bits, but .* it is quantised; use another"},
    ),
    "multimodal-fp8": PublishedForm(
        "multimodal, official FP8 blocks",
        (multimodal(), shards(3), fp8_blocks()),
        refuses=_FOREIGN | _PACKED_MTP,
    ),
    "multimodal-gptq": PublishedForm("multimodal, GPTQ", (multimodal(), shards(3), gptq()), refuses=_FOREIGN),
    "torch-dtype": PublishedForm("`torch_dtype` for `dtype`", (outer(dtype=..., torch_dtype="bfloat16"),)),
    "torch-dtype-inner": PublishedForm(
        "multimodal, `torch_dtype` inside, none outside",
        (multimodal(), inner(dtype=..., torch_dtype="bfloat16")),
    ),
    "dtype-outer": PublishedForm(
        "multimodal, `dtype` outside alone", (multimodal(), inner(dtype=...), outer(dtype="bfloat16"))
    ),
    "dtype-absent": PublishedForm("no dtype in config.json", (outer(dtype=...),)),
    "tie-outer": PublishedForm(
        "multimodal, tied by the outer flag alone",
        (multimodal(), inner(tie_word_embeddings=...)),
        refuses={"*": "set tie_word_embeddings to true, in text_config too"},
    ),
    "tie-inner": PublishedForm(
        "multimodal, tied by the inner flag alone", (multimodal(), outer(tie_word_embeddings=...))
    ),
    "tie-differs": PublishedForm(
        "multimodal, untied outside, tied inside",
        (multimodal(), untied, inner(tie_word_embeddings=True)),
        refuses={"*": "set tie_word_embeddings to false, in text_config too"},
    ),
    "untied": PublishedForm("untied output head", (untied,)),
    "eos-list": PublishedForm(
        "eos as a list, pad absent",
        (outer(eos_token_id=[2, 0], pad_token_id=...), json_file("generation_config.json", pad_token_id=...)),
    ),
    "eos-null": PublishedForm(
        "eos null in config.json, a number in generation_config.json",
        (outer(eos_token_id=None), json_file("generation_config.json", eos_token_id=2)),
    ),
    "no-generation-config": PublishedForm(
        "no generation_config.json", (without_file("generation_config.json"),)
    ),
    "more-rows": PublishedForm("more rows than the tokenizer has ids", (rows(8320),)),
    "more-ids": PublishedForm(
        "more ids than rows",
        (rows(8128),),
        refuses={"prune_vocab": "vocab_size is 8128, but its tokenizer has ids up to 8191; correct"},
    ),
    "side-files": PublishedForm(
        "licence, chat_template.json, additional templates",
        (
            without_file("chat_template.jinja"),
            files(
                {
                    "LICENSE": "A licence.\n",
                    "chat_template.json": f'{{"chat_template": "{_TEMPLATE}"}}',
                    "additional_chat_templates/tool_use.jinja": _TEMPLATE,
                    "original/params.json": "{}",
                    ".gitattributes": "*.safetensors filter=lfs\n",
                    "README.md": "# A model card\n",
                }
            ),
        ),
    ),
    "adapter-beside": PublishedForm(
        "shards, an adapter outside the index", (shards(2), unlisted("adapter_model.safetensors"))
    ),
    "copy-beside": PublishedForm(
        "shards, a consolidated copy outside the index",
        (shards(2), unlisted("consolidated.safetensors", copy=True)),
    ),
    "no-mtp": PublishedForm("no MTP head", (without_mtp(),), refuses=_NO_MTP),
    "mtp-lost": PublishedForm(
        "the MTP head that config.json promises is lost",
        (without_mtp(announced=True),),
        refuses=_NO_MTP,
    ),
    "w4a16": PublishedForm(
        "W4A16 group 32, `ignore` by names", (compressed_tensors(integers()),), refuses=_PACKED
    ),
    "w4a16-patterns": PublishedForm(
        "W4A16 group 32, `ignore` by patterns",
        (compressed_tensors(integers(), ignore="patterns"),),
        refuses=_PACKED,
    ),
    "w4a16-anchored": PublishedForm(
        "W4A16 group 32, `ignore` by anchored patterns",
        (compressed_tensors(integers(), ignore="anchored"),),
        refuses=_PACKED,
    ),
    "w4a16-zero-points": PublishedForm(
        "W4A16 group 32 with zero points", (compressed_tensors(integers(symmetric=False)),), refuses=_PACKED
    ),
    "w4a16-g128": PublishedForm(
        "W4A16 group 128, wide linears alone",
        (compressed_tensors(integers(quantised.WIDE, group_size=128)),),
        refuses=_PACKED,
    ),
    "w4a16-mtp": PublishedForm(
        "W4A16, MTP layer too",
        (compressed_tensors(integers(f"{quantised.LINEARS}|{quantised.MTP_LAYER}")),),
        refuses=_PACKED | _PACKED_MTP,
    ),
    "w4a16-head": PublishedForm(
        "W4A16, output head too",
        (untied, compressed_tensors(integers(f"{quantised.LINEARS}|{quantised.HEAD}"))),
        refuses=_PACKED | {"quantise_lm_head": "packed lm_head already"},
    ),
    "w4a16-embedding": PublishedForm(
        "W4A16, embedding and output head too",
        (untied, compressed_tensors(integers(f"{quantised.LINEARS}|{quantised.EMBEDDING}|{quantised.HEAD}"))),
        refuses=_PACKED
        | {"quantise_lm_head": "packed lm_head already", "quantise_embedding": "has 0 embeddings in 16 bits"},
    ),
    "w8a16": PublishedForm(
        "W8A16 by row", (compressed_tensors(integers(bits=8, group_size=None)),), refuses=_PACKED
    ),
    "w8a8": PublishedForm("int8 weights and inputs", (compressed_tensors(int8()),), refuses=_PACKED),
    "fp8-rows": PublishedForm(
        "compressed-tensors FP8 (float-quantized)", (compressed_tensors(floats()),), refuses=_PACKED
    ),
    "mixed": PublishedForm(
        "compressed-tensors mixed: W4A16 MLP, FP8 attention",
        (
            compressed_tensors(
                integers(quantised.MLP),
                floats(rf"{quantised.BODY}self_attn\.[qkvo]_proj"),
                ignore="names",
            ),
        ),
        refuses=_PACKED,
    ),
    "fp8-blocks": PublishedForm(
        "official FP8 blocks, MTP layer too", (fp8_blocks(),), refuses=_FOREIGN | _PACKED_MTP
    ),
    "fp8-blocks-mtp16": PublishedForm(
        "official FP8 blocks, MTP head in 16 bits", (fp8_blocks(mtp=False),), refuses=_FOREIGN
    ),
    "gptq": PublishedForm("GPTQ, 4 bits", (gptq(),), refuses=_FOREIGN),
    "gptq-act-order": PublishedForm(
        "GPTQ with activation order, MTP layer too",
        (gptq(mtp=True, act_order=True),),
        refuses={"*": "desc_act.*; use a checkpoint with"},
    ),
    "auto-round": PublishedForm("AutoRound in GPTQ's layout", (quantised.auto_round,), refuses=_FOREIGN),
    "awq": PublishedForm("AWQ (gemm), zero points", (quantised.awq,), refuses=_FOREIGN),
    "nvfp4": PublishedForm(
        "NVFP4 of ModelOpt", (quantised.nvfp4,), refuses=_FOREIGN | _GPU_ALONE, on_cpu=False
    ),
    "llama": PublishedForm("LlamaForCausalLM, random", start=dense("Llama"), refuses=_NO_MTP),
    "qwen2": PublishedForm("Qwen2ForCausalLM, random", start=dense("Qwen2"), refuses=_NO_MTP),
    "qwen3": PublishedForm("Qwen3ForCausalLM, random", start=dense("Qwen3"), refuses=_NO_MTP),
    "qwen3.5-moe": PublishedForm("Qwen3_5MoeForCausalLM, random", start=qwen3_5_moe, refuses=_EXPERTS),
    "qwen3.5-moe-w4a16": PublishedForm(
        "Qwen3_5MoeForCausalLM, experts in W4A16 one by one",
        (single_experts, compressed_tensors(integers(quantised.EXPERTS))),
        refuses=_EXPERTS,
        start=qwen3_5_moe,
    ),
    "float16": PublishedForm("float16", (half,)),
}

SAME_TENSORS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("multimodal-bare", "multimodal-sections", "multimodal-bare-names"), ()),
    **dict.fromkeys(("torch-dtype", "torch-dtype-inner", "dtype-outer", "dtype-absent"), ()),
    **dict.fromkeys(("eos-list", "eos-null", "no-generation-config"), ("prune_vocab",)),
    **dict.fromkeys(("side-files", "adapter-beside", "copy-beside"), ("quantise_lm_head",)),
    **dict.fromkeys(("w4a16-patterns", "w4a16-anchored"), ("quantise_lm_head", "calibrate mtp")),
}
"""Forms with the tensors of one before, and the stages (of `tests.zoo.verbs`) that do something else with them."""
