"""Training of an MTP head against its frozen target, for the stage `redistill_mtp`."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from slimqwen.progress import Progress
from slimqwen.recipe.sampled_outputs import Output
from slimqwen.recipe.stage import Parameters, StageError

_Text = tuple[Output, Any]
"""An output of the target, and the target's hidden states for it."""

POSITIONS = 512
"""Number of positions whose logits are in memory at the same time."""


class HeadTraining(Parameters):
    """Parameters of the training of a head.

    Attributes:
        depth: number of tokens that the head learns to draft (K).
        trainable: fc+norms freezes the head's attention and MLP; all trains them too.
        rows: all learns the target's distribution over the whole vocabulary; drafted only over the ids of the draft
            head (`trim_draft_vocab`), so that nothing is spent on tokens that cannot be drafted.
        head: checkpoint starts from the checkpoint's head, fresh from a random head.
        steps: largest number of optimiser steps.
        batch: texts per step.
        learning_rate: peak rate of AdamW, reached after 1/20 of the steps, then falling linearly to 1/10.
        step_decay: loss weight of a draft step relative to the step before.
        validate_every: steps between two points of the learning curve; a killed run resumes from the last point.
        patience: number of points without improvement after which training ends.
        seed: seed for the order of texts and for a fresh head.
    """

    depth: Annotated[int, Field(ge=1, le=8)] = 4
    trainable: Literal["fc+norms", "all"] = "fc+norms"
    rows: Literal["all", "drafted"] = "all"
    head: Literal["checkpoint", "fresh"] = "checkpoint"
    steps: Annotated[int, Field(ge=1)] = 400
    batch: Annotated[int, Field(ge=1)] = 8
    learning_rate: Annotated[float, Field(gt=0)] = 5e-4
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    validate_every: Annotated[int, Field(ge=1)] = 50
    patience: Annotated[int, Field(ge=1)] = 4
    seed: int = 0


@dataclass(frozen=True)
class Point:
    """One point of the learning curve; a loss is the weighted mean divergence from the target, nats per token."""

    step: int
    training_loss: float | None
    """Mean over the steps since the previous point; None before the first step."""
    validation_loss: float


