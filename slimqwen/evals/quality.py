"""Quality: scores of a served variant on the tasks of a suite, with standard errors and every item."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import Field, model_validator

from slimqwen.evals import EvalError
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.suites import datasets, lm_eval_run, own_questions
from slimqwen.evals.suites.scored import TaskRun
from slimqwen.evals.suites.suite import ANSWER_MARGIN, AUTO, BITS_PER_BYTE, ENDED, Limit, Suite
from slimqwen.identity import changed_names
from slimqwen.progress import Progress
from slimqwen.records import provenance, store
from slimqwen.records.journal import Journal, journal_file, locked
from slimqwen.records.record import (
    Block,
    Count,
    NonNegative,
    Positive,
    Table,
    Verdict,
)
from slimqwen.records.split import Split, SplitRecord
from slimqwen.serving import speed_only
from slimqwen.serving.chat_template import find_tool_parser
from slimqwen.serving.shared_server import ServerLostError, SharedServer, share_server
from slimqwen.stats import intervals, non_inferiority
from slimqwen.text.chats import read_chat_templates
from slimqwen.variant import Variant

MEASURE_NAMES = {
    "exact_match": "exact match",
    ANSWER_MARGIN: "answer log-probability gap, nats",
    BITS_PER_BYTE: "bits per byte",
    ENDED: "ends, without a loop",
}
"""Table headings of measures; any other is called by its lm-eval name."""

TABLE_NOTE = "SE: standard error. Bits per byte: less is better."


class OutputTokens(Block):
    """Lengths of generations in tokens, thoughts included."""

    mean: NonNegative
    p50: NonNegative
    max: Count

    def __str__(self) -> str:
        return f"{self.mean:.0f}, {self.p50:g}, {self.max}"


class TaskScore(Block):
    """Score of one task."""

    measure: str = Field(
        min_length=1,
        description="answer_margin_nats, bits_per_byte, ended, or the name of an lm-eval metric.",
    )
    value: float
    standard_error: NonNegative
    higher_is_better: bool
    non_inferiority_margin: NonNegative = Field(description="In the unit of the measure.")
    item_count: Positive
    available_count: Positive = Field(description="All items of the task, scored or not.")
    cluster_count: Positive = Field(description="Independent observations: items, or groups of them.")
    items_to_decide: Positive | None = Field(
        description="Items needed for a verdict at the margin under the suite's assumption; null if it makes none."
    )
    output_count: Count | None = Field(
        description="Generations, repeats included; null if nothing is generated."
    )
    truncated_count: Count | None = Field(
        description="Generations that the token limit cut; null if nothing is generated."
    )
    empty_count: Count | None = Field(description="Generations of white space; null if nothing is generated.")
    output_tokens: OutputTokens | None = Field(description="null if nothing is generated or reported.")
    settings: dict[str, Any] = Field(
        description="Settings that the suite adds to the task's own definition, and "
        "`code`, the digest of the product's code that asked and scored; old records have `scorer` instead."
    )
    floor: float | None = Field(
        default=None,
        description="Lowest acceptable score, in the unit of the measure; absent if the suite has none.",
    )
    floor_verdict: Verdict | None = Field(
        None,
        description="pass: the whole 95 % interval of the score is above the floor; fail: all of it is below.",
    )

    @property
    def sign(self) -> int:
        """1 if a larger score is better, else -1: a change of the score times it is negative for a loss."""
        return 1 if self.higher_is_better else -1

    def share_of_outputs(self, count: int | None) -> str | None:
        """A count in words: "3 of 494" generated responses; None if nothing is generated."""
        return None if count is None else f"{count} of {self.output_count}"

    @model_validator(mode="after")
    def _floor_has_a_verdict(self) -> "TaskScore":
        if (self.floor is None) != (self.floor_verdict is None):
            raise ValueError("set both floor and floor_verdict, or neither")
        return self


class Quality(SplitRecord):
    """Scores of one variant over one suite."""

    kind = "quality"
    version = 3
    verb = "eval quality"

    suite: str = Field(min_length=1)
    limit: Positive | Literal["auto"] | None = Field(
        description="Items of each task, the first ones or a random sample as the suite says; null: all items; auto: "
        "sample size by power analysis for the non-inferiority margin."
    )
    tasks: dict[str, TaskScore] = Field(min_length=1)

    def changed_settings(self, suite: Suite, *, may_be_old: bool = False) -> list[str]:
        """Names of the suite's settings that changed since the record, such as tasks, scoring, margins and floors.

        Args:
            suite: the suite as its file is now.
            may_be_old: whether an old record may lack settings that records did not have then.
        """
        if self.suite != suite.name or self.tasks.keys() != {task.name for task in suite.tasks}:
            return ["tasks of the suite"]
        changed: list[str] = []
        for task in suite.tasks:
            score, present = self.tasks[task.name], suite.settings_of(task)
            added = ("suite", "code") if may_be_old else ()
            before: dict[str, Any] = {**{name: present.get(name) for name in added}, **score.settings}
            before.pop("scorer", None)  # of before there was `code`: a digest of modules that a list named
            changed += changed_names(before, present)
            if (score.measure, score.floor) != (task.measure, task.floor):
                changed.append("measure or floor")
            if score.non_inferiority_margin != task.non_inferiority_margin:
                changed.append("non-inferiority margin")
            if self.limit == AUTO and score.items_to_decide != task.items_to_decide:
                changed.append("planned number of items")
        return list(dict.fromkeys(changed))

    @property
    def basis(self) -> dict[str, Any]:
        """Properties that two records must share to be compared: suite, items, split, task settings, data files."""
        return {
            "suite": self.suite,
            "limit": self.limit or "all items",
            "split": str(self.split or "of no split"),
            "settings": {task: score.settings for task, score in self.tasks.items()},
            "measures": {task: score.measure for task, score in self.tasks.items()},
            **super().basis,
        }

    @property
    def item_count(self) -> int:
        """Items of all tasks."""
        return sum(score.item_count for score in self.tasks.values())

    def task_name(self, task: str) -> str:
        """Name of a task without the suite's name before it."""
        return task.removeprefix(f"{self.suite}_")

    @property
    def topic(self) -> str:
        """Name of the suite: a newer record replaces only one of the same suite."""
        return self.suite

    def tables(self, path: Path) -> list[Table]:
        """Scores by task, with lengths of generations and floors where the record has them."""
        columns: dict[str, Callable[[tuple[str, TaskScore]], object]] = {
            "task": lambda row: self.task_name(row[0]),
            "measure": lambda row: MEASURE_NAMES.get(row[1].measure, row[1].measure),
            "score ± SE": lambda row: f"{row[1].value:.3f} ± {row[1].standard_error:.3f}",
            "items": lambda row: f"{row[1].item_count} of {row[1].available_count}",
            "truncated": lambda row: row[1].share_of_outputs(row[1].truncated_count),
            "empty": lambda row: row[1].share_of_outputs(row[1].empty_count),
        }
        if any(score.output_tokens for score in self.tasks.values()):
            columns["output tokens: mean, p50, max"] = lambda row: row[1].output_tokens
        if any(score.floor is not None for score in self.tasks.values()):
            columns["floor"] = lambda row: (
                None if row[1].floor is None else f"{row[1].floor:g}: {row[1].floor_verdict}"
            )
        title, notes = f"Quality of {self.variant}", (TABLE_NOTE, provenance.source_note(self, path))
        return [Table.from_rows(title, self.tasks.items(), columns, *notes, text_columns=2)]

    def undecided(self) -> list[str]:
        """A line for each task with fewer items than a verdict at its margin needs; empty if all have enough."""
        return [
            f"{task}: a margin of {score.non_inferiority_margin:g} needs {score.items_to_decide:,} items under the "
            f"suite's assumption; {score.item_count:,} of {score.available_count:,} were scored"
            for task, score in self.tasks.items()
            if score.items_to_decide is not None and score.items_to_decide > score.item_count
        ]


