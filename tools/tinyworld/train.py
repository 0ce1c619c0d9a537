"""Training of the tiny Qwen3.5 and its MTP head together, from scratch, on documents of the tiny world.

Schedules count steps and every random choice is a function of (seed, step), so a run is reproducible on one machine,
and an interrupted run continues from its last saved state to the same weights.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (customary name)
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from slimqwen.models.mtp_head import DraftingModel, DraftUnroller
from slimqwen.progress import Progress, silent
from tinyworld import TinyworldError
from tinyworld.context import encode
from tinyworld.documents import LONG_MIX, SHORT_MIX, START_MIX, Document, DocumentSampler
from tinyworld.model import TinyShape, build
from tinyworld.muon import Muon
from tinyworld.tasks import OverlapCheck, TaskItems, build_items, left_out_texts
from tinyworld.world import World

MOST_DRAFT_STEPS = 3
DRAFT_WINDOW = 256
"""Largest window of deep draft steps, tokens: their attention grows with length times depth."""


@dataclass(frozen=True)
class Phase:
    """A part of the training with one sequence length."""

    steps: int
    rows: int
    """Sequences per step."""
    length: int
    """Tokens per sequence."""
    mix: Mapping[str, float]
    """Shares of document kinds."""

    @property
    def tokens(self) -> int:
        """Tokens of the phase."""
        return self.steps * self.rows * self.length


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that decides the result, apart from the code and the machine."""

    phases: tuple[Phase, ...]
    shape: TinyShape = field(default_factory=TinyShape)
    world_seed: int = 7
    seed: int = 0
    adam_rate: float = 3e-3
    """Peak rate of AdamW, for embeddings, norms, convolutions and other small tensors."""
    muon_rate: float = 0.02
    """Peak rate of Muon, for the matrices."""
    muon_decay: float = 0.05
    adam_decay: float = 0.01
    warmup_steps: int = 50
    decay_share: float = 0.5
    """Share of the steps, at the end, in which the rates fall linearly to 2 % of their peak."""
    largest_gradient: float = 1.0
    draft_weight: float = 0.5
    """Weight of the head's loss relative to the backbone's."""
    draft_share: float = 0.35
    """Share of positions at which the head is scored; most of its loss's cost is lm_head."""
    deep_draft_from: float = 0.5
    """Share of the steps after which every other step unrolls the head `MOST_DRAFT_STEPS` deep."""
    threads: int = 2
    """CPU threads; part of the plan because the number decides the order of summation."""
    save_every: int = 100
    look_every: int = 100
    """Steps between two points of the learning curve."""

    @property
    def steps(self) -> int:
        """Total number of steps."""
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Total number of tokens."""
        return sum(phase.tokens for phase in self.phases)


def standard_plan(steps: int = 1300) -> TrainingPlan:
    """The plan of the committed checkpoint: 2,048 tokens per step, in sequences of 128, then 512, then 2,048."""
    start, middle, late = (round(steps * share) for share in (0.16, 0.10, 0.16))
    return TrainingPlan(
        phases=(
            Phase(start, rows=16, length=128, mix=START_MIX),
            Phase(steps - start - middle - late, rows=16, length=128, mix=SHORT_MIX),
            Phase(middle, rows=4, length=512, mix=LONG_MIX),
            Phase(late, rows=1, length=2048, mix=LONG_MIX),
        )
    )


@dataclass(frozen=True)
class TrainingResult:
    """A trained model and its learning curve."""

    model: DraftingModel
    curve: tuple[tuple[int, float, float], ...]
    """Step, mean loss of the backbone and of the head's first draft since the point before, nats per token."""
    seconds: float
    """Wall time of the steps over all runs."""
    interruptions: int


