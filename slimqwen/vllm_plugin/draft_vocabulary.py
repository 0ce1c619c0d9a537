"""Qwen3.5's MTP head in vLLM, which drafts from a part of the vocabulary if the checkpoint has a draft head.

`slimqwen.checkpoint.draft_head` describes the tensors of the draft head, their file, which the index does not list, and
the key of config.json that announces them. The model names the file as a further source of weights, which vLLM's loader
reads as well; in checkpoints of earlier versions the index lists the draft head. The target verifies every draft with
its whole vocabulary, so the draft head affects only how many drafted tokens are accepted. Without the key, the model is
an instance of vLLM's own class.

`patches.serving.draft_head_class` registers the class in place of vLLM's, on every device. This module imports vLLM's
model classes, so vLLM imports it only when it needs the class.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP
from vllm.transformers_utils.repo_utils import list_filtered_repo_files

from slimqwen.vllm_plugin.errors import PluginError
from slimqwen.vllm_plugin.patches import upstream

_SIZE_KEY = "mtp_draft_vocab_size"
_PREFIX = "mtp.draft_head."
_FILE = "draft_head.safetensors"
_CURE = "make the checkpoint anew with the stage trim_draft_vocab"


class DraftVocabularyMTP(Qwen3_5MTP):  # type: ignore[misc]  # vLLM is not followed by the type checker
    """The MTP head with an output head of its own, which has a row for each token id that may be drafted.

    Args:
        vllm_config: vLLM's configuration.
        prefix: prefix of the module names.

    Raises:
        PluginError: config.json announces an impossible number of rows.
    """

    def __new__(cls, *, vllm_config: Any, prefix: str = "") -> Any:
        """Make an instance of this class if config.json announces a draft head, else of vLLM's own class."""
        if getattr(vllm_config.model_config.hf_text_config, _SIZE_KEY, None) is None:
            return Qwen3_5MTP(vllm_config=vllm_config, prefix=prefix)
        return super().__new__(cls)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        upstream.require("DraftVocabularyMTP", of="MTP head")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        rows = getattr(self.config, _SIZE_KEY)
        if not isinstance(rows, int) or not 0 < rows <= self.config.vocab_size:
            raise PluginError(
                f"{_SIZE_KEY} is {rows!r}, but the vocabulary has {self.config.vocab_size} ids; {_CURE}"
            )
        if not get_pp_group().is_last_rank:
            return
        # Below `model`, where vLLM's loader looks for the names of the checkpoint. The shared output head stays too.
        # GPUs share the rows; each has all ids, because logits and maxima are gathered from all GPUs.
        self.model.draft_head = ParallelLMHead(
            rows, self.config.hidden_size, quant_config=_packed(vllm_config), prefix=_PREFIX.removesuffix(".")
        )
        self.model.draft_head.token_ids = torch.nn.Parameter(torch.arange(rows), requires_grad=False)
        self.draft_logits_processor = LogitsProcessor(rows)
        self.secondary_weights = list(_sources(vllm_config))

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """Scores, [tokens, hidden] -> [tokens, vocabulary]: minus infinity for ids that may not be drafted."""
        scores = self.draft_logits_processor(self.model.draft_head, hidden_states)
        all_scores = scores.new_full((*scores.shape[:-1], self.config.vocab_size), float("-inf"))
        return all_scores.index_copy_(-1, self.model.draft_head.token_ids, scores)

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Greedily drafted ids, [tokens, hidden] -> [tokens]; vLLM calls it under use_local_argmax_reduction."""
        rows = self.draft_logits_processor.get_top_tokens(self.model.draft_head, hidden_states)
        return self.model.draft_head.token_ids[rows]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the tensors of the checkpoint, and check those of the draft head.

        Raises:
            PluginError: a tensor of the draft head is missing, or does not fit config.json.
        """
        if not get_pp_group().is_last_rank:
            loaded: set[str] = super().load_weights(weights)
            return loaded
        seen: set[str] = set()
        loaded = super().load_weights(self._checked(weights, seen))
        missing = sorted(f"{_PREFIX}{part}" for part in self._shapes() if part not in seen)
        if missing:
            raise PluginError(
                f"config.json announces a draft head, but the checkpoint lacks {' and '.join(missing)}; {_CURE}"
            )
        return loaded

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], seen: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, and check those of the draft head."""
        shapes = self._shapes()
        for name, tensor in weights:
            part = name.removeprefix(_PREFIX)
            if part != name:
                if tuple(tensor.shape) != shapes.get(part):
                    expected = list(shapes[part]) if part in shapes else "no such tensor"
                    raise PluginError(f"{name} is {list(tensor.shape)}, config.json says {expected}; {_CURE}")
                # Tensors have no content in the rehearsal of a start.
                if part == "token_ids" and not tensor.is_meta:
                    self._check_ids(name, tensor)
                seen.add(part)
            yield name, tensor

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the draft head that vLLM has built, packed or not, with the shapes that are stored."""
        rows = getattr(self.config, _SIZE_KEY)
        # vLLM pads the rows and shares them among GPUs.
        return {
            part: (rows, *tensor.shape[1:])
            if getattr(tensor, "output_dim", None) == 0
            else tuple(tensor.shape)
            for part, tensor in self.model.draft_head.named_parameters()
        }

    def _check_ids(self, name: str, ids: torch.Tensor) -> None:
        size = self.config.vocab_size
        if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= size:
            content = f"{ids.min().item()} to {ids.max().item()} in {ids.dtype}"
            raise PluginError(
                f"{name} has {content}, but the ids of the vocabulary are 0 to {size - 1}; {_CURE}"
            )
        if not bool((ids.diff() > 0).all()):
            raise PluginError(f"{name} does not ascend: an id is repeated or out of order; {_CURE}")


def _packed(vllm_config: Any) -> Any:
    """The quantisation config, if it may say of a draft head how it is packed; else None, for a head in 16 bits.

    In other formats vLLM takes every output head to be stored as the model's own is.
    """
    config = vllm_config.quant_config
    return config if config is not None and config.get_name() == "compressed-tensors" else None


def _sources(vllm_config: Any) -> Iterator[DefaultModelLoader.Source]:
    """The file of the draft head, for vLLM's loader; nothing where the folder or repository has no such file."""
    speculation = vllm_config.speculative_config
    model = vllm_config.model_config if speculation is None else speculation.draft_model_config
    if Path(model.model).is_dir():
        is_there = (Path(model.model) / _FILE).is_file()
    else:
        is_there = bool(list_filtered_repo_files(model.model, [_FILE], model.revision))
    if is_there:
        yield DefaultModelLoader.Source(model.model, model.revision, allow_patterns_overrides=[_FILE])
