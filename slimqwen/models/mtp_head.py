"""The multi-token-prediction (MTP) head of Qwen3.5, which drafts tokens for speculative decoding.

A checkpoint stores the head under `mtp.`: `fc` [hidden, 2 x hidden], `layers.0` (one full-attention decoder
layer), `norm`, `pre_fc_norm_hidden` and `pre_fc_norm_embedding`. The head shares the backbone's embedding and lm_head.
transformers has no such module and skips `mtp.*` when it loads, so the head is built here from transformers' decoder
layer. Names, order of concatenation and wiring follow vLLM's `Qwen3_5MultiTokenPredictor`.

At position i the head reads the backbone's hidden state AFTER the final norm and the embedding of token i+1; its
output goes through lm_head and predicts token i+2. To draft further it reads its own output instead of the backbone's
hidden state.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.checkpoint.weights import read_weights
from slimqwen.errors import SlimqwenError
from slimqwen.models.language_model import load_language_model, load_without_layers, read_plain
from slimqwen.stats.estimates import Z

PREFIX = "mtp."
"""Prefix of the head's tensor names in a checkpoint."""


class MtpHeadError(SlimqwenError):
    """An MTP head is missing, incomplete or of another shape than the config's, or texts are too short to draft."""


class MtpHead(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """The MTP head, which makes one draft step.

    Args:
        config: the backbone's `Qwen3_5TextConfig`, for the dimensions. The weights are random.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        layer_config = copy.deepcopy(config)
        # The head's only layer has full attention, even if layer 0 of the backbone has not.
        layer_config.layer_types = ["full_attention"]
        layer_config.num_hidden_layers = 1
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(layer_config, 0)])
        self.norm = Qwen3_5RMSNorm(hidden, eps=epsilon)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, eps=epsilon)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, eps=epsilon)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config.initializer_range)

    def forward(
        self,
        hidden: Tensor,
        next_embeddings: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: DynamicCache | None = None,
    ) -> Tensor:
        """Make one draft step for every position at once.

        Args:
            hidden: [batch, length, hidden], the backbone's output after its final norm, or this head's own output.
            next_embeddings: [batch, length, hidden], the embedding of the token that follows each position.
            position_embeddings: cosines and sines, each [batch, length, rotary dims].
            attention_mask: bool [1 or batch, 1, length, keys], True for keys that a query sees; causal if None.
            cache: keys and values of the earlier steps of the draft; extended by this step.

        Returns:
            [batch, length, hidden], after the final norm: the input of lm_head and of the next draft step.
        """
        joined = torch.cat(
            [self.pre_fc_norm_embedding(next_embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1
        )
        mixed = self.layers[0](
            self.fc(joined),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=cache,
        )
        return self.norm(mixed)


class DraftHead(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """The output head of a trimmed draft vocabulary.

    Args:
        weight: [rows, hidden].
        token_ids: [rows], the token id of each row.
    """

    def __init__(self, weight: Tensor, token_ids: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("token_ids", token_ids)

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores of the rows: [..., hidden] -> [..., rows]."""
        return nn.functional.linear(hidden, self.weight)


class DraftingModel(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """The backbone and the MTP head of one checkpoint.

    Args:
        backbone: `Qwen3_5ForCausalLM`.
        draft_head: the output head of the drafts; None if drafts use the backbone's.
    """

    def __init__(self, backbone: Any, head: MtpHead, draft_head: DraftHead | None = None) -> None:
        super().__init__()
        self.backbone, self.head, self.draft_head = backbone, head, draft_head

    @property
    def device(self) -> torch.device:
        """Device of the backbone's parameters."""
        return self.backbone.device

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """The backbone's output after the final norm: [batch, length] token ids -> [batch, length, hidden]."""
        hidden: Tensor = self.backbone.model(tokens, use_cache=False).last_hidden_state
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of token ids: [...] -> [..., hidden]."""
        embeddings: Tensor = self.backbone.model.embed_tokens(tokens)
        return embeddings

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores: [..., hidden] -> [..., vocabulary]."""
        scores: Tensor = self.backbone.lm_head(hidden)
        return scores

    def drafts(self, hidden: Tensor) -> Tensor:
        """The token ids that the head drafts greedily: its output [..., hidden] -> [...]."""
        if self.draft_head is None:
            return self.logits(hidden).argmax(dim=-1)
        drafted: Tensor = self.draft_head.token_ids[self.draft_head(hidden).argmax(dim=-1)]
        return drafted


class DraftUnroller:
    """Makes several draft steps from every position of a text, with the same attention as in a server.

    A server that drafts from position i uses the keys and values of the true text up to i (first-step keys), then
    those of its own draft. Here all positions make a step together: step k of position i sees the first-step keys of
    the positions up to i and the keys of its own earlier steps, and nothing else. The result is exact, and a step
    costs one pass of the head.

    Args:
        model: the model whose head drafts.
        hidden: [batch, length, hidden], the backbone's output after its final norm for the whole text.
    """

    def __init__(self, model: DraftingModel, hidden: Tensor) -> None:
        self._model = model
        self._batch, self._length, _ = hidden.shape
        self._state = hidden
        self._steps = 0
        self._cache = DynamicCache()
        device = hidden.device
        self._causal = torch.ones(self._length, self._length, dtype=torch.bool, device=device).tril()
        self._own = torch.eye(self._length, dtype=torch.bool, device=device)

    def step(self, next_tokens: Tensor) -> Tensor:
        """Draft one step further.

        Args:
            next_tokens: token ids [batch, length]: for step k (from 1) of position i, the true or drafted token at
                i + k.

        Returns:
            [batch, length, hidden]; lm_head turns it into the prediction of the token at i + k + 1.
        """
        positions = torch.arange(self._length, device=next_tokens.device) + self._steps
        rotary = self._model.backbone.model.rotary_emb(
            self._state, positions[None, None].expand(3, self._batch, self._length)
        )
        mask = torch.cat([self._causal, *[self._own] * self._steps], dim=1)[None, None]
        self._state = self._model.head(self._state, self._model.embed(next_tokens), rotary, mask, self._cache)
        self._steps += 1
        return self._state


@dataclass(frozen=True)
class DraftAcceptance:
    """Numbers of drafted tokens that the target accepts, counted as in a server.

    Attributes:
        depth: tokens drafted per verify step (K).
        drafts: number of drafts, which is that of verify steps.
        accepted_per_position: number of accepted tokens at each position 1..K.
        mean_length: acceptance length, tokens.
        standard_error: standard error of `mean_length`, with texts as clusters; 0 for a single text.
    """

    depth: int
    """Tokens drafted per verify step (K)."""
    drafts: int
    """Number of drafts, which is that of verify steps."""
    accepted_per_position: tuple[int, ...]
    """Number of accepted tokens at each position 1..K of a draft."""
    mean_length: float
    """Acceptance length: tokens per verify step, 1 + accepted / drafts."""
    standard_error: float
    """Standard error of `mean_length`, with texts as clusters; 0 for a single text."""

    @property
    def rates(self) -> tuple[float, ...]:
        """For each position 1..K, the share of verify steps whose draft was accepted up to and including it."""
        return tuple(count / self.drafts for count in self.accepted_per_position)


def served_steps(correct: Sequence[int]) -> list[int]:
    """The number of accepted tokens of each verify step of a server over one text.

    After a step that accepted n tokens, the next step starts n + 1 positions further.

    Args:
        correct: for each position, the number of correct drafted tokens (`drafts_accepted`).
    """
    steps: list[int] = []
    position = 0
    while position < len(correct):
        steps.append(correct[position])
        position += correct[position] + 1
    return steps


def summarise_acceptance(texts: Sequence[Sequence[int]], depth: int) -> DraftAcceptance:
    """Summarise the acceptance over several texts.

    Args:
        texts: for each text, the accepted tokens of each of its verify steps (`served_steps`).
        depth: drafted tokens per verify step (K).

    Raises:
        MtpHeadError: the texts are too short for a single step.
    """
    drafts = sum(len(steps) for steps in texts)
    if not drafts:
        raise MtpHeadError(
            f"no text is long enough to draft {depth} tokens; give longer texts or a smaller depth"
        )
    flat = [count for steps in texts for count in steps]
    per_position = tuple(sum(count > position for count in flat) for position in range(depth))
    ratio = sum(flat) / drafts
    clusters = [(sum(steps), len(steps)) for steps in texts if steps]
    squares = sum((accepted - ratio * taken) ** 2 for accepted, taken in clusters)
    count = len(clusters)
    error = math.sqrt(count / (count - 1) * squares) / drafts if count > 1 else 0.0
    return DraftAcceptance(depth, drafts, per_position, 1 + ratio, error)


def drafts_accepted(
    model: DraftingModel, text: Sequence[int], start: int, depth: int, hidden: Tensor | None = None
) -> list[int]:
    """For every position, count the consecutive greedy drafted tokens that agree with the tokens of the text.

    Args:
        model: model in evaluation mode.
        text: token ids of a prompt and of the target's own greedy continuation.
        start: index of the prompt's last token.
        depth: drafted tokens per position (K).
        hidden: [1, tokens, hidden], the backbone's output after its final norm for all but the last `depth` + 1 tokens;
            None to compute it.

    Returns:
        One count (0..depth) per position from `start` on, as long as `depth` + 1 tokens follow.
    """
    tokens = torch.tensor([list(text)], device=model.device)
    # The last position needs its next token and the true tokens of its `depth` drafts.
    length = tokens.shape[1] - 1 - depth
    if length <= start:
        return []
    correct = torch.zeros(length, dtype=torch.long, device=tokens.device)
    alive = torch.ones(length, dtype=torch.bool, device=tokens.device)
    following = tokens[:, 1 : length + 1]
    with torch.no_grad():
        states = model.hidden_states(tokens[:, :length]) if hidden is None else hidden.to(tokens.device)
        unroller = DraftUnroller(model, states)
        for step in range(depth):
            following = model.drafts(unroller.step(following))
            alive &= following[0] == tokens[0, step + 2 : step + 2 + length]
            correct += alive
    counts: list[int] = correct[start:].tolist()
    return counts


def count_served_steps(
    model: DraftingModel,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    depth: int,
    hidden: Sequence[Tensor] | None = None,
) -> list[list[int]]:
    """Count the greedy drafted tokens that the target accepts on its own greedy continuations, without a server.

    Args:
        model: model in evaluation mode.
        texts: token ids of (prompt, greedy continuation by the same backbone).
        depth: drafted tokens per verify step (K).
        hidden: for each text [1, tokens, hidden], the backbone's output after its final norm for all but the last
            `depth` + 1 tokens; None to compute it.

    Returns:
        For each text, the accepted tokens of each of its verify steps.
    """
    return [
        served_steps(drafts_accepted(model, [*prompt, *continuation], len(prompt) - 1, depth, states))
        for (prompt, continuation), states in zip(texts, hidden or [None] * len(texts), strict=True)
    ]


def gain_interval(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> tuple[float, float]:
    """The 95 % interval of the gain in acceptance length from one head to another, with texts as clusters.

    Args:
        before: for each text, the accepted tokens of each of its verify steps, with the first head.
        after: the same for the same texts with the other head.

    Returns:
        Lower and upper end, tokens; a negative gain is a loss.
    """
    influences = np.zeros(len(before))
    gain = 0.0
    for sign, texts in ((-1, before), (1, after)):
        accepted, steps = np.array([[sum(text), len(text)] for text in texts], dtype=float).T
        ratio = accepted.sum() / steps.sum()
        gain += sign * ratio
        influences += sign * (accepted - ratio * steps) / steps.sum()
    count = len(influences)
    half_width = Z * math.sqrt(count / (count - 1) * float(np.sum(influences**2)))
    return gain - half_width, gain + half_width


def load_drafting_model(
    folder: Path, dtype: torch.dtype = torch.float32, *, with_layers: bool = True
) -> DraftingModel:
    """Load backbone, head and draft head of a text-only or multimodal checkpoint, in evaluation mode.

    Quantised weights are dequantised.

    Args:
        with_layers: whether to load the backbone's decoder layers; without them the caller has to give hidden states.

    Raises:
        MtpHeadError: `mtp.*` is absent, incomplete or of another shape.
        CorruptCheckpointError: transformers has no such model, a tensor is missing or has another shape, or the token
            ids of the draft head cannot be used.
    """
    head_tensors = read_head_tensors(folder)
    backbone = (load_language_model if with_layers else load_without_layers)(folder, dtype)
    head = MtpHead(backbone.config)
    _check_head(folder, head, head_tensors)
    head.load_state_dict(head_tensors)
    model = DraftingModel(backbone, head.to(dtype), _read_draft_head(folder, backbone.config, dtype))
    model.eval()
    return model


def read_head_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the MTP head by name without `mtp.`, quantised ones in float32, without those of the draft head.

    Raises:
        MtpHeadError: the checkpoint has no MTP head.
        UnsupportedFormatError: the MTP head is quantised in a form that `Weight` does not read.
    """
    tensors = {
        name.removeprefix(PREFIX): read_plain(weight)
        for name, weight in read_weights(folder).items()
        if name.startswith(PREFIX) and not name.startswith(draft_head.PREFIX)
    }
    if not tensors:
        raise MtpHeadError(
            f"{folder} has no MTP head and cannot draft; choose a checkpoint with mtp.* tensors"
        )
    return tensors


def _read_draft_head(folder: Path, config: Any, dtype: torch.dtype) -> DraftHead | None:
    stored = list_tensors(folder)
    ids = draft_head.read_token_ids(stored, config.vocab_size)
    if ids is None:
        return None
    weight = read_plain(read_weights(folder)[draft_head.WEIGHT])
    return DraftHead(weight.to(dtype), torch.from_numpy(ids))


def _check_head(folder: Path, head: MtpHead, tensors: dict[str, Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise MtpHeadError(
                f"{folder}: {PREFIX}{name} is {shapes.get(name, 'missing')}, but config.json asks for "
                f"{expected.get(name, 'no such tensor')}; make the checkpoint anew"
            )
