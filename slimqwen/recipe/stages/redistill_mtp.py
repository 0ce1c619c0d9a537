"""The stage `redistill_mtp`: train the MTP head to predict the outputs of the quantised, pruned target.

The target is frozen. The head is unrolled `depth` steps over the target's own outputs (the stage `sample_outputs`),
reads its own hidden state from the second step on, and in each step learns the target's distribution with a weight
that falls with the step (FastMTP, arXiv 2509.18362, where the step weights are 0.6 ** step).

The original head is kept unless the trained one has a longer acceptance length on held-out texts, so the stage never
makes a checkpoint worse. Both are also measured in vLLM, and the two measurements must agree.
"""

import gc
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import bytes_on_disk, carry_side_files
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, from_torch, list_tensors, rewrite, torch_dtype
from slimqwen.models.shape import Shape
from slimqwen.progress import Progress
from slimqwen.recipe.stage import TORCH_ENVIRONMENT, Facts, Needs, Parameters, Stage, StageError
from slimqwen.recipe.stages.sample_outputs import Output, read_outputs

CURVE = "redistill_mtp.json"
"""File beside the checkpoint: the learning curve, and the acceptance before and after."""

AGREEMENT = 0.05
"""Largest relative difference between the acceptance length measured here and in vLLM."""

_IMPORTS_BYTES = 3 * 2**30
_POSITIONS = 512
"""Positions whose logits are in memory at the same time."""


class RedistillParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        depth: number of tokens that the head learns to draft (K).
        trainable: fc+norms freezes the head's attention and MLP; all trains them too.
        rows: all learns the target's distribution over the whole vocabulary; drafted over the ids of the draft head
            (`trim_draft_vocab`) alone, so that nothing is spent on tokens that cannot be drafted.
        head: checkpoint starts from the checkpoint's head, fresh from a random one.
        steps: largest number of optimiser steps.
        batch: texts per step.
        learning_rate: peak rate of AdamW, reached after 1/20 of the steps, then falling linearly to 1/10.
        step_decay: loss weight of a draft step relative to the step before.
        validate_every: steps between two points of the learning curve; a killed run resumes from the last point.
        patience: points without an improvement after which training ends.
        seed: seed of the order of texts, and of a fresh head.
        threads: CPU threads; a parameter because it decides the order of summation.
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
    threads: Annotated[int, Field(ge=1)] = 2


@dataclass(frozen=True)
class Point:
    """One point of the learning curve. Losses: weighted mean divergence from the target, nats per token."""

    step: int
    training_loss: float | None
    """Mean since the previous point; None before the first step."""
    validation_loss: float