class PackedTokens:
    """The documents of one phase, joined."""

    def __init__(self, tokens: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], phase: Phase) -> None:
        self.tokens = tokens
        self.weights = weights
        self._phase = phase

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Step `step` of the phase: token ids and loss weights, each [rows, length + 1 + MOST_DRAFT_STEPS]."""
        length = self._phase.length
        first = step * self._phase.rows * length
        starts = [first + row * length for row in range(self._phase.rows)]
        width = length + 1 + MOST_DRAFT_STEPS
        rows = np.stack([self.tokens[start : start + width] for start in starts]).astype(np.int64)
        weights = np.stack([self.weights[start : start + width] for start in starts])
        return torch.from_numpy(rows), torch.from_numpy(weights)


def pack_documents(
    documents: Iterator[Document],
    tokenizer: PreTrainedTokenizerFast,
    phase: Phase,
    progress: Progress = silent,
) -> PackedTokens:
    """Encode and join as many documents as the phase needs."""
    needed = phase.tokens + 1 + MOST_DRAFT_STEPS
    tokens: list[int] = []
    weights: list[float] = []
    while len(tokens) < needed:
        parts = [part for document in itertools.islice(documents, 2_000) for part in document.parts]
        # Parts meet at added tokens and line breaks, where the tokenizer splits anyway.
        for part, encoding in zip(parts, encode(tokenizer, [part.text for part in parts]), strict=True):
            tokens += encoding
            weights += [part.weight] * len(encoding)
        progress("packing documents", min(len(tokens), needed), needed)
    return PackedTokens(np.array(tokens[:needed], np.int32), np.array(weights[:needed], np.float32), phase)


def train(
    plan: TrainingPlan,
    tokenizer: PreTrainedTokenizerFast,
    state_folder: Path,
    progress: Progress = silent,
) -> TrainingResult:
    """Train by a plan, or continue an interrupted run of the same plan.

    Args:
        state_folder: folder of saved states; one file per plan and training text.
        progress: receives (activity, done, total) in steps.

    Returns:
        The trained model in evaluation mode, float32.

    Raises:
        TinyworldError: the loss is not finite, or a test item is in the training text.
    """
    world = World(plan.world_seed)
    items = build_items(world)
    left_out = left_out_texts(world)
    packed = []
    for number, phase in enumerate(plan.phases):
        documents = DocumentSampler(world, left_out, phase.mix).stream((plan.seed + 1) * 1_000 + number)
        packed.append(pack_documents(_checked(documents, items), tokenizer, phase, progress))
    state_file = state_folder / f"{_fingerprint(plan, packed)}.pt"
    with _reproducible(plan.threads):
        run = _Run(plan, packed)
        run.restore(state_file)
        while run.step < plan.steps:
            progress("training", run.step, plan.steps)
            run.advance()
            if run.step % plan.save_every == 0:
                run.save(state_file)
        progress("training", plan.steps, plan.steps)
        run.save(state_file)
        return TrainingResult(run.model.eval(), tuple(run.curve), run.seconds, run.interruptions)


class _Run:
    """The state of one training run."""

    def __init__(self, plan: TrainingPlan, packed: list[PackedTokens]) -> None:
        self.plan = plan
        self.model = build(plan.shape, plan.seed).train()
        self.step = 0
        self.curve: list[tuple[int, float, float]] = []
        self.seconds = 0.0
        self.interruptions = 0
        self._packed = packed
        self._losses: list[tuple[float, float]] = []
        named = list(self.model.named_parameters())
        matrices = [(name, parameter) for name, parameter in named if _is_matrix(name, parameter)]
        in_muon = {name for name, _ in matrices}
        self._parameters = [parameter for _, parameter in named]
        self._muon = Muon([parameter for _, parameter in matrices], plan.muon_decay)
        self._adam = torch.optim.AdamW(
            [parameter for name, parameter in named if name not in in_muon],
            lr=plan.adam_rate,
            betas=(0.9, 0.98),
            weight_decay=plan.adam_decay,
            fused=True,
        )

    def advance(self) -> None:
        """One step."""
        began = time.monotonic()
        tokens, weights = self._batch()
        loss, main, draft = self._loss(tokens, weights)
        if not torch.isfinite(loss):
            raise TinyworldError(
                f"the loss is {loss.item()} at step {self.step}; lower the rates in the training plan"
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self.plan.largest_gradient)
        scale = self._rate_scale()
        for group in self._adam.param_groups:
            group["lr"] = self.plan.adam_rate * scale
        self._adam.step()
        self._muon.step(self.plan.muon_rate * scale)
        for parameter in self._parameters:
            parameter.grad = None
        self._losses.append((main, draft))
        self.step += 1
        if self.step % self.plan.look_every == 0 or self.step == self.plan.steps:
            self._add_curve_point()
        self.seconds += time.monotonic() - began

    def save(self, file: Path) -> None:
        """Write the whole state, by one rename."""
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "backbone": self.model.backbone.state_dict(),
            "head": self.model.head.state_dict(),
            "adam": self._adam.state_dict(),
            "muon": self._muon.state_dict(),
            "curve": self.curve,
            "losses": self._losses,
            "seconds": self.seconds,
            "interruptions": self.interruptions,
        }
        partial = file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(file)

    def restore(self, file: Path) -> None:
        """Load a saved state, if there is one."""
        if not file.is_file():
            return
        state = torch.load(file, weights_only=True)
        self.model.backbone.load_state_dict(state["backbone"])
        self.model.head.load_state_dict(state["head"])
        self._adam.load_state_dict(state["adam"])
        self._muon.load_state_dict(state["muon"])
        self.step = state["step"]
        self.curve = state["curve"]
        self._losses = [tuple(pair) for pair in state["losses"]]
        self.seconds = state["seconds"]
        # Loading the state of a finished run is no interruption.
        self.interruptions = state["interruptions"] + (self.step < self.plan.steps)

    def _batch(self) -> tuple[Tensor, Tensor]:
        step = self.step
        for packed, phase in zip(self._packed, self.plan.phases, strict=True):
            if step < phase.steps:
                return packed.batch(step)
            step -= phase.steps
        raise IndexError(f"step {self.step} is past the plan's end")

    def _loss(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, float, float]:
        length = tokens.shape[1] - 1 - MOST_DRAFT_STEPS
        hidden = self.model.hidden_states(tokens[:, :length])
        main = _cross_entropy(self.model, hidden, tokens[:, 1 : length + 1], weights[:, 1 : length + 1])
        drafts = self._draft_losses(hidden, tokens, weights)
        loss = main
        for depth, draft in enumerate(drafts):
            loss = loss + self.plan.draft_weight * 0.7**depth * draft
        return loss, main.item(), drafts[0].item()

    def _draft_losses(self, hidden: Tensor, tokens: Tensor, weights: Tensor) -> list[Tensor]:
        """Losses of the head's draft steps on half of the rows, or of the windows of a single row."""
        rows, length = hidden.shape[:2]
        deep = self.step >= self.plan.deep_draft_from * self.plan.steps and self.step % 2 == 1
        window = min(length, DRAFT_WINDOW) if deep else length
        # Windows of the rows, each with the tokens after it.
        states = hidden.reshape(rows * length // window, window, -1)
        ahead = window + 1 + MOST_DRAFT_STEPS
        token_windows = tokens.unfold(1, ahead, window).reshape(states.shape[0], ahead)
        weight_windows = weights.unfold(1, ahead, window).reshape(states.shape[0], ahead)
        if states.shape[0] > 1:
            half = slice(self.step // 2 % 2, None, 2)
            states, token_windows, weight_windows = states[half], token_windows[half], weight_windows[half]
        rng = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + self.step)
        unroller = DraftUnroller(self.model, states)
        losses = []
        for step in range(1, (MOST_DRAFT_STEPS if deep else 1) + 1):
            drafted = unroller.step(token_windows[:, step : step + window])
            scored = torch.rand(states.shape[:2], generator=rng) < self.plan.draft_share
            target_weights = weight_windows[:, step + 1 : step + 1 + window].clamp(max=1.0) * scored
            losses.append(
                _cross_entropy(
                    self.model, drafted, token_windows[:, step + 1 : step + 1 + window], target_weights
                )
            )
        return losses

    def _rate_scale(self) -> float:
        warm = min(1.0, (self.step + 1) / self.plan.warmup_steps)
        left = (1 - self.step / self.plan.steps) / self.plan.decay_share
        return warm * min(1.0, max(0.02, left))

    def _add_curve_point(self) -> None:
        main, draft = (sum(column) / len(self._losses) for column in zip(*self._losses, strict=True))
        self._losses = []
        self.curve.append((self.step, main, draft))


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    # AdamW suits the small gate projections (a few rows) and the embedding better.
    return parameter.dim() == 2 and "embed" not in name and min(parameter.shape) >= 32


def _cross_entropy(model: DraftingModel, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy over the positions with a weight; zero if there are none."""
    flat = weights.reshape(-1)
    chosen = flat.nonzero().squeeze(1)
    if not len(chosen):
        return hidden.sum() * 0.0
    scores = model.logits(hidden.reshape(-1, hidden.shape[-1]).index_select(0, chosen))
    losses = F.cross_entropy(scores, targets.reshape(-1).index_select(0, chosen), reduction="none")
    picked = flat.index_select(0, chosen)
    return (losses * picked).sum() / picked.sum()


def _checked(documents: Iterator[Document], items: TaskItems) -> Iterator[Document]:
    overlap = OverlapCheck(items)
    for document in documents:
        if item := overlap.find(document):
            raise TinyworldError(
                f"test item {item} is in the training text; add it to the sampler's left-out texts"
            )
        yield document


def _fingerprint(plan: TrainingPlan, packed: list[PackedTokens]) -> str:
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(plan), sort_keys=True, default=dict).encode())
    for phase in packed:
        digest.update(phase.tokens.tobytes())
        digest.update(phase.weights.tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _reproducible(threads: int) -> Iterator[None]:
    """Fix threads and deterministic kernels during training; the caller's settings are restored afterwards."""
    before_threads, before_mode = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(before_threads)
        torch.use_deterministic_algorithms(before_mode)
