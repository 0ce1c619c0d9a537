"""Scores of a served variant over a suite of lm-eval tasks, with their standard errors and every item."""

import contextlib
import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import datasets, statistics, verdict
from slimqwen.evaluation.answers import Answers, kept, unfinished
from slimqwen.evaluation.datasets import HubDataset
from slimqwen.evaluation.output import output_to
from slimqwen.evaluation.served import Served, ServerLostError, lost, require_healthy, serve
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.serving import launch
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from slimqwen.evaluation.completions import ServedCompletions

ANSWER_MARGIN = "answer_margin_nats"
"""Log-probability of the right option minus that of the best wrong one, natural logarithm."""

BITS_PER_BYTE = "bits_per_byte"
"""Negative log2-likelihood of a text over its UTF-8 bytes; comparable across vocabularies."""

SEED = 1234

DECIDING: Final = "deciding"
"""As many items of each task as decide at its margin if what the suite assumes holds."""

_MAX_GEN_TOKS = 256  # lm-eval's own, where a task names none

Limit = int | Literal["deciding"] | None


class SuiteError(SlimqwenError):
    """A suite file, or a task that it names, that cannot be used."""


class SuiteTask(BaseModel):
    """One task of a suite.

    Attributes:
        name: what it is called in records; `task` in the file.
        measure: ANSWER_MARGIN, BITS_PER_BYTE, or the lm-eval metric that each item is scored by.
        non_inferiority_margin: a loss up to this, in the unit of the measure, still counts as equal.
        floor: what the score must not fall below, in the unit of the measure.
        assumed_discordance: for answers that are right or wrong, the share that two equally good variants answer
            differently.
        assumed_deviation: for other measures, the standard deviation of the items' paired differences.
        definition: the lm-eval task, or group of tasks whose items are taken together; by default the name.
        overrides: fields of that definition that are replaced.
        thinking: what enable_thinking of the chat template is set to; None leaves it to the server or template.
        thinking_tokens: added to the limit of a generation that thinks.
        reads_thoughts: the scoring looks at thoughts itself; else it sees what follows them.
        repeats: generations of each item, each with a seed of its own.
        cluster_by: the field of an item that says which passage it shares with others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(alias="task")
    measure: str
    non_inferiority_margin: NonNegativeFloat
    floor: float | None = None
    assumed_discordance: float | None = Field(default=None, gt=0, lt=1)
    assumed_deviation: PositiveFloat | None = None
    definition: str | None = None
    overrides: dict[str, Any] = {}
    thinking: bool | None = None
    thinking_tokens: NonNegativeInt = 0
    reads_thoughts: bool = False
    repeats: PositiveInt = 1
    cluster_by: str | None = None

    @property
    def items_to_decide(self) -> int | None:
        """Items that decide at the margin if the assumption holds; None where nothing is assumed."""
        if self.assumed_discordance is not None:
            return verdict.items_to_decide(self.non_inferiority_margin, self.assumed_discordance)
        if self.assumed_deviation is not None:
            return verdict.items_to_decide_mean(self.non_inferiority_margin, self.assumed_deviation)
        return None

    def settings(self, *, rendered: bool) -> dict[str, Any]:
        """What two records must share to be comparable, beside the measure and the items."""
        names = {"definition", "overrides", "repeats", "cluster_by"}
        if rendered:
            names |= {"thinking", "thinking_tokens", "reads_thoughts"}
        return self.model_dump(include=names, exclude_defaults=True)


class Suite(BaseModel):
    """Tasks that are scored together, as eval/suites/<name>.yaml states them.

    Attributes:
        name: the file's name.
        tasks_folder: where its own lm-eval task files lie.
        lm_eval_folders: folders of the installed lm-eval's tasks that its definitions are in.
        chat_template: prompts go through the checkpoint's chat template.
        chat_message: where the task files hold prompts that are rendered already, what the user said in them.
        text_prefix: the token that a text to be read follows, as in training; by name, for IDs differ.
        sample: which items a run over some of them takes: the first of the file, or those that their hashes draw.
        max_gen_toks: no generation is longer, whatever its task says.
        datasets: of the hub, fetched by `make datasets`.
        nltk: nltk's resources that the scoring needs, fetched by the same.
        tasks: in the order of the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    tasks_folder: Path | None = None
    lm_eval_folders: tuple[str, ...] = ()
    chat_template: bool
    chat_message: str | None = None
    text_prefix: str | None = None
    sample: Literal["first", "drawn"]
    max_gen_toks: PositiveInt | None = None
    datasets: tuple[HubDataset, ...] = ()
    nltk: tuple[str, ...] = ()
    tasks: tuple[SuiteTask, ...] = Field(min_length=1)

    def with_thinking(self, thinking: bool, *, chat: bool) -> "Suite":
        """The same with all generations thinking, or none.

        Raises:
            SuiteError: its prompts are rendered already, and are not asked by chat.
        """
        if not (self.chat_template or chat):
            raise SuiteError(
                f"the prompts of suite {self.name} are rendered already, with thoughts or without; by chat they can be "
                "asked otherwise: add --chat"
            )
        tasks = tuple(task.model_copy(update={"thinking": thinking}) for task in self.tasks)
        return self.model_copy(update={"tasks": tasks})

    def shortened(self, max_gen_toks: int) -> "Suite":
        """The same with no item asked twice and no answer longer than that many tokens: for a quick look."""
        tasks = tuple(task.model_copy(update={"repeats": 1}) for task in self.tasks)
        return self.model_copy(update={"tasks": tasks, "max_gen_toks": max_gen_toks})