def measure_quality(
    variant: Variant,
    suite: Suite,
    limit: Limit,
    invocation: Invocation,
) -> Path:
    """Score a variant on a suite and write its quality record.

    A running server of the variant is used; without one, a server is started and stopped again. The server's responses
    are kept in .cache/quality/ until the record is written: after an interruption the same call continues with them.

    Args:
        variant: the variant.
        suite: tasks and their margins.
        limit: number of items of each task, at least 2; AUTO: by power analysis; None: all.
        invocation: settings that all measurements of a command share.

    Returns:
        Path of the record.

    Raises:
        ServerLostError: the server died or refused a request; no record is written, the responses are kept.
        ServingError: the variant's weights are random, or a flag sets its acceptance length.
        EvalError: a task is missing or broken, the chat template lacks the thinking switch that the suite sets, the
            suite's data are not fetched, the limit is below 2, or questions or task files were edited meanwhile.
        CorpusError: a question of an own evaluation cannot be used.
        PromptTooLongError: the served context cannot hold a prompt.
    """
    if isinstance(limit, int) and limit < 2:
        raise EvalError(f"--limit {limit} gives no standard error; set --limit to 2 or more")
    require_measurable(variant, suite)
    variant = with_tool_parser(variant, suite)
    started = provenance.utc_now()
    log = variant.root / "logs" / f"serve-{variant.name}.log"
    key_parts = suite.model_dump(mode="json"), limit, str(invocation.split)
    with (
        share_server(variant, port=invocation.port, log=log, progress=invocation.progress) as server,
        locked(journal_file("quality", server.server.command, *key_parts)) as answers,
    ):
        try:
            runs, files = _run(suite, server, limit, answers, invocation.split, invocation.progress)
        except ServerLostError as error:
            raise ServerLostError(
                f"{error}; its {len(answers)} responses so far are kept: run the same command again to continue"
            ) from error
        record = Quality(
            variant=variant.name,
            suite=suite.name,
            limit=limit,
            split=invocation.split,
            tasks={run.task.name: score_task(run) for run in runs},
            provenance=provenance.describe(
                server.server.command,
                invocation.command,
                started,
                datasets=files,
                seeds={} if suite.questions else {"lm_eval": lm_eval_run.SEED},
                already_running=server.already_running,
            ),
        )
        items = (vars(item) for run in runs for item in run.items)
        path = store.write_record(invocation.records_of(variant), record, items)
        answers.discard()
    return path