class Training:
    """One training run of an MTP head, whose state is saved at every point of its learning curve."""

    def __init__(
        self,
        model: Any,
        outputs: Sequence[Output],
        hidden: Sequence[Any],
        parameters: HeadTraining,
        state: Path,
    ) -> None:
        """Begin or resume a run.

        Args:
            model: a drafting model, whose backbone needs no layers.
            outputs: outputs of the target to train on.
            hidden: for each output, the backbone's states after its final norm: [1, tokens, hidden].
            state: file for the state of the run, from which a killed run resumes.
        """
        import torch

        self.step = 0
        self.curve: list[Point] = []
        self._model = model
        self._parameters = parameters
        self._state = state
        # Every tenth text validates, to decide when to stop. The held-out texts that judge the result are other ones.
        texts = list(zip(outputs, hidden, strict=True))
        self._validation = texts[::10]
        self._texts = [text for number, text in enumerate(texts) if number % 10]
        self._trainable = {
            name: parameter
            for name, parameter in model.head.named_parameters()
            if parameters.trainable == "all" or not name.startswith("layers.") or "norm" in name
        }
        for name, parameter in model.head.named_parameters():
            parameter.requires_grad_(name in self._trainable)
        self._optimiser = torch.optim.AdamW(
            self._trainable.values(), lr=parameters.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._best: dict[str, Any] = {}
        self._best_loss = float("inf")
        self._stale = 0
        self._losses: list[float] = []
        self._restore()

    def run(self, progress: Progress) -> None:
        """Train to the end, from the saved state if there is one, and load the best weights into the model."""
        parameters = self._parameters
        if not self.curve:
            self._validate()
        while self.step < parameters.steps and self._stale < parameters.patience:
            progress("training the head", self.step, parameters.steps)
            self._advance()
            if self.step % parameters.validate_every == 0 or self.step == parameters.steps:
                self._validate()
        progress("training the head", parameters.steps, parameters.steps)
        self._model.head.load_state_dict(self._best, strict=False)

    def _advance(self) -> None:
        import torch

        parameters = self._parameters
        self._model.head.train()
        loss = self._loss(self._batch())
        if not torch.isfinite(loss):
            raise StageError(f"the loss is {loss.item()} at step {self.step}; lower learning_rate")
        for group in self._optimiser.param_groups:
            group["lr"] = parameters.learning_rate * self._rate_scale()
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trainable.values(), 1.0)
        self._optimiser.step()
        self._losses.append(loss.item())
        self.step += 1

    def _rate_scale(self) -> float:
        steps = self._parameters.steps
        return min((self.step + 1) / max(1, steps // 20), 1 - 0.9 * self.step / steps)

    def _batch(self) -> list[_Text]:
        """The texts of the current step; each epoch reads all texts in a new random order."""
        batch, count = self._parameters.batch, len(self._texts)
        numbers = range(self.step * batch, (self.step + 1) * batch)
        return [self._texts[self._order(number // count)[number % count]] for number in numbers]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._texts)))
        random.Random(f"{self._parameters.seed} {epoch}").shuffle(order)
        return order

    def _loss(self, texts: Sequence[_Text]) -> Any:
        """Weighted mean divergence of the head's distributions from the target's, nats per token."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from slimqwen.models.mtp_head import DraftUnroller

        model, depth, decay = self._model, self._parameters.depth, self._parameters.step_decay
        outputs, states = zip(*texts, strict=True)
        # Padding comes after the text, where a causal model cannot see it.
        rows = [torch.tensor([*output.prompt, *output.continuation]) for output in outputs]
        tokens = pad_sequence(rows, batch_first=True).to(model.device)
        positions = torch.arange(tokens.shape[1], device=model.device)
        begins = torch.tensor([len(output.prompt) - 1 for output in outputs], device=model.device)[:, None]
        ends = torch.tensor([len(row) for row in rows], device=model.device)[:, None]
        hidden = pad_sequence([state[0] for state in states], batch_first=True).to(model.device)
        length = tokens.shape[1] - depth
        unroller = DraftUnroller(model, hidden[:, :length])
        total, weights = 0.0, 0.0
        for step in range(1, depth + 1):
            drafted = unroller.step(tokens[:, step : step + length])
            # Step k of position i learns the target's distribution at position i + k.
            scored = (positions[:length] >= begins) & (positions[:length] + step < ends)
            students, targets = drafted[scored], hidden[:, step : step + length][scored]
            divergence = divergence_from_target(model, students, targets, self._parameters.rows == "drafted")
            total = total + decay ** (step - 1) * divergence
            weights += decay ** (step - 1)
        return total / weights

    def _validate(self) -> None:
        import torch

        self._model.head.eval()
        batch = self._parameters.batch
        chunks = [self._validation[at : at + batch] for at in range(0, len(self._validation), batch)]
        with torch.no_grad():
            losses = [(self._loss(chunk).item(), len(chunk)) for chunk in chunks]
        loss = sum(value * size for value, size in losses) / len(self._validation)
        trained = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses = []
        self.curve.append(Point(self.step, trained, loss))
        self._stale += 1
        if loss < self._best_loss:
            self._best_loss, self._stale = loss, 0
            self._best = {
                name: parameter.detach().cpu().clone() for name, parameter in self._trainable.items()
            }
        self._save()

    def _save(self) -> None:
        import torch

        state = {
            "step": self.step,
            "stale": self._stale,
            "best_loss": self._best_loss,
            "best": self._best,
            "head": self._model.head.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "curve": [asdict(point) for point in self.curve],
        }
        partial = self._state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._state)

    def _restore(self) -> None:
        import torch

        if not self._state.is_file():
            return
        state = torch.load(self._state, weights_only=True)
        self.step, self._stale = state["step"], state["stale"]
        self._best_loss, self._best = state["best_loss"], state["best"]
        self._model.head.load_state_dict(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.curve = [Point(**point) for point in state["curve"]]


def divergence_from_target(model: Any, students: Any, targets: Any, drafted: bool) -> Any:
    """Mean Kullback-Leibler divergence of the student's next-token distribution from the target's, nats.

    With `drafted`, the target's probabilities of the draft head's ids are not normalised again: the weight of a
    position is the probability that the target gives there to ids that can be drafted.

    Args:
        students: [positions, hidden], states of the head.
        targets: [positions, hidden], states of the backbone for the same tokens.
        drafted: whether to compare only the ids of the draft head.
    """
    import torch
    import torch.nn.functional as F  # noqa: N812 (customary name)
    from torch.utils.checkpoint import checkpoint as recomputed

    def summed(student: Any, target: Any) -> Any:
        with torch.no_grad():
            target_logs = model.logits(target).float().log_softmax(-1)
            if drafted:
                target_logs = target_logs[..., model.draft_head.token_ids]
        student_scores = model.draft_head(student) if drafted else model.logits(student)
        student_logs = student_scores.float().log_softmax(-1)
        return F.kl_div(student_logs, target_logs, reduction="sum", log_target=True)

    if not len(students):
        return students.sum() * 0.0
    # Logits of a large vocabulary do not fit in memory for all positions; the backward pass computes them again.
    parts = zip(students.split(POSITIONS), targets.split(POSITIONS), strict=True)
    return sum(recomputed(summed, *part, use_reentrant=False) for part in parts) / len(students)
