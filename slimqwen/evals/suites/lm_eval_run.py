"""Run a published suite through lm-eval against a running server, and score the items of each task."""

import contextlib
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimqwen.captured_log import capture_output
from slimqwen.evals import EvalError
from slimqwen.evals.suites import datasets, item_texts, questions, stated_choices
from slimqwen.evals.suites.loops import is_looping
from slimqwen.evals.suites.scored import Item, TaskRun, item_hash, score_endings
from slimqwen.evals.suites.suite import ANSWER_MARGIN, AUTO, BITS_PER_BYTE, ENDED, Limit, Suite, SuiteTask
from slimqwen.evals.suites.thinking import resolve_thinking
from slimqwen.progress import Progress, silent
from slimqwen.records.journal import Journal
from slimqwen.records.split import Split
from slimqwen.serving.chat_template import served_templates
from slimqwen.serving.server import RunningServer
from slimqwen.serving.shared_server import SharedServer, require_healthy, server_lost
from slimqwen.text.text_prefix import find_prefix
from slimqwen.vllm_plugin.api_key import authorization
from slimqwen.workspace import is_shipped, locate

if TYPE_CHECKING:
    from slimqwen.evals.suites.lm_eval_client import ServedCompletions

SEED = 1234


def run_suite(
    suite: Suite,
    server: SharedServer,
    *,
    limit: Limit,
    log: Path,
    answers: Journal | None = None,
    split: Split | None = None,
    progress: Progress = silent,
) -> tuple[list[TaskRun], list[Path]]:
    """Send the items of a published suite to a running server and score its responses.

    Args:
        suite: the tasks.
        server: server that gets the requests.
        limit: number of items of each task; AUTO: by power analysis; None: all.
        log: file for the output of lm-eval.
        answers: journal of responses, with those of an interrupted run; None keeps none.
        split: side of the split whose items are used; None for both sides.
        progress: receives (activity, done, total) in requests.

    Returns:
        Tasks in the suite's order, and the files that affect their scores.

    Raises:
        EvalError: a task is missing or broken, the suite's data are not fetched, or the server has no chat template, or
            one that ignores the thinking switch that the suite sets.
        ServerLostError: the server died or refused a request.
        PromptTooLongError: the served context cannot hold a prompt.
    """
    root = server.variant.root
    # Data, task files and the Python code that task files call affect the scores.
    files = {*datasets.require_datasets(suite.datasets, suite.nltk, root), *suite.inputs(root)}
    progress("loading lm-eval", 0, 0)
    # The libraries read these variables at import: every item is on disk, so no hub is asked.
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # Task files name their data relative to the repository.
    with capture_output(log, "lm_eval"), contextlib.chdir(root):
        from datasets import config, disable_caching

        # A cache would return items as an earlier run on this machine processed them.
        disable_caching()
        # The reader of JSON files caches all the same; the user's cache may be shared, and read-only.
        config.HF_DATASETS_CACHE = root / ".cache" / "datasets"
        if suite.nltk:
            import nltk  # type: ignore[import-untyped]

            nltk.data.path.insert(0, str(root / datasets.NLTK_DATA))
        manager = _task_manager(suite, root)
        client = _make_client(suite, server, answers=answers, progress=progress)
        rendered = {
            task.name: resolve_thinking(suite, task, server)
            for task in suite.tasks
            if suite.uses_chat_template(task)
        }
        runs: list[TaskRun] = []
        for task in suite.tasks:
            if task.measure == ENDED:
                ended = next(run for run in runs if run.task.name == task.responses_of)
                runs.append(score_endings(task, ended, suite.settings_of(task)))
                continue
            lm_eval_tasks = _load_tasks(manager, suite, task, root)
            count = suite.items_planned(task) if limit == AUTO else limit
            item_numbers = _select_items(lm_eval_tasks, suite, count, split)
            client.begin_task(
                task.name,
                rendered.get(task.name),
                by_chat=task.tools,
                too_long_is_wrong=task.too_long_is_wrong,
            )
            repeats = range(task.repeats if item_numbers else 0)
            results = [
                _evaluate(
                    client,
                    server.server,
                    lm_eval_tasks,
                    item_numbers,
                    SEED + repeat,
                    rendered=task.name in rendered,
                )
                for repeat in repeats
            ]
            sizes = {name: len(each.eval_docs) for name, each in lm_eval_tasks.items()}
            items = parse_samples(task, sizes, [each["samples"] for each in results])
            runs.append(TaskRun(task, items, sum(sizes.values()), suite.settings_of(task)))
            for name in item_numbers:
                files.update(_data_files(lm_eval_tasks[name].dump_config(), root))
    require_healthy(server.server, "finishing")
    return runs, sorted(files)


