"""Proposes a baseline variant for a checkpoint: reads its properties and derives config.env lines from them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimqwen import checkpoint
from slimqwen.checkpoint.weights import group_parts, holds_mtp_head
from slimqwen.formats import find_format
from slimqwen.models.families import LINEAR_ATTENTION
from slimqwen.models.outline import Outline
from slimqwen.serving.chat_template import find_tool_parser, thinks_by_default
from slimqwen.text.chats import read_chat_templates
from slimqwen.vllm_plugin.api_key import LOOPBACK

_LONGEST_CONTEXT = 16_384
"""Largest initial context length, tokens: the checkpoint's own may need more memory than a machine has."""

_DRAIN_S = 120
"""Initial limit of the drain at the end of a server, seconds; deploy/ allows for it."""

_DEPTH = 3
"""Initial number of tokens drafted at a time."""

_MATCH_UNIT = 16
"""Tokens to which hits of the prefix cache are exact in hybrid models, whose blocks have 128 to 2,048: the smallest
block of vLLM, of which each is a multiple."""

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "VLLM_HOST": "This machine alone; another address needs VLLM_API_KEY in the shell.",
        "VLLM_CPU_KVCACHE_SPACE": "GiB for the KV cache on a CPU.",
        "VLLM_ENABLE_PREFIX_CACHING=0": "Off: beside MTP drafts, wrong answers after prefix hits are reported for this "
        "kind of model (vLLM 53912, 47194). It costs the time to compute a known beginning again: of each turn of a "
        "chat, all turns before. `slimqwen eval engine NAME` shows whether 1 is right here.",
        "VLLM_PREFIX_MATCH_UNIT": "The second request with a beginning finds it already; by blocks, only long ones do.",
        "VLLM_SHUTDOWN_TIMEOUT": "Seconds for running requests to end after SIGTERM; unset: they are cut at once.",
        "VLLM_REASONING_PARSER": "The model thinks unless asked not to: thoughts come in a field of their own.",
        "VLLM_ENABLE_AUTO_TOOL_CHOICE": "The chat template takes tools: calls are read in the form that it shows.",
    }
)
"""Reasons of lines of `CheckpointFacts.settings`, by key, or by key and value."""


