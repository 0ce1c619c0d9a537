"""Scores of a served variant over a suite of lm-eval tasks, with their standard errors and every item."""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import statistics
from slimqwen.evaluation.output import output_to
from slimqwen.evaluation.served import Served, lost, require_healthy, serve
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.serving import launch
from slimqwen.variant import Variant

ANSWER_MARGIN = "answer_margin_nats"
"""Log-probability of the right option minus that of the best wrong one, natural logarithm."""

BITS_PER_BYTE = "bits_per_byte"
"""Negative log2-likelihood of a text over its UTF-8 bytes; comparable across vocabularies."""

SEED = 1234


class SuiteError(SlimqwenError):
    """A suite file, or a task that it names, that cannot be used."""


@dataclass(frozen=True)
class SuiteTask:
    """One task of a suite.

    Attributes:
        name: the lm-eval task.
        measure: ANSWER_MARGIN, BITS_PER_BYTE, or the lm-eval metric that each item is scored by.
        non_inferiority_margin: a loss up to this, in the unit of the measure, still counts as equal.
    """

    name: str
    measure: str
    non_inferiority_margin: float


@dataclass(frozen=True)
class Suite:
    """Tasks that are scored together, as eval/suites/<name>.yaml states them.

    Attributes:
        name: the file's name.
        tasks_folder: where the lm-eval task files lie.
        chat_template: prompts go through the checkpoint's chat template.
        text_prefix: the token that a text to be read follows, as in training; by name, for IDs differ.
        sample_items: first items of each task that the default run takes.
        tasks: in the order of the file.
    """

    name: str
    tasks_folder: Path
    chat_template: bool
    text_prefix: str
    sample_items: int
    tasks: tuple[SuiteTask, ...]


@dataclass(frozen=True)
class Item:
    """The result of one item.

    Attributes:
        task: its task.
        index: its place in the task's fixed order.
        item: a hash of the item itself, the same for every variant.
        value: its score in the task's measure.
        weight: what the score is averaged by: bytes for BITS_PER_BYTE, else 1.
        output: the generated text, None where nothing is generated.
        truncated: the token limit cut the output, None where nothing is generated.
    """

    task: str
    index: int
    item: str
    value: float
    weight: float
    output: str | None
    truncated: bool | None


@dataclass(frozen=True)
class Scores:
    """What one run over a suite gave: a row for each task, the items, and the files they came from."""

    tasks: dict[str, dict[str, Any]]
    items: list[Item]
    datasets: list[Path]


def load_suite(name: str, root: Path) -> Suite:
    """Read eval/suites/<name>.yaml.

    Raises:
        SuiteError: no such suite, or a field is missing or wrong.
    """
    file = root / "eval" / "suites" / f"{name}.yaml"
    place = f"eval/suites/{file.name}"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        return Suite(
            name=name,
            tasks_folder=root / content["tasks_folder"],
            chat_template=bool(content["chat_template"]),
            text_prefix=str(content["text_prefix"]),
            sample_items=int(content["sample_items"]),
            tasks=tuple(
                SuiteTask(row["task"], row["measure"], float(row["non_inferiority_margin"]))
                for row in content["tasks"]
            ),
        )
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.yaml")))
        raise SuiteError(f"{place} does not exist; there is: {known}") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise SuiteError(f"{place}: unusable ({error!r})") from error