def parse_samples(
    task: SuiteTask, sizes: Mapping[str, int], runs: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]
) -> list[Item]:
    """Convert lm-eval's samples of one task to items, sorted by their position in the task and by repeat.

    Args:
        task: the suite's task.
        sizes: item count of each lm-eval task that `task` consists of, in order.
        runs: for each repeat, the "samples" of `lm_eval.evaluate`, by lm-eval task.

    Raises:
        EvalError: an item has no score or several scores in the task's measure, or one that is no number.
    """
    offsets = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    items = [
        _item(task, sample, offsets[part], repeat)
        for repeat, samples_by_part in enumerate(runs)
        for part, samples in samples_by_part.items()
        for sample in samples
    ]
    items.sort(key=lambda item: (item.index, item.repeat))
    if len({(item.index, item.repeat) for item in items}) != len(items):
        raise EvalError(f"{task.name}: several filters score each item; keep one in the task file")
    return items


def _evaluate(
    client: "ServedCompletions",
    server: RunningServer,
    lm_eval_tasks: Mapping[str, Any],
    item_numbers: Mapping[str, list[int]],
    seed: int,
    *,
    rendered: bool,
) -> Mapping[str, Any]:
    """Run lm-eval once over the selected items and return its results.

    Args:
        item_numbers: items to evaluate, by lm-eval task.
    """
    import aiohttp
    import lm_eval

    for lm_eval_task in lm_eval_tasks.values():
        if lm_eval_task.OUTPUT_TYPE == "generate_until":  # replaces the client's seed
            lm_eval_task.set_config("generation_kwargs", {"seed": seed}, update=True)
    try:
        # simple_evaluate would spend half a minute on listing the installed packages with pip.
        results: Mapping[str, Any] = lm_eval.evaluate(
            lm=client,
            task_dict={"tasks": {name: lm_eval_tasks[name] for name in item_numbers}},
            samples=item_numbers,
            apply_chat_template=rendered,
            bootstrap_iters=0,  # standard errors are computed from the items
        )
    except (aiohttp.ClientError, OSError) as error:
        raise server_lost(server, client.activity, error) from error
    return results


def _task_manager(suite: Suite, root: Path) -> Any:
    """lm-eval's index of the suite's task definitions."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folders = [Path(lm_eval.__file__).parent / "tasks" / folder for folder in suite.lm_eval_folders]
    folders += [locate(suite.tasks_folder, root)] if suite.tasks_folder else []
    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    asked = [task for task in suite.tasks if task.measure != ENDED]
    missing = [task.name for task in asked if task.lm_eval_name not in manager.all_tasks]
    if missing:
        searched = ", ".join(folder.name for folder in folders)
        raise EvalError(
            f"suite {suite.name}: no task {', '.join(missing)} in {searched}/; correct the task's name in the suite"
        )
    return manager


def _make_client(
    suite: Suite, server: SharedServer, *, answers: Journal | None, progress: Progress
) -> "ServedCompletions":
    from slimqwen.evals.suites.lm_eval_client import ServedCompletions

    client = ServedCompletions(
        server_url=server.server.base_url,
        progress=progress,
        answers=answers,
        max_model_len=server.max_model_len,
        model=server.server.model,
        tokenizer=str(server.server.weights),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        # At 1 lm-eval takes another code path with other stop sequences; at 2 the server queues one request if need be.
        num_concurrent=max(2, server.max_num_seqs),
        max_retries=1,  # a request that fails once is a fact about the server, not noise
        seed=SEED,
        header=authorization() or None,
        verify_certificate=False,  # see `serving.http_client`
    )
    # The server's template differs from the tokenizer's with --chat-template or with a processor.
    templates = served_templates(server.variant, server.server.command.flags)
    client.tokenizer.chat_template = {name: each.text for name, each in templates.items()} or None
    if suite.text_prefix is not None:
        prefix = find_prefix(suite.text_prefix, [client.tokenizer.get_vocab()])
        if prefix is None:
            raise EvalError(
                f"suite {suite.name}: text_prefix {suite.text_prefix!r} is not a token of this checkpoint; set a "
                "token that it has"
            )
        client.custom_prefix_token_id = prefix[0]
    return client


def _load_tasks(manager: Any, suite: Suite, task: SuiteTask, root: Path) -> dict[str, Any]:
    """Load the lm-eval tasks that a task of the suite consists of, by name."""
    name = task.lm_eval_name
    names = manager.task_index[name].cfg["task"] if name in manager.all_groups else [name]
    # lm-eval applies overrides only to members of a group.
    scoring = _STATED_CHOICE if task.scored_by else {}
    members = [
        {"task": member, **_locate_data(manager.task_index[member].cfg, root), **task.overrides, **scoring}
        for member in names
    ]
    loaded = manager.load([{"group": f"{suite.name} {task.name}", "task": members}])
    lm_eval_tasks: dict[str, Any] = dict(sorted(loaded["tasks"].items()))
    for lm_eval_task in lm_eval_tasks.values():
        if lm_eval_task.get_config("num_fewshot") is None:
            lm_eval_task.set_config("num_fewshot", 0)
        lm_eval_task.set_fewshot_seed(SEED)
        if (process := lm_eval_task.config.process_docs) is not None:
            lm_eval_task.set_config("process_docs", _seeded(process))
    return lm_eval_tasks


def score_stated_choice(document: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float]:
    """Score a response in the form of lm-eval's `process_results`: 1 if it states the right one of `choices`, else 0.

    Args:
        document: item with the texts of the choices, and the letter of the right one as `answer`, such as "(A)".
        responses: the responses, of which the first is scored.
    """
    stated = stated_choices.stated_choice(responses[0], document["choices"])
    return {questions.SCORE: float(stated == ord(document["answer"].strip("()")) - ord("A"))}


_STATED_CHOICE = {
    "process_results": score_stated_choice,
    "filter_list": [{"name": "whole response", "filter": [{"function": "take_first"}]}],
}
"""Fields of a task's definition that have its responses scored by `score_stated_choice`."""