def _run(
    suite: Suite,
    server: SharedServer,
    limit: Limit,
    answers: Journal,
    split: Split | None,
    progress: Progress,
) -> tuple[list[TaskRun], list[Path]]:
    """Ask own questions directly, other suites through lm-eval; returns the tasks and the files that affect them."""
    root = server.variant.root
    before = provenance.data_digests(suite.inputs(root), root)
    if suite.questions:
        files = suite.inputs(root)
        runs = own_questions.ask_questions(
            suite, server, limit=limit, answers=answers, split=split, progress=progress
        )
    else:
        log = root / "logs" / f"quality-{server.variant.name}.log"
        runs, files = lm_eval_run.run_suite(
            suite, server, limit=limit, answers=answers, log=log, split=split, progress=progress
        )
    if edited := changed_names(before, provenance.data_digests(suite.inputs(root), root)):
        raise EvalError(
            f"{' and '.join(edited)} was edited meanwhile, so nothing was recorded; the responses so far are kept: "
            "run the same command again"
        )
    return runs, files


def require_measurable(variant: Variant, suite: Suite) -> None:
    """Check within seconds, before a server starts, that the suite can be run on the variant.

    Raises:
        ServingError: the variant's weights are random, or its acceptance length is set by a flag.
        EvalError: the suite's data are not fetched.
        CorpusError: a question of an own evaluation cannot be used.
    """
    speed_only.refuse_speed_only(variant, "quality")
    datasets.require_datasets(suite.datasets, suite.nltk, variant.root)
    suite.require_questions(variant.root)


def with_tool_parser(variant: Variant, suite: Suite) -> Variant:
    """The variant as it is served for a suite: with vLLM's tool parser switched on if questions offer tools.

    The parser is the one that the variant names, else the one that fits the checkpoint's chat template, else hermes.

    Raises:
        CorpusError: a chat template cannot be read, or a question of an own evaluation cannot be used.
    """
    if not suite.offers_tools(variant.root):
        return variant
    key = "VLLM_TOOL_CALL_PARSER"
    templates = read_chat_templates(variant.weights).values()
    named = (
        variant.settings[key].value if key in variant.settings else find_tool_parser(templates) or "hermes"
    )
    return variant.with_lines({"VLLM_ENABLE_AUTO_TOOL_CHOICE": "1", key: named})


def score_task(run: TaskRun) -> TaskScore:
    """Estimate the score of a task from its items."""
    task, items = run.task, run.items
    values, weights = [item.value for item in items], [item.weight for item in items]
    clusters = [item.cluster or (item.index, item.repeat) for item in items]
    estimate = intervals.mean(values, weights, clusters)
    outputs = [item for item in items if item.output is not None]
    floor: dict[str, Any] = {}
    if task.floor is not None:
        means, _ = intervals.by_cluster(values, weights, clusters)
        right = int(means.sum()) if set(means) <= {0.0, 1.0} else None
        floor = {
            "floor": task.floor,
            "floor_verdict": non_inferiority.judge_floor(estimate, task.floor, right=right),
        }
    return TaskScore(
        measure=task.measure,
        value=estimate.value,
        standard_error=estimate.standard_error,
        higher_is_better=task.measure != BITS_PER_BYTE,
        non_inferiority_margin=task.non_inferiority_margin,
        item_count=len({item.index for item in items}),
        available_count=run.available_count,
        cluster_count=estimate.count,
        items_to_decide=task.items_to_decide,
        output_count=len(outputs) if outputs else None,
        truncated_count=sum(bool(item.truncated) for item in outputs) if outputs else None,
        empty_count=sum(not (item.output or "").strip() for item in outputs) if outputs else None,
        output_tokens=_output_tokens([item.output_tokens for item in outputs]),
        settings=dict(run.settings),
        **floor,
    )


def _output_tokens(counts: Sequence[int | None]) -> OutputTokens | None:
    known = [count for count in counts if count is not None]
    if not known or len(known) != len(counts):
        return None
    return OutputTokens(mean=sum(known) / len(known), p50=median(known), max=max(known))
