"""The stage `redistill_mtp`: teach the MTP head to guess what the quantised, pruned target says.

The target is frozen. The head is unrolled `depth` steps over texts that the target itself wrote (the stage
`sample_outputs`), fed its own hidden state from the second step on, and each step learns the target's distribution
with a weight that falls with the step (FastMTP, arXiv 2509.18362, where the step weights are 0.6 ** step).

The head that came is kept unless the new one is accepted for longer on held-out text, so the stage never makes a
checkpoint worse. Both are also measured in vLLM, whose count must agree.
"""

import gc
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.checkpoint import NewTensor, TensorInfo
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress
from slimqwen.recipe.sample_outputs import Output, read_outputs
from slimqwen.recipe.stage import Facts, Needs, Parameters, Stage

CURVE = "redistill_mtp.json"
"""Beside the checkpoint: the learning curve and the acceptance before and after."""

AGREEMENT = 0.05
"""Largest relative difference between the acceptance length counted here and the one that vLLM counts."""

_IMPORTS_BYTES = 3 * 2**30
_POSITIONS = 512
"""Positions whose logits are in memory at a time."""


class NotFiniteError(SlimqwenError):
    """Training met NaN or infinity."""


class DisagreementError(SlimqwenError):
    """vLLM counts another acceptance than is counted here: one of the two drafts wrongly."""


class RedistillParameters(Parameters):
    """What a recipe may say of this stage.

    Attributes:
        depth: tokens that the head learns to draft (K).
        trainable: fc+norms leaves the head's attention and MLP as they are, all trains them too.
        head: checkpoint starts from the head there is, fresh from a random one.
        steps: of the optimiser at most.
        batch: texts a step.
        learning_rate: peak of AdamW, reached after a twentieth of the steps and falling in a line to a tenth.
        step_decay: weight of a draft step against that of the one before.
        validate_every: steps between two points of the learning curve, which are also where a killed run goes on.
        patience: points without a better one after which training ends.
        seed: of the order of texts, and of a fresh head.
        threads: of the CPU arithmetic; a part of the recipe because it decides the order of summation.
    """

    depth: Annotated[int, Field(ge=1, le=8)] = 4
    trainable: Literal["fc+norms", "all"] = "fc+norms"
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
    """One point of the learning curve; both losses are the weighted mean divergence from the target, nats a token."""

    step: int
    training_loss: float | None
    """Mean since the last point; None before the first step."""
    validation_loss: float