def _seeded(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a task's `process_docs` so that each call starts from the same random seed.

    Some tasks shuffle options in it, and lm-eval calls it twice: to make the prompts and to score the responses.
    """

    def process_with_seed(items: Any) -> Any:
        random.seed(SEED)
        return process(items)

    return process_with_seed


def _select_items(
    lm_eval_tasks: Mapping[str, Any], suite: Suite, count: int | None, split: Split | None
) -> dict[str, list[int]]:
    """Select the first `count` items over all lm-eval tasks (None: all); returns item numbers by lm-eval task."""
    items = [
        (name, number, doc)
        for name, lm_eval_task in lm_eval_tasks.items()
        for number, doc in enumerate(lm_eval_task.eval_docs)
        if split is None or split.has(_split_text(lm_eval_task, doc))
    ]
    if suite.sample == "drawn":
        items.sort(key=lambda item: item_hash(item[2]))
    item_numbers: dict[str, list[int]] = {}
    for name, number, _ in sorted(items[:count], key=lambda item: item[:2]):
        item_numbers.setdefault(name, []).append(number)
    return item_numbers


def _split_text(lm_eval_task: Any, doc: Mapping[str, Any]) -> str:
    """The text whose hash decides on which side of the split an item is: its question, or the text that is scored.

    Two tasks may ask the same question, and fidelity may read the texts of a task; equal texts are on the same side.
    """
    for text in (lm_eval_task.doc_to_text(doc), lm_eval_task.doc_to_target(doc)):
        if isinstance(text, str) and text:
            return text
    return json.dumps(doc, sort_keys=True, ensure_ascii=False)


def _item(task: SuiteTask, sample: Mapping[str, Any], offset: int, repeat: int) -> Item:
    try:
        value, weight = _score(task.measure, sample)
    except (KeyError, TypeError, ValueError) as error:
        raise EvalError(
            f"{task.name}: the items have no {task.measure} ({error!r}); correct `measure` in the suite"
        ) from error
    if not math.isfinite(value):
        raise EvalError(
            f"{task.name}: item {sample['doc_id']} scored {value}, not a number; its weights may be damaged: make "
            "or download the checkpoint anew"
        )
    output = sample["resps"][0][0]
    is_text = isinstance(output, str)
    item = item_hash([task.name, sample["doc"]])
    return Item(
        task=task.name,
        index=offset + int(sample["doc_id"]),
        item=item,
        value=value,
        weight=weight,
        output=str(output) if is_text else None,
        truncated=getattr(output, "finish_reason", None) == "length" if is_text else None,
        repeat=repeat,
        cluster=item if task.repeats > 1 else None,
        output_tokens=getattr(output, "tokens", None),
        looping=is_looping(output) if is_text else None,
        question=item_texts.question(sample),
        expected=item_texts.expected(sample),
    )


def _score(measure: str, sample: Mapping[str, Any]) -> tuple[float, float]:
    """Score of an item in the unit of the measure, and its weight."""
    if measure == ANSWER_MARGIN:
        options = [float(log_likelihood) for log_likelihood, _ in sample["filtered_resps"]]
        right = options.pop(int(sample["target"]))
        return right - max(options), 1.0
    if measure == BITS_PER_BYTE:
        log_likelihood, byte_count = sample[BITS_PER_BYTE]
        return -float(log_likelihood) / math.log(2) / byte_count, float(byte_count)
    return float(sample[measure]), 1.0


def _locate_data(config: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The part of a task's configuration that says where its data lies in the installation; empty if in the workspace.

    Task files name their data from the top of either.
    """
    kwargs = config.get("dataset_kwargs") or {}
    named = kwargs.get("data_files", [])
    located = _locate(named, root)
    return {} if located == named else {"dataset_kwargs": {**kwargs, "data_files": located}}


def _locate(data_files: Any, root: Path) -> Any:
    if isinstance(data_files, Mapping):
        return {split: _locate(names, root) for split, names in data_files.items()}
    if isinstance(data_files, str):
        found = locate(data_files, root)
        return str(found) if is_shipped(found, root) else data_files
    return [_locate(name, root) for name in data_files]


def _data_files(config: Mapping[str, Any], root: Path) -> Iterable[Path]:
    """Data files that a task's configuration names."""
    data_files = config.get("dataset_kwargs", {}).get("data_files", [])
    for value in data_files.values() if isinstance(data_files, Mapping) else [data_files]:
        for name in [value] if isinstance(value, str) else value:
            path = locate(name, root)
            yield from (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