@dataclass(frozen=True)
class CheckpointFacts:
    """Properties of a checkpoint, from its settings and the headers of its weights.

    Attributes:
        architecture: class of the model in config.json.
        weights: number of weights in all tensors; for packed tensors an upper bound.
        disk_bytes: size of the files.
        text: the language model's part of config.json.
        is_multimodal: whether the model has other parts than a language model.
        form: how the weights are stored, in words.
        mtp_head: `16 bits`, `quantised` or None.
        template_file: file of the chat template; None without one.
        tool_parser: vLLM's parser of the tool calls that the chat template asks for; None if it renders no tools.
        thinks: whether the model thinks if a request does not set enable_thinking.
        num_tokens: number of tokens of the tokenizer; None if it is not a BPE.
    """

    architecture: str
    weights: int
    disk_bytes: int
    text: Mapping[str, Any]
    is_multimodal: bool
    form: str
    mtp_head: str | None
    template_file: Path | None
    tool_parser: str | None
    thinks: bool
    num_tokens: int | None

    @classmethod
    def read(cls, folder: Path) -> "CheckpointFacts":
        """Read the properties of a checkpoint from settings and headers, without weights.

        Raises:
            MissingCheckpointError: the folder does not exist or is empty.
            CorruptCheckpointError: a file is missing, unreadable, too short, too long or not in the index.
        """
        checkpoint.check_folder(folder, "give the folder of a checkpoint with the files that a model hub has")
        outline = Outline.read(folder)
        template = read_chat_templates(folder).get("default")
        return cls(
            architecture=outline.config["architectures"][0],
            weights=outline.num_weights,
            disk_bytes=outline.disk_bytes,
            text=outline.text,
            is_multimodal="text_config" in outline.config,
            form=_stored_form(outline),
            mtp_head=_mtp_head(outline),
            template_file=template.file if template else None,
            tool_parser=find_tool_parser([template] if template else []),
            thinks=bool(template and thinks_by_default(template, folder)),
            num_tokens=outline.num_tokens,
        )

    @property
    def context(self) -> int:
        """Context length to serve at first, tokens: what the model supports, at most 16,384."""
        return min(_LONGEST_CONTEXT, int(self.text.get("max_position_embeddings", _LONGEST_CONTEXT)))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the properties as pairs of name and value, in words."""
        text = self.text
        kind = "multimodal, of which the language model is served" if self.is_multimodal else "text only"
        yield "architecture", f"{self.architecture}, {kind}"
        yield (
            "size",
            f"{self.weights / 1e9:.3g} billion weights, {self.disk_bytes / 1e9:.3g} GB; "
            f"{text['num_hidden_layers']} layers of width {text['hidden_size']}",
        )
        yield "vocabulary", f"{text['vocab_size']} rows, {self.num_tokens or 'unknown number of'} tokens"
        yield (
            "context",
            f"{text.get('max_position_embeddings', 'not stated')} tokens, {self.context} of them served",
        )
        yield "format", self.form
        yield (
            "MTP head",
            f"{self.mtp_head}; drafts {_DEPTH} tokens" if self.mtp_head else "none, so no drafts",
        )
        tools = "takes tools" if self.takes_tools else "without tools"
        if self.thinks:
            tools += ", thinks"
        yield "chat template", f"{self.template_file.name}, {tools}" if self.template_file else "none"

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template renders tools."""
        return self.tool_parser is not None

    def settings(self) -> dict[str, str]:
        """Proposed config.env lines by key; `REASONS` explains some of them."""
        lines = {
            "VLLM_SERVED_MODEL_NAME": "default",
            "VLLM_HOST": LOOPBACK,
            "VLLM_PORT": "8080",
            "VLLM_MAX_MODEL_LEN": str(self.context),
            "VLLM_MAX_NUM_SEQS": "8",
            **self._prefix_cache_lines(),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_SHUTDOWN_TIMEOUT": str(_DRAIN_S),
        }
        if self.thinks:
            lines["VLLM_REASONING_PARSER"] = "qwen3"
        if self.tool_parser:
            lines |= {"VLLM_ENABLE_AUTO_TOOL_CHOICE": "1", "VLLM_TOOL_CALL_PARSER": self.tool_parser}
        if self.is_multimodal:
            lines["VLLM_LANGUAGE_MODEL_ONLY"] = "1"
        if self.mtp_head:
            drafts = json.dumps({"method": "mtp", "num_speculative_tokens": _DEPTH})
            lines["VLLM_SPECULATIVE_CONFIG"] = f"'{drafts}'"
        return lines

    def _prefix_cache_lines(self) -> dict[str, str]:
        """On, but for drafts beside recurrent states."""
        is_hybrid = (
            LINEAR_ATTENTION in self.text.get("layer_types", ()) or "linear_num_value_heads" in self.text
        )
        if is_hybrid and self.mtp_head:
            return {"VLLM_ENABLE_PREFIX_CACHING": "0"}
        unit = {"VLLM_PREFIX_MATCH_UNIT": str(_MATCH_UNIT)} if is_hybrid else {}
        return {"VLLM_ENABLE_PREFIX_CACHING": "1", **unit}


def _stored_form(outline: Outline) -> str:
    form = checkpoint.quantisation(outline.config)
    if not form:
        return ", ".join(sorted({info.dtype for info in outline.tensors.values() if len(info.shape) > 1}))
    return f"quantised: {find_format(form).describe()}; calibrate needs 16 bits"


def _mtp_head(outline: Outline) -> str | None:
    if not holds_mtp_head(outline.config, outline.tensors):
        return None
    weights = group_parts(outline.tensors, checkpoint.quantisation(outline.config))
    is_quantised = any(weight.is_quantised for name, weight in weights.items() if name.startswith("mtp."))
    return "quantised" if is_quantised else "16 bits"
