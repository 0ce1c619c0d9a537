"""Parts of a quality measurement: answers to a range of a suite's items, and the record that parts make together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from slimqwen.evals import EvalError, quality
from slimqwen.evals.suites import datasets, lm_eval_run
from slimqwen.evals.suites.lm_eval_run import Item, Part, TaskRun
from slimqwen.evals.suites.suite import Limit, Suite
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance
from slimqwen.records.record import ServedProvenance
from slimqwen.records.split import Split
from slimqwen.serving import speed_only
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port
from slimqwen.serving.shared_server import serve
from slimqwen.variant import Variant


@dataclass(frozen=True)
class PartAnswers:
    """A variant's scored answers to a part of a suite; a task of few items may have none in it."""

    runs: list[TaskRun]
    block: ServedProvenance

    def as_json(self) -> dict[str, Any]:
        """Fields for a journal or another process."""
        runs = [
            {
                "task": run.task.name,
                "items": [asdict(item) for item in run.items],
                "available_count": run.available_count,
                "rendered": run.rendered,
            }
            for run in self.runs
        ]
        return {"runs": runs, "provenance": self.block.as_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any], suite: Suite) -> Self:
        """The answers that `as_json` wrote."""
        tasks = {task.name: task for task in suite.tasks}
        runs = [
            TaskRun(
                tasks[run["task"]],
                [Item(**item) for item in run["items"]],
                run["available_count"],
                run["rendered"],
            )
            for run in fields["runs"]
        ]
        return cls(runs, ServedProvenance.model_validate(fields["provenance"]))


def score_part(
    variant: Variant,
    suite: Suite,
    part: Part,
    *,
    command: Sequence[str],
    limit: Limit,
    split: Split | None = None,
    progress: Progress = silent,
) -> PartAnswers:
    """Score a variant on a part of a suite, served on a free port by a server of its own; nothing is recorded.

    Raises:
        ServerLostError, ServingError, EvalError, PromptTooLongError: as for `quality.measure_quality`.
    """
    speed_only.refuse(variant, "quality")
    datasets.require_datasets(suite.datasets, suite.nltk, variant.root)
    started = provenance.utc_now()
    logs, ending = variant.root / "logs", f"{variant.name}-{part.number + 1}of{part.count}.log"
    with serve(variant, port=free_port(), log=logs / f"serve-{ending}", progress=progress) as server:
        runs, files = lm_eval_run.run_suite(
            suite,
            server,
            limit=limit,
            log=logs / f"quality-{ending}",
            part=part,
            split=split,
            progress=progress,
        )
    # The record has the port of config.env, because the free port means nothing afterwards.
    block = provenance.describe(
        ServerCommand.resolve(variant),
        command,
        started,
        datasets=files,
        seeds={"lm_eval": lm_eval_run.SEED},
    )
    return PartAnswers(runs, block)


def write_parts(
    variant: Variant,
    suite: Suite,
    parts: Sequence[PartAnswers],
    *,
    limit: Limit,
    split: Split | None = None,
    earlier: Sequence[int] = (),
    folder: Path | None = None,
) -> Path:
    """Write the quality record of all parts of a suite.

    Args:
        parts: every part, in order.
        limit: items of each task that the parts make together.
        earlier: positions of the parts that an interrupted run had answered.
        folder: folder of the record instead of the variant's.

    Raises:
        EvalError: the parts were answered by different checkpoints, flags, versions or hardware.
    """
    block = _joined_provenance([part.block for part in parts], variant.name)
    runs = [
        TaskRun(
            runs[0].task,
            sorted((item for run in runs for item in run.items), key=lambda item: (item.index, item.repeat)),
            runs[0].available_count,
            runs[0].rendered,
        )
        for runs in zip(*(part.runs for part in parts), strict=True)
    ]
    return quality.write_quality_record(
        folder or variant.folder,
        runs,
        block,
        variant=variant.name,
        suite=suite.name,
        limit=limit,
        split=split,
        endpoint="completions",
        answers_of_earlier_run=sum(len(run.items) for number in earlier for run in parts[number].runs),
    )


def _joined_provenance(blocks: Sequence[ServedProvenance], name: str) -> ServedProvenance:
    """One provenance for parts that were measured under the same circumstances."""
    first = blocks[0]
    for field in ("hardware", "packages", "flags", "environment", "checkpoint", "threads", "git"):
        if any(getattr(block, field) != getattr(first, field) for block in blocks):
            raise EvalError(
                f"{name}: parts of one measurement differ in {field}; measure all of them on nodes of one kind"
            )
    return first.model_copy(
        update={
            "started": min(block.started for block in blocks),
            "ended": max(block.ended for block in blocks),
            "datasets": dict(sorted({k: v for block in blocks for k, v in block.datasets.items()}.items())),
        }
    )
