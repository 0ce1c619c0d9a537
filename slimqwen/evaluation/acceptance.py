"""How long drafted tokens are accepted, by depth, prompt class and temperature, with intervals; and the depth to serve.

Every depth has an engine of its own. The prompts of a class go in groups, and groups are the units of every interval:
tokens of one continuation stand and fall together.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from pydantic import BaseModel, ConfigDict, Field

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import acceptance_share, fidelity, plan_file, prompts, roofline, statistics
from slimqwen.evaluation.answers import kept, unfinished
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.serving import draft_counts, in_process, launch
from slimqwen.serving import platform as machine
from slimqwen.variant import Variant


class AcceptanceError(SlimqwenError):
    """A plan, or a variant, that drafts cannot be counted with."""


class Plan(BaseModel):
    """eval/acceptance/<name>.yaml, which explains each field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    documents: str
    seed: int
    tokens: int = Field(ge=1)
    groups: int = Field(ge=2)
    prompts: int = Field(ge=2)
    temperatures: tuple[float, ...] = Field(min_length=1)
    classes: dict[str, int] = Field(min_length=1)
    gpu: str
    gate_depth: int = Field(ge=1)
    least_share: float = Field(gt=0, le=1)


def load_plan(name: str, root: Path) -> Plan:
    """Read eval/acceptance/<name>.yaml.

    Raises:
        AcceptanceError: no such file, or a field is missing or wrong.
    """
    plan = plan_file.read("acceptance", name, root, Plan, AcceptanceError, "write the prompts' classes there")
    if plan.prompts < plan.groups:
        raise AcceptanceError(
            f"eval/acceptance/{name}.yaml: {plan.prompts} prompts do not make {plan.groups} groups"
        )
    return plan