def run(
    source: Path, destination: Path, parameters: RedistillParameters, progress: Progress, *, unfinished: Path
) -> Facts:
    """Write source to destination with the trained head, or with the original one if training improved nothing.

    Raises:
        CorpusError: source has no `OUTPUTS` beside it.
        MtpHeadError: the MTP head of source is incomplete.
        StageError: source has no MTP head in 16 or 32 bits, or no draft head where `rows` asks for one; a loss is not
            finite; or vLLM measures a different acceptance length.
    """
    # Slow to import, and needed only in the process that trains.
    import torch

    from slimqwen.models.mtp_head import PREFIX, MtpHead, load_drafting_model, measure_acceptance

    progress("loading", 0, 0)
    torch.set_num_threads(parameters.threads)
    torch.use_deterministic_algorithms(True)
    stored = list_tensors(source)
    _check_head(source, stored)
    reshape(Shape.of_config(checkpoint.read_config(source)), parameters)
    outputs = list(read_outputs(source))
    held_out = [output for output in outputs if output.held_out]
    sampled = [output for output in outputs if not output.held_out]
    cuda = torch.cuda.is_available()
    model = load_drafting_model(source, torch.bfloat16 if cuda else torch.float32)
    model.backbone.requires_grad_(False)
    model.head.float()
    if cuda:
        model.backbone.to("cuda")
        model.head.to("cuda")
        if model.draft_head is not None:
            model.draft_head.to("cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
        texts = [
            (output.prompt, _extended_continuation(model, output, parameters.depth - 1))
            for output in held_out
        ]
        before = measure_acceptance(model, texts, parameters.depth)
        if parameters.head == "fresh":
            torch.manual_seed(parameters.seed)
            model.head.load_state_dict(MtpHead(model.backbone.config).state_dict())
        training = _Training(model, sampled, parameters, unfinished / "state.pt")
        training.run(progress)
        for name, parameter in model.head.named_parameters():
            # The stored precision is measured, not the float32 weights of training.
            parameter.data = parameter.data.to(torch_dtype(stored[PREFIX + name].dtype)).float()
        after = measure_acceptance(model.eval(), texts, parameters.depth)
    improved = after.mean_length > before.mean_length
    trained = {PREFIX + name: tensor.detach().cpu() for name, tensor in model.head.state_dict().items()}
    if not improved:
        trained = {}
    curve, steps = training.curve, training.step
    del training, model
    gc.collect()

    def change(name: str, info: TensorInfo) -> dict[str, NewTensor] | None:
        return {name: from_torch(trained[name], info.dtype)} if name in trained else None

    rewrite(source, destination, change, progress)
    carry_side_files(source, destination)
    write_config(destination, checkpoint.read_config(source))
    served = [
        _served(folder, held_out, parameters.depth, progress)
        for folder in ((source, destination) if improved else (source,))
    ]
    published = after if improved else before
    _check_agreement(before.mean_length, served[0], "before")
    _check_agreement(published.mean_length, served[-1], "after")
    lengths = {
        "acceptance_length_before": round(before.mean_length, 4),
        "acceptance_length_after": round(after.mean_length, 4),
        "acceptance_length_before_vllm": round(served[0], 4),
        "acceptance_length_kept_vllm": round(served[-1], 4),
    }
    record = {
        "schema": "redistill_mtp/1",
        "parameters": parameters.model_dump(mode="json"),
        "kept": "trained" if improved else "original",
        "before": asdict(before) | {"rates": before.rates},
        "after": asdict(after) | {"rates": after.rates},
        **lengths,
        "learning_curve": [asdict(point) for point in curve],
    }
    (destination / CURVE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return {"kept": str(record["kept"]), "steps": steps, **lengths}


def needs(source: Path, parameters: RedistillParameters) -> Needs:
    """Disk: the size of source. Memory: unpacked weights, the head with its optimiser, logits of some positions."""
    config = checkpoint.text_config(checkpoint.read_config(source))
    stored = list_tensors(source)
    _check_head(source, stored)
    # An integer of a packed weight holds up to eight numbers.
    elements = sum(info.elements * (8 if info.dtype == "I32" else 1) for info in stored.values())
    head = sum(info.elements for name, info in stored.items() if name.startswith("mtp."))
    logits = 6 * _POSITIONS * config["vocab_size"]
    return Needs(
        disk_bytes=bytes_on_disk(source),
        memory_bytes=_IMPORTS_BYTES + 4 * (elements + 5 * head + logits),
    )


def reshape(shape: Shape, parameters: RedistillParameters) -> Shape:
    """The same dimensions.

    Raises:
        StageError: it has no draft head to train for.
    """
    if parameters.rows == "drafted" and not shape.text.get(draft_head.SIZE_KEY):
        raise StageError(
            "redistill_mtp: rows is drafted, but there is no draft head to train for; put trim_draft_vocab before it"
        )
    return shape


def _check_head(source: Path, stored: Mapping[str, TensorInfo]) -> None:
    """Raise a StageError unless the checkpoint has an MTP head that is not quantised."""
    head = {
        name: info
        for name, info in stored.items()
        if name.startswith("mtp.") and not name.startswith(draft_head.PREFIX)
    }
    if not head:
        raise StageError(
            f"{source} has no MTP head; take redistill_mtp out of the recipe, or choose a base with mtp.* tensors"
        )
    quantised = [
        f"{name} is {info.dtype}"
        for name, info in head.items()
        if not name.endswith(".weight") or info.dtype not in ("BF16", "F16", "F32")
    ]
    if quantised:
        raise StageError(
            f"{source}: its MTP head is quantised ({min(quantised)}); train it before calibrate packs `mtp`, or choose "
            "a base whose head has 16 bits"
        )


class _Training:
    """State of one training run, saved at every point of its learning curve."""

    def __init__(
        self, model: Any, outputs: Sequence[Output], parameters: RedistillParameters, state: Path
    ) -> None:
        import torch

        self.step = 0
        self.curve: list[Point] = []
        self._model = model
        self._parameters = parameters
        self._state = state
        # Every tenth text decides when to stop; the held-out texts that judge the result are others.
        self._validation = list(outputs[::10])
        self._texts = [output for number, output in enumerate(outputs) if number % 10]
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
        """Train to the end, resuming a killed run; leaves the best weights in the model."""
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

    def _batch(self) -> list[Output]:
        """The texts of a step: each epoch reads all of them in a new random order."""
        batch, count = self._parameters.batch, len(self._texts)
        numbers = range(self.step * batch, (self.step + 1) * batch)
        return [self._texts[self._order(number // count)[number % count]] for number in numbers]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._texts)))
        random.Random(f"{self._parameters.seed} {epoch}").shuffle(order)
        return order

    def _loss(self, outputs: Sequence[Output]) -> Any:
        """Weighted mean divergence of the head's distributions from the target's, nats per token."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from slimqwen.models.mtp_head import DraftUnroller

        model, depth, decay = self._model, self._parameters.depth, self._parameters.step_decay
        # Padding comes after the text, where a causal model cannot see it.
        rows = [torch.tensor([*output.prompt, *output.continuation]) for output in outputs]
        tokens = pad_sequence(rows, batch_first=True).to(model.device)
        positions = torch.arange(tokens.shape[1], device=model.device)
        begins = torch.tensor([len(output.prompt) - 1 for output in outputs], device=model.device)[:, None]
        ends = torch.tensor([len(row) for row in rows], device=model.device)[:, None]
        with torch.no_grad():
            hidden = model.hidden_states(tokens)
        length = tokens.shape[1] - depth
        unroller = DraftUnroller(model, hidden[:, :length])
        total, weights = 0.0, 0.0
        for step in range(1, depth + 1):
            drafted = unroller.step(tokens[:, step : step + length])
            # Step k of position i learns the target's distribution at position i + k.
            scored = (positions[:length] >= begins) & (positions[:length] + step < ends)
            students, targets = drafted[scored], hidden[:, step : step + length][scored]
            divergence = _divergence(model, students, targets, self._parameters.rows == "drafted")
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


def _divergence(model: Any, students: Any, targets: Any, drafted: bool) -> Any:
    """Mean Kullback-Leibler divergence of the student's next-token distribution from the target's.

    Over the drafted ids alone, the target's probabilities are not scaled up: a position counts as much as the target
    gives to ids that can be drafted there.

    Args:
        students: [positions, hidden], states of the head.
        targets: [positions, hidden], states of the backbone for the same tokens.
        drafted: whether to compare the ids of the draft head alone.
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
    # Logits of a large vocabulary do not fit for all positions at once: the backward pass computes them again.
    parts = zip(students.split(_POSITIONS), targets.split(_POSITIONS), strict=True)
    return sum(recomputed(summed, *part, use_reentrant=False) for part in parts) / len(students)


def _extended_continuation(model: Any, output: Output, tokens: int) -> list[int]:
    """A continuation and the target's next greedy tokens after it.

    A server also drafts, verifies and counts beyond the end of a text. Without those tokens the verify steps across
    the end would be missing here; on short texts they are a fifth of all steps.
    """
    import torch

    text = [*output.prompt, *output.continuation]
    with torch.no_grad():
        for _ in range(tokens):
            last = model.hidden_states(torch.tensor([text], device=model.device))[:, -1]
            text.append(int(model.logits(last).argmax()))
    return text[len(output.prompt) :]


def _served(folder: Path, held_out: Sequence[Output], depth: int, progress: Progress) -> float:
    """Acceptance length in vLLM on the held-out prompts, greedy."""
    from slimqwen.serving.draft_counts import in_vllm

    progress("measuring in vLLM", 0, 0)
    longest = max(len(output.continuation) for output in held_out)
    return in_vllm(folder, [output.prompt for output in held_out], longest, depth).mean_length


def _check_agreement(measured: float, served: float, when: str) -> None:
    if abs(measured - served) > AGREEMENT * served:
        raise StageError(
            f"acceptance length {when} training is {measured:.3f} here and {served:.3f} in vLLM, more than "
            f"{AGREEMENT:.0%} apart; check the head's tensors and vLLM's version before trusting either"
        )


STAGE = Stage(
    name="redistill_mtp",
    parameters=RedistillParameters,
    run=run,
    needs=needs,
    reshape=reshape,
    follows=("sample_outputs", "trim_draft_vocab"),
    changes=lambda _: (r"mtp\.(?!draft_head\.)",),
    code=(
        "slimqwen.checkpoint.draft_head",
        "slimqwen.checkpoint.tensors",
        "slimqwen.checkpoint.weights",
        "slimqwen.models.language_model",
        "slimqwen.models.mtp_head",
        "slimqwen.recipe.stages.sample_outputs",
        "slimqwen.serving.draft_counts",
        "slimqwen.serving.in_process",
    ),
    packages=("torch", "transformers", "vllm"),
    # Deterministic matrix products on a GPU need the workspace.
    environment={**TORCH_ENVIRONMENT, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    resumes=True,
)