def measure(
    variant: Variant,
    suite: Suite,
    *,
    command: Sequence[str],
    limit: int | None,
    port: int | None = None,
    records_folder: Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Score a variant and write its quality record.

    Args:
        variant: what to score; a server that already runs it is used, else one is started and stopped.
        suite: the tasks.
        command: the command that asked for it, for the record.
        limit: first items of each task; None is all.
        port: where the server is, or shall be.
        records_folder: instead of the variant's own folder.
        progress: told of starting, and of each answered request.

    Returns:
        The record's path.

    Raises:
        ServerLostError: the server died or refused a request; nothing is written.
        SuiteError: a task is missing or broken.
        TooFewItemsError: a limit below 2.
        SlimqwenError: the server cannot be started.
    """
    if limit is not None and limit < 2:
        raise statistics.TooFewItemsError(
            f"a limit of {limit} leaves no standard error: take 2 items or more"
        )
    logs = variant.root / "logs"
    started = provenance.utc_now()
    with serve(variant, port=port, log=logs / f"serve_{variant.name}.log", progress=progress) as served:
        log = logs / f"quality_{variant.name}.log"
        scores = score(suite, served, root=variant.root, limit=limit, log=log, progress=progress)
        record = {
            "schema": "quality/1",
            "variant": variant.name,
            "suite": suite.name,
            "limit": limit,
            "tasks": scores.tasks,
            "provenance": provenance.describe(
                root=variant.root,
                command=command,
                started=started,
                flags=served.server.command.flags,
                environment=served.server.command.environment,
                weights=served.server.weights,
                datasets=scores.datasets,
                seeds={"lm_eval": SEED},
                server="found" if served.found else "started",
            ),
        }
    return store.write(records_folder or variant.folder, record, (vars(item) for item in scores.items))


def score(
    suite: Suite, served: Served, *, root: Path, limit: int | None, log: Path, progress: Progress = silent
) -> Scores:
    """Run the suite through lm-eval against a running server; what lm-eval prints goes to `log`.

    Raises:
        ServerLostError: the server died or refused a request.
        SuiteError: a task is missing or broken.
    """
    progress("loading lm-eval", 0, 0)
    # Read when the libraries are imported: every item is on disk, so no hub is asked for one.
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with (
        output_to(log, "lm_eval"),
        contextlib.chdir(root),
    ):  # task files name their data relative to the repository
        import aiohttp
        from lm_eval import evaluate
        from lm_eval.tasks import TaskManager

        from slimqwen.evaluation.completions import ServedCompletions

        tasks = TaskManager(include_path=str(suite.tasks_folder), include_defaults=False)
        missing = [task.name for task in suite.tasks if task.name not in tasks.all_tasks]
        if missing:
            raise SuiteError(
                f"suite {suite.name}: no task {', '.join(missing)} in {suite.tasks_folder.name}/"
            )
        model = ServedCompletions(
            progress=progress,
            base_url=f"{served.server.base_url}/v1/completions",
            model=served.server.model,
            tokenizer=str(served.server.weights),
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            # At 1 lm-eval takes another code path, with other stop sequences; the server queues the second.
            num_concurrent=max(2, served.max_num_seqs),
            max_length=served.max_model_len,
            max_retries=1,  # a request that fails once is a fact about the server, not noise
            seed=SEED,
            header=launch.authorization() or None,
        )
        loaded = tasks.load([task.name for task in suite.tasks])
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(SEED)
        model.custom_prefix_token_id = _token_id(model.tokenizer, suite)
        try:
            # Not simple_evaluate: it lists every installed package by pip, half a minute for what records hold.
            results = evaluate(
                lm=model,
                task_dict=loaded,
                limit=limit,
                apply_chat_template=suite.chat_template,
                bootstrap_iters=0,  # standard errors are computed here, from the items
            )
        except (aiohttp.ClientError, OSError) as error:
            raise lost(model.activity, error, log) from error
    require_healthy(served.server.base_url, "finishing", log)
    return parse(suite, results, root)


def parse(suite: Suite, results: Mapping[str, Any], root: Path) -> Scores:
    """lm-eval's results -> scores: one value an item, its mean and standard error by task.

    Args:
        suite: what was asked for.
        results: as `lm_eval.evaluate` returns them, samples included.
        root: what the data files of the tasks are relative to.

    Raises:
        SuiteError: a task gives no score under the suite's measure.
    """
    rows: dict[str, dict[str, Any]] = {}
    items: list[Item] = []
    # Beside the data, what asks and scores: the task files and the Python that they call.
    datasets = {file for pattern in ("*.yaml", "*.py") for file in suite.tasks_folder.glob(pattern)}
    for task in suite.tasks:
        of_task = [_item(task, sample) for sample in results["samples"][task.name]]
        of_task.sort(key=lambda item: item.index)
        if len({item.index for item in of_task}) != len(of_task):
            raise SuiteError(f"{task.name}: several filters score an item; leave one in the task file")
        estimate = statistics.mean([i.value for i in of_task], [i.weight for i in of_task])
        generated = [i for i in of_task if i.output is not None]
        rows[task.name] = {
            "measure": task.measure,
            "value": estimate.value,
            "standard_error": estimate.standard_error,
            "higher_is_better": task.measure != BITS_PER_BYTE,
            "non_inferiority_margin": task.non_inferiority_margin,
            "item_count": estimate.count,
            "available_count": results["n-samples"][task.name]["original"],
            "truncated_count": sum(bool(i.truncated) for i in generated) if generated else None,
            "empty_count": sum(not (i.output or "").strip() for i in generated) if generated else None,
        }
        items += of_task
        datasets.update(_data_files(results["configs"][task.name], root))
    return Scores(rows, items, sorted(datasets))


def _item(task: SuiteTask, sample: Mapping[str, Any]) -> Item:
    try:
        value, weight = _value(task.measure, sample)
    except (KeyError, TypeError, ValueError) as error:
        raise SuiteError(f"{task.name}: its items have no {task.measure} ({error!r})") from error
    if not math.isfinite(value):
        raise SuiteError(
            f"{task.name}: item {sample['doc_id']} scored {value}: the model's output is not a number"
        )
    output = sample["resps"][0][0]
    is_text = isinstance(output, str)
    return Item(
        task=task.name,
        index=int(sample["doc_id"]),
        item=hashlib.sha256(
            json.dumps([task.name, sample["doc"]], sort_keys=True, ensure_ascii=False).encode()
        ).hexdigest()[:16],
        value=value,
        weight=weight,
        output=str(output) if is_text else None,
        truncated=getattr(output, "finish_reason", None) == "length" if is_text else None,
    )


def _value(measure: str, sample: Mapping[str, Any]) -> tuple[float, float]:
    """An item's score and what it is averaged by."""
    if measure == ANSWER_MARGIN:
        options = [float(log_likelihood) for log_likelihood, _ in sample["filtered_resps"]]
        right = options.pop(int(sample["target"]))
        return right - max(options), 1.0
    if measure == BITS_PER_BYTE:
        log_likelihood, byte_count = sample[BITS_PER_BYTE]
        return -float(log_likelihood) / math.log(2) / byte_count, float(byte_count)
    return float(sample[measure]), 1.0


def _token_id(tokenizer: Any, suite: Suite) -> int:
    identifier = tokenizer.get_vocab().get(suite.text_prefix)
    if identifier is None:
        raise SuiteError(
            f"suite {suite.name}: text_prefix {suite.text_prefix!r} is no token of this checkpoint"
        )
    return int(identifier)


def _data_files(config: Mapping[str, Any], root: Path) -> Iterable[Path]:
    """The files that a task's items are read from."""
    data_files = config.get("dataset_kwargs", {}).get("data_files", [])
    for value in data_files.values() if isinstance(data_files, Mapping) else [data_files]:
        for name in [value] if isinstance(value, str) else value:
            yield root / name
