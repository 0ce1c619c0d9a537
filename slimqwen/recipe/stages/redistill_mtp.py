"""The stage `redistill_mtp`: trains the MTP head to predict the outputs of the quantised, pruned target.

The target is frozen: its hidden states are computed once, layer by layer, and kept on disk, so that training needs no
backbone in memory. The head is unrolled `depth` steps over the target's own outputs (the stage `sample_outputs`). From
the second step on it reads its own hidden state. In each step it learns the target's distribution, with a loss weight
that falls with the step (FastMTP, arXiv 2509.18362, where the weights are 0.6 ** step).

The original head is kept unless the trained one has a longer acceptance length on held-out texts, so the stage never
makes a checkpoint worse. Both heads are also measured in vLLM, and the two measurements must agree.
"""

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, from_torch, list_tensors, rewrite, torch_dtype
from slimqwen.models.outline import Outline, SampledTexts
from slimqwen.progress import Progress
from slimqwen.recipe.head_training import POSITIONS, HeadTraining, Training
from slimqwen.recipe.sampled_outputs import OUTPUTS, Output, read_outputs
from slimqwen.recipe.stage import TORCH_ENVIRONMENT, Facts, Fault, Needs, Stage, StageError, require_fit

CURVE = "redistill_mtp.json"
"""File beside the checkpoint with the learning curve and the acceptance lengths before and after training."""

AGREEMENT = 0.05
"""Largest allowed relative difference between the acceptance lengths measured here and in vLLM."""

_IMPORTS_BYTES = 3 * 2**30
_OUTPUTS = SampledTexts(sampled=1024, held_out=96, prompt=128, continuation=96)
"""Outputs by the defaults of `sample_outputs`, where the recipe does not say which there will be."""

_SHARE_OF_LENGTHS = 0.5
"""How long outputs are beside the limits of `sample_outputs`, roughly: responses end, and few prompts reach theirs."""


class RedistillParameters(HeadTraining):
    """Parameters of the stage: those of the training, and the CPU threads.

    Attributes:
        threads: CPU threads; a parameter because it affects the order of summation.
    """

    threads: Annotated[int, Field(ge=1)] = 2


def redistill_head(
    source: Path, destination: Path, parameters: RedistillParameters, progress: Progress, *, unfinished: Path
) -> Facts:
    """Write source to destination with the trained head, or with the original one if training improved nothing.

    Raises:
        CorpusError: source has no sampled_outputs.jsonl beside it.
        MtpHeadError: the MTP head of source is incomplete.
        StageError: source has no MTP head in 16 or 32 bits, or no draft head although `rows` needs one; a loss is not
            finite; or vLLM measures a different acceptance length.
    """
    # Slow to import, and needed only in the process that trains.
    import torch

    from slimqwen.models.hidden_states import store_hidden_states
    from slimqwen.models.mtp_head import (
        PREFIX,
        MtpHead,
        count_served_steps,
        gain_interval,
        load_drafting_model,
        summarise_acceptance,
    )

    progress("loading", 0, 0)
    torch.set_num_threads(parameters.threads)
    torch.use_deterministic_algorithms(True)
    stored = list_tensors(source)
    require_fit(inspect_head(Outline.read(source), parameters))
    outputs = list(read_outputs(source))
    held_out = [output for output in outputs if output.held_out]
    sampled = [output for output in outputs if not output.held_out]
    cuda = torch.cuda.is_available()
    dtype, depth = torch.bfloat16 if cuda else torch.float32, parameters.depth
    model = load_drafting_model(source, dtype, with_layers=False)
    model.backbone.requires_grad_(False)
    model.head.float()
    if cuda:
        model.to("cuda")

    def hidden_states(texts: Sequence[Sequence[int]], name: str) -> list[Any]:
        return store_hidden_states(source, texts, unfinished / name, dtype, progress)

    with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
        texts = _extended_texts(model, held_out, depth - 1, hidden_states)
        # The states of a held-out text after which a whole draft still lies within the text.
        before_drafts = [text[: -depth - 1] for text in texts]
        states = hidden_states([*before_drafts, *map(_text, sampled)], "hidden")
        judging, teaching = states[: len(texts)], states[len(texts) :]
        answers = [
            (output.prompt, text[len(output.prompt) :]) for output, text in zip(held_out, texts, strict=True)
        ]
        steps_before = count_served_steps(model, answers, depth, judging)
        if parameters.head == "fresh":
            torch.manual_seed(parameters.seed)
            model.head.load_state_dict(MtpHead(model.backbone.config).state_dict())
        training = Training(model, sampled, teaching, parameters, unfinished / "state.pt")
        training.run(progress)
        for name, parameter in model.head.named_parameters():
            # The head is measured in the precision in which it is stored, not with the float32 weights of training.
            parameter.data = parameter.data.to(torch_dtype(stored[PREFIX + name].dtype)).float()
        steps_after = count_served_steps(model.eval(), answers, depth, judging)
    before = summarise_acceptance(steps_before, parameters.depth)
    after = summarise_acceptance(steps_after, parameters.depth)
    low, high = gain_interval(steps_before, steps_after)
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
    shutil.copyfile(source / OUTPUTS, destination / OUTPUTS)
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
    # Timings are only in the facts, because the file beside the checkpoint enters its digest.
    gain = {"gain_low": round(low, 4), "gain_high": round(high, 4)}
    return {"kept": str(record["kept"]), "steps": steps, **lengths, **gain}