def run(
    source: Path, destination: Path, parameters: RedistillParameters, progress: Progress, *, unfinished: Path
) -> Facts:
    """Write source to destination with a head that drafts better, or with its own if none was found.

    Raises:
        CorpusError: source has no `OUTPUTS` beside it.
        MtpHeadError: source has no complete MTP head.
        NotFiniteError: a loss is no number.
        DisagreementError: vLLM counts another acceptance than is counted here.
    """
    # Heavy: paid by the process that trains, not by whoever asks for a recipe's status.
    import torch

    from slimqwen.mtp_head import PREFIX, MtpHead, load_drafting_model, measure_acceptance

    progress("loading", 0, 0)
    torch.set_num_threads(parameters.threads)
    torch.use_deterministic_algorithms(True)
    stored = checkpoint.tensors(source)
    outputs = list(read_outputs(source))
    held_out = [output for output in outputs if output.held_out]
    written = [output for output in outputs if not output.held_out]
    cuda = torch.cuda.is_available()
    model = load_drafting_model(source, torch.bfloat16 if cuda else torch.float32)
    model.backbone.requires_grad_(False)
    model.head.float()
    if cuda:
        model.backbone.to("cuda")
        model.head.to("cuda")
    with _mixed_precision(cuda):
        texts = [(output.prompt, _past_its_end(model, output, parameters.depth - 1)) for output in held_out]
        before = measure_acceptance(model, texts, parameters.depth)
        if parameters.head == "fresh":
            torch.manual_seed(parameters.seed)
            model.head.load_state_dict(MtpHead(model.backbone.config).state_dict())
        training = _Training(model, written, parameters, unfinished / "state.pt")
        training.run(progress)
        for name, parameter in model.head.named_parameters():
            # What will be stored is measured, not the float32 weights that training ended with.
            parameter.data = parameter.data.to(_torch_dtype(stored[PREFIX + name].dtype)).float()
        after = measure_acceptance(model.eval(), texts, parameters.depth)
    improved = after.mean_length > before.mean_length
    trained = {PREFIX + name: tensor.detach().cpu() for name, tensor in model.head.state_dict().items()}
    if not improved:
        trained = {}
    curve, steps = training.curve, training.step
    del training, model
    gc.collect()

    def change(name: str, info: TensorInfo) -> dict[str, NewTensor] | None:
        return {name: _new_tensor(trained[name], info.dtype)} if name in trained else None

    checkpoint.rewrite(source, destination, change, progress)
    checkpoint.carry_side_files(source, destination)
    checkpoint.write_config(destination, checkpoint.read_config(source))
    served = [
        _served(folder, held_out, parameters.depth, progress)
        for folder in ((source, destination) if improved else (source,))
    ]
    kept = after if improved else before
    _agree(before.mean_length, served[0], "before")
    _agree(kept.mean_length, served[-1], "after")
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
    """No more disk than source; the unpacked weights, the head with its optimiser, logits of some positions."""
    config = checkpoint.text_config(checkpoint.read_config(source))
    stored = checkpoint.tensors(source)
    # A packed weight holds eight 4-bit numbers in each of its integers.
    elements = sum(info.elements * (8 if name.endswith("_packed") else 1) for name, info in stored.items())
    head = sum(info.elements for name, info in stored.items() if name.startswith("mtp."))
    logits = 6 * _POSITIONS * config["vocab_size"]
    return Needs(
        disk_bytes=checkpoint.bytes_on_disk(source),
        memory_bytes=_IMPORTS_BYTES + 4 * (elements + 5 * head + logits),
    )