def measure(
    one: Variant,
    plan_name: str,
    depths: Sequence[int],
    *,
    command: Sequence[str],
    greedy_only: bool = False,
    records_folder: Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Count a variant's drafts at several depths and write its acceptance record.

    Depths that an interrupted run has counted are not counted again.

    Args:
        one: the variant; its weights, dtype and KV cache.
        plan_name: of eval/acceptance/.
        depths: tokens drafted at a time (K); 0 is without drafts, for its speed.
        command: the command that asked for it, for the record.
        greedy_only: leave out the plan's temperatures above 0.
        records_folder: instead of the variant's own folder.
        progress: hears the groups of prompts done.

    Returns:
        The record's path.

    Raises:
        AcceptanceError: the checkpoint has no MTP head, or a class does not fit its context.
        NoDraftsError: the engine drafted nothing.
        RunInProgressError: another process is at the same run.
        SlimqwenError: weights are missing, or the documents do not last.
    """
    started = provenance.utc_now()
    plan = load_plan(plan_name, one.root)
    baseline = variants.load(one.baseline, one.root) if one.baseline else one
    for side in (one, baseline):
        checkpoint.check(side.weights, variants.making_command(side.weights, side.root))
    if not checkpoint.text_config(checkpoint.read_config(one.weights)).get("mtp_num_hidden_layers"):
        raise AcceptanceError(f"{one.name} has no MTP head, so nothing is drafted")
    served = launch.resolve(one)
    flags = fidelity.weight_flags(served.flags)
    temperatures = [each for each in plan.temperatures if not greedy_only or each == 0]
    context = min(served.max_model_len, launch.resolve(baseline).max_model_len)
    classes = cut_prompts(plan, one, baseline, context - plan.tokens - max(depths) - 1)
    asked = prompts.digest([ids for of_class in classes.values() for ids in of_class])
    items: list[dict[str, Any]] = []
    with kept(unfinished("acceptance", served, plan.model_dump(mode="json"), asked, temperatures)) as counted:
        for place, depth in enumerate(depths):

            def heard(activity: str, done: float, total: float, place: int = place) -> None:
                progress(activity, place * total + done, len(depths) * total)

            of_depth = counted.get(depth)
            if of_depth is None:
                of_depth = count(one.weights, classes, plan, [depth], temperatures, flags, heard)
                counted.keep(depth, of_depth)
            items += of_depth
        rows = summarise(items)
        record = {
            "schema": "acceptance/1",
            "variant": one.name,
            "plan": plan_name,
            "gate_depth": plan.gate_depth,
            "least_share": plan.least_share,
            "classes": {name: max(map(len, of_class)) for name, of_class in classes.items()},
            "prompts": asked,
            "depths": rows,
            "choice": choose(one, plan, rows, max(map(len, next(iter(classes.values()))))),
            "provenance": provenance.describe(
                root=one.root,
                command=command,
                started=started,
                flags={**flags, "enforce-eager": machine.detect() == "cpu"},
                environment={},
                weights=one.weights,
                datasets=[one.root / "eval" / "acceptance" / f"{plan_name}.yaml"]
                + ([] if plan.documents == "tinyworld" else [one.root / plan.documents]),
                seeds={"prompts": plan.seed},
                server="started",
            ),
        }
        path = store.write(records_folder or one.folder, record, items)
        counted.discard()
    return path


def count(
    folder: Path,
    classes: Mapping[str, Sequence[Sequence[int]]],
    plan: Plan,
    depths: Sequence[int],
    temperatures: Sequence[float],
    flags: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Have vLLM go on with the prompts of each class in their groups, at each depth in an engine of its own.

    Args:
        folder: the checkpoint.
        classes: name -> prompts in token ids.
        plan: tokens, groups and seed.
        depths: tokens drafted at a time (K).
        temperatures: 0 for greedy tokens.
        flags: of vLLM, by name without dashes.
        progress: hears the groups done.

    Returns:
        the items of a record.

    Raises:
        NoDraftsError: the engine drafted nothing.
    """
    items: list[dict[str, Any]] = []
    whole = len(depths) * len(classes) * len(temperatures) * plan.groups
    longest = max(len(ids) for of_class in classes.values() for ids in of_class) + plan.tokens
    for depth in depths:
        with in_process.engine(
            folder,
            num_speculative_tokens=depth,
            max_model_len=draft_counts.room(longest, depth),
            # Graphs decide a GPU's speed; on a CPU only counts are wanted, and they cost minutes.
            enforce_eager=machine.detect() == "cpu",
            **{name.replace("-", "_"): value for name, value in (flags or {}).items()},
        ) as llm:
            # The first requests after a start meet cold code, which would count as the first group's time.
            draft_counts.count(llm, [next(iter(classes.values()))[0]], tokens=8)
            for name, temperature, group in itertools.product(classes, temperatures, range(plan.groups)):
                progress(f"K = {depth}: {name}, temperature {temperature:g}", len(items), whole)
                counted = draft_counts.count(
                    llm,
                    classes[name][group :: plan.groups],
                    tokens=plan.tokens,
                    temperature=temperature,
                    seed=plan.seed,
                )
                if depth and not counted.drafts:
                    raise draft_counts.NoDraftsError(
                        f"vLLM drafted nothing for the class {name}; give its continuations more tokens in the plan"
                    )
                items.append(
                    {
                        "depth": depth,
                        "class": name,
                        "temperature": temperature,
                        "group": group,
                        **dataclasses.asdict(counted),
                    }
                )
    progress("counted", whole, whole)
    return items


def summarise(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each depth from its groups.

    Args:
        items: of a record: {"depth", "class", "temperature", "group", "drafts", "accepted_per_position",
            "output_tokens", "seconds"}.

    Returns:
        [{"depth", "tokens_per_second", "length", "settings": [{"class", "temperature", "drafts", "length",
        "rates"}]}]: the tokens of all greedy continuations over their time, and estimates over groups, the first length
        that of all greedy ones. Depth 0 has no length and no settings.
    """
    rows = []
    for depth in dict.fromkeys(item["depth"] for item in items):
        of_depth = [item for item in items if item["depth"] == depth and (item["drafts"] or not depth)]
        greedy = [item for item in of_depth if item["temperature"] == 0] or of_depth
        settings = []
        kinds = dict.fromkeys((item["class"], item["temperature"]) for item in of_depth) if depth else {}
        for name, temperature in kinds:
            of_setting = [
                item for item in of_depth if (item["class"], item["temperature"]) == (name, temperature)
            ]
            settings.append(
                {
                    "class": name,
                    "temperature": temperature,
                    "drafts": sum(item["drafts"] for item in of_setting),
                    "length": dataclasses.asdict(_length(of_setting)),
                    "rates": [dataclasses.asdict(_rate(of_setting, place)) for place in range(depth)],
                }
            )
        rows.append(
            {
                "depth": depth,
                "tokens_per_second": sum(item["output_tokens"] for item in greedy)
                / sum(item["seconds"] for item in greedy),
                "length": dataclasses.asdict(_length(greedy)) if depth else None,
                "settings": settings,
            }
        )
    return rows


def choose(
    one: Variant, plan: Plan, rows: Sequence[Mapping[str, Any]], context: int
) -> dict[str, Any] | None:
    """The depth that gives most greedy tokens per second, and what that is by.

    On a GPU the measured speed decides. A CPU's says nothing about a GPU, so there it is the bound of the plan's GPU
    (`roofline.decode`, one sequence) with the acceptance lengths measured, the mean of the classes: it counts bytes
    and operations, not the launching of kernels, so it leans to deep drafts.

    Args:
        one: the variant.
        plan: names the GPU.
        rows: as `summarise` returns them.
        context: tokens in the cache, for the bound.

    Returns:
        {"depth", "by": "measured" or "roofline of <gpu>", "tokens_per_second": {depth: value}}; None of fewer than two
        depths.
    """
    if len(rows) < 2:
        return None
    if machine.detect() == "cuda":
        by, speeds = "measured", {row["depth"]: row["tokens_per_second"] for row in rows}
    else:
        gpu = roofline.gpu(plan.gpu, one.root)
        by = f"roofline of {plan.gpu}"
        lengths = {row["depth"]: row["length"]["value"] if row["depth"] else 1.0 for row in rows}
        speeds = roofline.by_depth(one, gpu, lengths, context)
    best = max(speeds, key=lambda depth: speeds[depth])
    return {
        "depth": best,
        "by": by,
        "tokens_per_second": {str(depth): value for depth, value in speeds.items()},
    }


def graph_sizes(depth: int, sequences: int) -> list[int]:
    """Batch sizes, in tokens, that CUDA graphs are needed for: a step reads K + 1 tokens of each sequence."""
    return [(depth + 1) * count for count in range(1, sequences + 1)]


def cut_prompts(plan: Plan, one: Variant, baseline: Variant, room: int) -> dict[str, list[list[int]]]:
    """Class -> the variant's token ids of texts that the baseline's tokenizer cut to length, `room` tokens at most."""
    ours, theirs = (
        transformers.AutoTokenizer.from_pretrained(side.weights, local_files_only=True)
        for side in (one, baseline)
    )
    cutter = prompts.PromptCutter(
        prompts.documents(plan.documents, plan.seed, one.root),
        lambda text: list(theirs(text, add_special_tokens=False)["input_ids"]),
    )
    classes = {}
    for name, length in plan.classes.items():
        texts = [theirs.decode(ids) for ids in cutter.cut(plan.prompts, max(1, min(length, room)))]
        # A pruned tokenizer may need more tokens for the same text.
        classes[name] = [list(ours(text, add_special_tokens=False)["input_ids"])[-room:] for text in texts]
    return classes


def _length(items: Sequence[Mapping[str, Any]]) -> statistics.Estimate:
    return statistics.mean(*acceptance_share.lengths(items))


def _rate(items: Sequence[Mapping[str, Any]], place: int) -> statistics.Estimate:
    drafts = [item["drafts"] for item in items]
    return statistics.mean([item["accepted_per_position"][place] / item["drafts"] for item in items], drafts)