@dataclass(frozen=True)
class Item:
    """The result of one item.

    Attributes:
        task: its task.
        index: its place in the task's fixed order.
        item: a hash of the item itself, the same for every variant.
        value: its score in the task's measure.
        weight: what the score is averaged by: bytes for BITS_PER_BYTE, else 1.
        output: the generated text that was scored, None where nothing is generated.
        truncated: the token limit cut the output, None where nothing is generated.
        repeat: which of the item's generations it is, from 0.
        cluster: what it shares with items that are no independent observations; None where it stands alone.
        output_tokens: generated, thoughts included; None where nothing is, or the server does not say.
    """

    task: str
    index: int
    item: str
    value: float
    weight: float
    output: str | None
    truncated: bool | None
    repeat: int = 0
    cluster: str | None = None
    output_tokens: int | None = None


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
        suite = Suite.model_validate({**yaml.safe_load(file.read_text(encoding="utf-8")), "name": name})
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.yaml")))
        raise SuiteError(f"{place} does not exist; there is: {known}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = "/".join(map(str, first["loc"]))
        raise SuiteError(f"{place}: unusable ({where}: {first['msg']})") from error
    except (yaml.YAMLError, TypeError) as error:
        raise SuiteError(f"{place}: unusable ({' '.join(repr(error).split())})") from error
    if suite.tasks_folder is None:
        return suite
    return suite.model_copy(update={"tasks_folder": root / suite.tasks_folder})


def measure(
    variant: Variant,
    suite: Suite,
    *,
    command: Sequence[str],
    limit: Limit,
    chat: bool = False,
    port: int | None = None,
    records_folder: Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Score a variant and write its quality record.

    What the server has answered is kept in .cache/quality/ until the record is written: the same call goes on from
    there after an interruption.

    Args:
        variant: what to score; a server that already runs it is used, else one is started and stopped.
        suite: the tasks.
        command: the command that asked for it, for the record.
        limit: items of each task, DECIDING, or None for all.
        chat: ask through /v1/chat/completions, which only tasks that generate can be.
        port: where the server is, or shall be.
        records_folder: instead of the variant's own folder.
        progress: told of starting, and of each answered request.

    Returns:
        The record's path.

    Raises:
        ServerLostError: the server died or refused a request; no record is written, its answers are kept.
        SuiteError: a task is missing or broken, or the chat template has no switch for what the suite asks.
        slimqwen.evaluation.datasets.MissingDataError: the suite's data have not been fetched.
        slimqwen.evaluation.answers.RunInProgressError: another process is at the same run.
        slimqwen.evaluation.completions.PromptTooLongError: the served context cannot hold a prompt.
        TooFewItemsError: a limit below 2.
        SlimqwenError: the server cannot be started.
    """
    if isinstance(limit, int) and limit < 2:
        raise statistics.TooFewItemsError(
            f"a limit of {limit} leaves no standard error: take 2 items or more"
        )
    datasets.require(suite.datasets, suite.nltk, variant.root)
    logs = variant.root / "logs"
    started = provenance.utc_now()
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(
            serve(variant, port=port, log=logs / f"serve_{variant.name}.log", progress=progress)
        )
        answers = stack.enter_context(
            kept(unfinished("quality", served.server.command, suite.model_dump(mode="json"), limit, chat))
        )
        log = logs / f"quality_{variant.name}.log"
        try:
            scores = score(
                suite,
                served,
                root=variant.root,
                limit=limit,
                chat=chat,
                answers=answers,
                log=log,
                progress=progress,
            )
        except ServerLostError as error:
            raise ServerLostError(
                f"{error}; its {len(answers)} answers so far are kept: the same command goes on from there"
            ) from error
        record = {
            "schema": "quality/2",
            "variant": variant.name,
            "suite": suite.name,
            "limit": limit,
            "endpoint": "chat" if chat else "completions",
            "answers_of_earlier_run": answers.taken_over,
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
        path = store.write(records_folder or variant.folder, record, (vars(item) for item in scores.items))
        answers.discard()
    return path


def score(
    suite: Suite,
    served: Served,
    *,
    root: Path,
    limit: Limit,
    log: Path,
    chat: bool = False,
    answers: Answers | None = None,
    progress: Progress = silent,
) -> Scores:
    """Run the suite through lm-eval against a running server; what lm-eval prints goes to `log`.

    Raises:
        ServerLostError: the server died or refused a request.
        SuiteError: a task is missing or broken, or the chat template has no switch for what the suite asks.
        slimqwen.evaluation.datasets.MissingDataError: the suite's data have not been fetched.
        slimqwen.evaluation.completions.PromptTooLongError: the served context cannot hold a prompt.
    """
    archives = datasets.require(suite.datasets, suite.nltk, root)
    progress("loading lm-eval", 0, 0)
    # Read when the libraries are imported: every item is on disk, so no hub is asked for one.
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with (
        output_to(log, "lm_eval"),
        contextlib.chdir(root),
    ):  # task files name their data relative to the repository
        import aiohttp
        import lm_eval
        from datasets import disable_caching

        # What a task makes of its items would otherwise be what some earlier run on this machine made.
        disable_caching()
        if suite.nltk:
            import nltk  # type: ignore[import-untyped]

            nltk.data.path.insert(0, str(root / datasets.NLTK_DATA))
        manager = _task_manager(suite)
        model = _client(suite, served, chat=chat, answers=answers, progress=progress)
        rendered = chat or suite.chat_template
        if rendered and any(task.thinking is not None for task in suite.tasks):
            _require_switch(model.prompt_tokenizer, served.server.weights)
        rows: dict[str, dict[str, Any]] = {}
        items: list[Item] = []
        # Beside the data, what asks and scores: the task files and the Python that they call.
        files = set(archives)
        for pattern in ("*.yaml", "*.py"):
            files.update(suite.tasks_folder.glob(pattern) if suite.tasks_folder else ())
        for task in suite.tasks:
            thinking = task.thinking if rendered else None
            parts = _load(manager, suite, task, chat=chat, thinks=thinking is True)
            if chat and any(part.OUTPUT_TYPE != "generate_until" for part in parts.values()):
                continue
            chosen = _choose(parts, suite, task.items_to_decide if limit == DECIDING else limit)
            model.task = task.name
            model.thinking = thinking
            model.drops_thoughts = rendered and not task.reads_thoughts
            runs = []
            for repeat in range(task.repeats):
                for part in parts.values():
                    if part.OUTPUT_TYPE == "generate_until":  # the seed replaces the client's
                        part.set_config("generation_kwargs", {"seed": SEED + repeat}, update=True)
                try:
                    # Not simple_evaluate: it lists every installed package by pip, half a minute for what records hold.
                    runs.append(
                        lm_eval.evaluate(
                            lm=model,
                            task_dict={"tasks": {name: parts[name] for name in chosen}},
                            samples=chosen,
                            apply_chat_template=rendered,
                            bootstrap_iters=0,  # standard errors are computed here, from the items
                        )
                    )
                except (aiohttp.ClientError, OSError) as error:
                    raise lost(model.activity, error, log) from error
            sizes = {name: len(part.eval_docs) for name, part in parts.items()}
            rows[task.name], of_task = parse(task, sizes, runs, rendered=rendered)
            items += of_task
            for config in runs[0]["configs"].values():
                files.update(_data_files(config, root))
    if not rows:
        raise SuiteError(f"suite {suite.name}: none of its tasks generates, so none can be asked by chat")
    require_healthy(served.server.base_url, "finishing", log)
    return Scores(rows, items, sorted(files))


def parse(
    task: SuiteTask, sizes: Mapping[str, int], runs: Sequence[Mapping[str, Any]], *, rendered: bool
) -> tuple[dict[str, Any], list[Item]]:
    """lm-eval's results of one task -> its row of the record, and one item for each answer.

    Args:
        task: what was asked for.
        sizes: items of each lm-eval task that it is made of, in their order.
        runs: as `lm_eval.evaluate` returns them, samples included, one for each repeat.
        rendered: the prompts went through a chat template.

    Raises:
        SuiteError: an item has no score under the task's measure, or several.
    """
    offsets = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    items = [
        _item(task, sample, offsets[part], repeat)
        for repeat, results in enumerate(runs)
        for part, samples in results["samples"].items()
        for sample in samples
    ]
    items.sort(key=lambda item: (item.index, item.repeat))
    if len({(item.index, item.repeat) for item in items}) != len(items):
        raise SuiteError(f"{task.name}: several filters score an item; leave one in the task file")
    values, weights = [item.value for item in items], [item.weight for item in items]
    clusters = [item.cluster or (item.index, item.repeat) for item in items]
    estimate = statistics.mean(values, weights, clusters)
    generated = [item for item in items if item.output is not None]
    row = {
        "measure": task.measure,
        "value": estimate.value,
        "standard_error": estimate.standard_error,
        "higher_is_better": task.measure != BITS_PER_BYTE,
        "non_inferiority_margin": task.non_inferiority_margin,
        "item_count": len({item.index for item in items}),
        "available_count": sum(sizes.values()),
        "cluster_count": estimate.count,
        "items_to_decide": task.items_to_decide,
        "output_count": len(generated) if generated else None,
        "truncated_count": sum(bool(item.truncated) for item in generated) if generated else None,
        "empty_count": sum(not (item.output or "").strip() for item in generated) if generated else None,
        "output_tokens": _lengths([item.output_tokens for item in generated]),
        "settings": task.settings(rendered=rendered),
    }
    if task.floor is not None:
        means, _ = statistics.by_cluster(values, weights, clusters)
        right = int(means.sum()) if set(means) <= {0.0, 1.0} else None
        row |= {"floor": task.floor, "floor_verdict": verdict.judge_floor(estimate, task.floor, right=right)}
    return row, items


def _task_manager(suite: Suite) -> Any:
    """lm-eval's index of the suite's definitions."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folders = [Path(lm_eval.__file__).parent / "tasks" / folder for folder in suite.lm_eval_folders]
    folders += [suite.tasks_folder] if suite.tasks_folder else []
    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    missing = [task.name for task in suite.tasks if _definition(task) not in manager.all_tasks]
    if missing:
        places = ", ".join(folder.name for folder in folders)
        raise SuiteError(f"suite {suite.name}: no task {', '.join(missing)} in {places}/")
    return manager


def _client(
    suite: Suite, served: Served, *, chat: bool, answers: Answers | None, progress: Progress
) -> "ServedCompletions":
    from slimqwen.evaluation.completions import ServedChat, ServedCompletions

    arguments: dict[str, Any] = {
        "progress": progress,
        "answers": answers,
        "max_model_len": served.max_model_len,
        "model": served.server.model,
        "tokenizer": str(served.server.weights),
        # At 1 lm-eval takes another code path, with other stop sequences; the server queues the second.
        "num_concurrent": max(2, served.max_num_seqs),
        "max_retries": 1,  # a request that fails once is a fact about the server, not noise
        "seed": SEED,
        "header": launch.authorization() or None,
    }
    if chat:
        return ServedChat(base_url=f"{served.server.base_url}/v1/chat/completions", **arguments)
    client = ServedCompletions(
        base_url=f"{served.server.base_url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        **arguments,
    )
    if suite.text_prefix is not None:
        client.custom_prefix_token_id = _token_id(client.tokenizer, suite)
    return client


def _definition(task: SuiteTask) -> str:
    return task.definition or task.name


def _load(manager: Any, suite: Suite, task: SuiteTask, *, chat: bool, thinks: bool) -> dict[str, Any]:
    """The lm-eval tasks that a task of the suite is made of, by name."""
    name = _definition(task)
    names = manager.task_index[name].cfg["task"] if name in manager.all_groups else [name]
    # Only members of a group take overrides.
    members = [{"task": member, **task.overrides} for member in names]
    loaded = manager.load([{"group": f"{suite.name} {task.name}", "task": members}])
    parts: dict[str, Any] = dict(sorted(loaded["tasks"].items()))
    for part in parts.values():
        if part.get_config("num_fewshot") is None:
            part.set_config("num_fewshot", 0)
        part.set_fewshot_seed(SEED)
        if (process := part.config.process_docs) is not None:
            part.set_config("process_docs", _seeded(process))
        if part.OUTPUT_TYPE == "generate_until":
            longest = part.config.generation_kwargs.get("max_gen_toks", _MAX_GEN_TOKS)
            longest += task.thinking_tokens if thinks else 0
            longest = min(longest, suite.max_gen_toks or longest)
            part.set_config("generation_kwargs", {"max_gen_toks": longest}, update=True)
            if chat and suite.chat_message is not None:
                part.set_config("doc_to_text", suite.chat_message)
    return parts


def _seeded(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same processing of a task's items with the same result each time, also where it shuffles options.

    lm-eval processes the items anew whenever they are read, for asking and for scoring.
    """

    def processed(items: Any) -> Any:
        random.seed(SEED)
        return process(items)

    return processed


def _choose(parts: Mapping[str, Any], suite: Suite, count: int | None) -> dict[str, list[int]]:
    """Which items of each part are asked: `count` of all together, or all."""
    places = [
        (name, number, doc) for name, part in parts.items() for number, doc in enumerate(part.eval_docs)
    ]
    if suite.sample == "drawn":
        places.sort(key=lambda place: _hash(place[2]))
    chosen: dict[str, list[int]] = {}
    for name, number, _ in sorted(places[:count], key=lambda place: place[:2]):
        chosen.setdefault(name, []).append(number)
    return chosen


def _require_switch(tokenizer: Any, weights: Path) -> None:
    from slimqwen.evaluation.completions import render

    if tokenizer.chat_template is None:
        raise SuiteError(f"weights/{weights.name} has no chat template, which this suite asks by")
    asked = [{"role": "user", "content": "?"}]
    if render(tokenizer, asked, True) == render(tokenizer, asked, False):
        raise SuiteError(
            f"the chat template of weights/{weights.name} has no thinking switch: enable_thinking changes nothing in it"
        )


def _lengths(tokens: Sequence[int | None]) -> dict[str, float] | None:
    known = [count for count in tokens if count is not None]
    if not known or len(known) != len(tokens):
        return None
    return {"mean": sum(known) / len(known), "p50": median(known), "max": max(known)}


def _item(task: SuiteTask, sample: Mapping[str, Any], offset: int, repeat: int) -> Item:
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
    item = _hash([task.name, sample["doc"]])
    cluster = item if task.repeats > 1 else None
    if task.cluster_by is not None:
        if task.cluster_by not in sample["doc"]:
            raise SuiteError(f"{task.name}: its items have no {task.cluster_by}, by which they are clustered")
        cluster = _hash([task.name, sample["doc"][task.cluster_by]])
    return Item(
        task=task.name,
        index=offset + int(sample["doc_id"]),
        item=item,
        value=value,
        weight=weight,
        output=str(output) if is_text else None,
        truncated=getattr(output, "finish_reason", None) == "length" if is_text else None,
        repeat=repeat,
        cluster=cluster,
        output_tokens=getattr(output, "tokens", None),
    )


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


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
    """What texts to be read follow, in this checkpoint's vocabulary."""
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