class _Training:
    """The moving parts of one training, saved at every point of its curve."""

    def __init__(
        self, model: Any, outputs: Sequence[Output], parameters: RedistillParameters, state: Path
    ) -> None:
        import torch

        self.step = 0
        self.curve: list[Point] = []
        self._model = model
        self._parameters = parameters
        self._state = state
        # Every tenth decides when to stop; none of them is among the held-out texts that judge the result.
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
        """Train to the end, or on from where a run was killed; leaves the best weights in the model."""
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
            raise NotFiniteError(f"the loss is {loss.item()} at step {self.step}; lower learning_rate")
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
        """The texts of a step: all of them in a random order, then all in another."""
        batch, count = self._parameters.batch, len(self._texts)
        places = range(self.step * batch, (self.step + 1) * batch)
        return [self._texts[self._order(place // count)[place % count]] for place in places]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._texts)))
        random.Random(f"{self._parameters.seed} {epoch}").shuffle(order)
        return order

    def _loss(self, outputs: Sequence[Output]) -> Any:
        """Weighted mean divergence of the head's distributions from the target's, nats a token."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from slimqwen.mtp_head import DraftUnroller

        model, depth, decay = self._model, self._parameters.depth, self._parameters.step_decay
        # Padding stands behind the text, where a causal model cannot see it.
        rows = [torch.tensor([*output.prompt, *output.continuation]) for output in outputs]
        tokens = pad_sequence(rows, batch_first=True).to(model.device)
        places = torch.arange(tokens.shape[1], device=model.device)
        begins = torch.tensor([len(output.prompt) - 1 for output in outputs], device=model.device)[:, None]
        ends = torch.tensor([len(row) for row in rows], device=model.device)[:, None]
        with torch.no_grad():
            hidden = model.hidden_states(tokens)
        length = tokens.shape[1] - depth
        unroller = DraftUnroller(model, hidden[:, :length])
        total, weights = 0.0, 0.0
        for step in range(1, depth + 1):
            drafted = unroller.step(tokens[:, step : step + length])
            # Step k of position i is to say what the target says at position i + k.
            scored = (places[:length] >= begins) & (places[:length] + step < ends)
            students, targets = drafted[scored], hidden[:, step : step + length][scored]
            total = total + decay ** (step - 1) * _divergence(model, students, targets)
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


def _divergence(model: Any, students: Any, targets: Any) -> Any:
    """Mean Kullback-Leibler divergence of the student's next-token distribution from the target's.

    Args:
        model: whose lm_head turns states into logits.
        students: [positions, hidden], the head's states.
        targets: [positions, hidden], the backbone's states where the target says the same token.
    """
    import torch
    import torch.nn.functional as F  # noqa: N812 (its customary name)
    from torch.utils.checkpoint import checkpoint as recomputed

    def summed(student: Any, target: Any) -> Any:
        with torch.no_grad():
            wanted = model.logits(target).float().log_softmax(-1)
        said = model.logits(student).float().log_softmax(-1)
        return F.kl_div(said, wanted, reduction="sum", log_target=True)

    if not len(students):
        return students.sum() * 0.0
    # Logits of a large vocabulary do not fit for all positions at once: they are computed again going back.
    parts = zip(students.split(_POSITIONS), targets.split(_POSITIONS), strict=True)
    return sum(recomputed(summed, *part, use_reentrant=False) for part in parts) / len(students)


def _past_its_end(model: Any, output: Output, tokens: int) -> list[int]:
    """A continuation and what the target would say after it, greedily.

    A server drafts up to the last token but one of a text, and verifies and counts what it drafts beyond the end. The
    tokens there are those that the target names, whatever they mean; without them the steps that cross an end are
    missing here, and on short texts they are every fifth.
    """
    import torch

    text = [*output.prompt, *output.continuation]
    with torch.no_grad():
        for _ in range(tokens):
            last = model.hidden_states(torch.tensor([text], device=model.device))[:, -1]
            text.append(int(model.logits(last).argmax()))
    return text[len(output.prompt) :]


def _mixed_precision(cuda: bool) -> Any:
    import torch

    return torch.autocast("cuda", torch.bfloat16, enabled=cuda)


def _served(folder: Path, held_out: Sequence[Output], depth: int, progress: Progress) -> float:
    """Acceptance length as vLLM counts it on the held-out prompts, greedily."""
    from slimqwen.serving.draft_counts import in_vllm

    progress("measuring in vLLM", 0, 0)
    longest = max(len(output.continuation) for output in held_out)
    return in_vllm(folder, [output.prompt for output in held_out], longest, depth).mean_length


def _agree(counted: float, served: float, when: str) -> None:
    if abs(counted - served) > AGREEMENT * served:
        raise DisagreementError(
            f"acceptance length {when} training is {counted:.3f} here and {served:.3f} in vLLM, more than "
            f"{AGREEMENT:.0%} apart; check the head's tensors and vLLM's version before trusting either"
        )


def _torch_dtype(dtype: str) -> Any:
    import torch

    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]


def _new_tensor(tensor: Any, dtype: str) -> NewTensor:
    import torch

    def chunks() -> Iterator[memoryview]:
        yield memoryview(tensor.to(_torch_dtype(dtype)).contiguous().view(torch.uint8).numpy()).cast("B")

    return NewTensor(dtype, tuple(tensor.shape), chunks)


STAGE = Stage(
    name="redistill_mtp",
    parameters=RedistillParameters,
    run=run,
    needs=needs,
    code=(
        "slimqwen.mtp_head",
        "slimqwen.recipe.sample_outputs",
        "slimqwen.serving.draft_counts",
        "slimqwen.serving.in_process",
    ),
    packages=("torch", "transformers", "vllm"),
    environment={
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what deterministic matrix products on a GPU ask for
    },
    resumes=True,
)