def summarise_head(facts: Facts) -> str | None:
    """Say which head was kept, both acceptance lengths and the interval of their difference."""
    before, after = float(facts["acceptance_length_before"]), float(facts["acceptance_length_after"])  # type: ignore[arg-type]
    # Earlier stages may have trimmed that head or quantised its target, so it is not the served baseline's.
    given = f"{before:.2f} with the head of this stage's input"
    lengths = f"acceptance length {given} and {after:.2f} after training, on held-out texts"
    if "gain_low" not in facts:  # an older version wrote these facts
        return f"{facts['kept']} head kept; {lengths}"
    low, high = float(facts["gain_low"]), float(facts["gain_high"])  # type: ignore[arg-type]
    proof = "" if facts["kept"] == "original" or low > 0 else "; a gain within noise: kept, not proven"
    return f"{facts['kept']} head kept; {lengths}, difference {low:+.2f} to {high:+.2f} (95 %){proof}"


def needs(outline: Outline, parameters: RedistillParameters) -> Needs:
    """Needs: disk for the output, and for the texts' hidden states before and after a layer.

    Memory is the largest of three: embedding and output head in float32 with a layer; the same with the head's
    optimiser and the logits of some positions; the engine that counts drafts at the end.
    """
    text = outline.text
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    head = sum(info.elements for name, info in outline.tensors.items() if name.startswith("mtp."))
    trained = 5 * head + 6 * POSITIONS * vocabulary
    numbers = outline.num_table_weights + max(trained, head + 2 * outline.num_layer_weights)
    outputs = outline.outputs or _OUTPUTS
    count, tokens = outputs.sampled + outputs.held_out, outputs.prompt + outputs.continuation
    # Every held-out text is read again for each token by which it is extended.
    passes = (count + outputs.held_out * (parameters.depth - 1)) * tokens * outline.num_weights
    drafted = int(outline.text.get(draft_head.SIZE_KEY) or vocabulary)
    students = drafted if parameters.rows == "drafted" else vocabulary
    # Only positions of continuations are scored: logits forward, again in the backward pass because none are kept, and
    # the gradient of the head's states.
    scores = outputs.continuation * parameters.depth * hidden * (2 * vocabulary + 3 * students)
    training = parameters.steps * parameters.batch * (tokens * 3 * parameters.depth * head + scores)
    return Needs(
        disk_bytes=outline.disk_bytes + 2 * 4 * count * tokens * hidden,
        memory_bytes=_IMPORTS_BYTES + max(4 * numbers, outline.disk_bytes),
        operations=2 * _SHARE_OF_LENGTHS * (passes + training),
        fixed_seconds=60,
    )


def inspect_head(outline: Outline, parameters: RedistillParameters) -> Iterator[Fault]:
    """Find faults: no MTP head, a quantised MTP head, or no draft head although `rows` needs one."""
    head = {
        name: info
        for name, info in outline.tensors.items()
        if name.startswith("mtp.") and not name.startswith(draft_head.PREFIX)
    }
    if not head:
        yield Fault(
            f"{outline.name} has no MTP head; remove redistill_mtp from the recipe, or choose a base with mtp.* tensors"
        )
    quantised = [
        f"{name} is {info.dtype}"
        for name, info in head.items()
        if not name.endswith(".weight") or info.dtype not in ("BF16", "F16", "F32")
    ]
    if quantised:
        yield Fault(
            f"{outline.name}: its MTP head is quantised ({min(quantised)}); train it before calibrate packs `mtp`, or "
            "choose a base whose head has 16 bits"
        )
    if parameters.rows == "drafted" and not outline.text.get(draft_head.SIZE_KEY):
        yield Fault(
            "redistill_mtp: rows is drafted, but there is no draft head; put trim_draft_vocab before redistill_mtp",
            "rows",
        )


def _text(output: Output) -> list[int]:
    return [*output.prompt, *output.continuation]


def _extended_texts(
    model: Any,
    outputs: Sequence[Output],
    tokens: int,
    hidden_states: Callable[[Sequence[Sequence[int]], str], list[Any]],
) -> list[list[int]]:
    """Extend each text by the target's next greedy tokens.

    A server also drafts, verifies and counts beyond the end of a text. Without those tokens the verify steps across
    the end would be missing here; on short texts they are a fifth of all steps.

    Args:
        tokens: number of tokens to add.
        hidden_states: function from texts and the name of a folder for them to the target's hidden states.
    """
    texts = list(map(_text, outputs))
    for number in range(tokens):
        for text, states in zip(texts, hidden_states(texts, f"extended-{number}"), strict=True):
            text.append(int(model.logits(states[:, -1].to(model.device)).argmax()))
    return texts


def _served(folder: Path, held_out: Sequence[Output], depth: int, progress: Progress) -> float:
    """Acceptance length that vLLM measures with greedy continuations of the held-out prompts, tokens."""
    from slimqwen.serving.draft_counts import count_drafts_in_vllm

    progress("measuring in vLLM", 0, 0)
    longest = max(len(output.continuation) for output in held_out)
    return count_drafts_in_vllm(folder, [output.prompt for output in held_out], longest, depth).mean_length


def _check_agreement(measured: float, served: float, when: str) -> None:
    if abs(measured - served) > AGREEMENT * served:
        raise StageError(
            f"acceptance length {when} training is {measured:.3f} in this stage and {served:.3f} in vLLM, more than "
            f"{AGREEMENT:.0%} apart, so one is wrong; run `make install` for the vLLM version that Slimqwen needs, "
            "and check the base by `slimqwen recipe verify NAME`"
        )


STAGE = Stage(
    name="redistill_mtp",
    parameters=RedistillParameters,
    run=redistill_head,
    needs=needs,
    inspect=inspect_head,
    summarise=summarise_head,
    follows=("sample_outputs", "trim_draft_vocab"),
    changes=lambda _: (r"mtp\.(?!draft_head\.)",),
    # Matrix products on a GPU are deterministic only with this workspace setting.
    environment={**TORCH_ENVIRONMENT, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    resumes=True,
)
