"""Suites: the lm-eval tasks that are scored together, as eval/suites/<name>.yaml states them."""

import contextlib
import functools
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from slimqwen.evals.suites import questions
from slimqwen.evals.suites.datasets import HubDataset, is_fetched
from slimqwen.evals.suites.questions import Question
from slimqwen.evals.suites.scorer import Metric
from slimqwen.identity.source import reach
from slimqwen.records.settings import OWN, Settings
from slimqwen.records.split import Side, Split
from slimqwen.stats import sequential
from slimqwen.text.tables import find_table
from slimqwen.text.text_prefix import Prefix
from slimqwen.workspace import locate
from slimqwen.yaml_file import YamlText

ANSWER_MARGIN: Final = "answer_margin_nats"
"""Answer log-probability gap: log-probability of the right option minus that of the best wrong one, in nats."""

BITS_PER_BYTE: Final = "bits_per_byte"
"""Negative log2-likelihood of a text per UTF-8 byte; comparable across vocabularies."""

ENDED: Final = "ended"
"""1 for a response that ends by itself, without a loop (`loops.is_looping`) or its token limit; else 0."""

AUTO: Final = "auto"
"""Sample size by power analysis: the items that a verdict at the task's margin needs under the suite's assumptions."""

Limit = int | Literal["auto"] | None
"""Number of items of each task; None for all, AUTO for the sample size by power analysis."""


class SuiteTask(BaseModel):
    """One task of a suite.

    Attributes:
        name: name in records; `task` in the file.
        measure: ANSWER_MARGIN, BITS_PER_BYTE, ENDED, or the lm-eval metric of each item.
        non_inferiority_margin: largest loss that counts as equal, in the unit of the measure.
        floor: lowest acceptable score, in the unit of the measure.
        assumed_discordance: for right-or-wrong answers, the share of items that two equally good variants answer
            differently.
        assumed_deviation: for other measures, the standard deviation of the paired differences.
        definition: lm-eval task, or group of tasks whose items are pooled; `name` by default.
        overrides: fields of the definition that are replaced.
        thinking: enable_thinking of the chat template; None leaves the default. Thoughts are not scored.
        repeats: generations of each item, each with its own seed.
        scored_by: "stated choice" for the choice that a response states (`stated_choices`), of items with `choices` and
            an answer such as "(A)"; None for the definition's own scoring.
        responses_of: earlier task whose responses are scored by ENDED; nothing is generated for this one.
        tools: whether items offer tools, so that requests go to the server's chat endpoint and its tool parser.
        chat_template: whether prompts go through the chat template; None for what the suite says.
        data: folder of a dataset without which the task is left out; None for a task that is always scored.
        too_long_is_wrong: whether a prompt beyond the served context gets an empty response; if not, it is an error.
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
    repeats: PositiveInt = 1
    scored_by: Literal["stated choice"] | None = None
    responses_of: str | None = None
    tools: bool = False
    chat_template: bool | None = None
    data: Path | None = None
    too_long_is_wrong: bool = False

    @property
    def lm_eval_name(self) -> str:
        """Name of the lm-eval task or group."""
        return self.definition or self.name

    @property
    def items_to_decide(self) -> int | None:
        """Items needed for a verdict at the margin under the suite's assumption; None if it makes none.

        The number is fixed before the first look and does not follow the results.
        """
        if not self.non_inferiority_margin:
            return None  # no number of items shows that nothing at all is lost
        if self.assumed_discordance is not None:
            return sequential.items_to_decide(self.non_inferiority_margin, self.assumed_discordance)
        if self.assumed_deviation is not None:
            return sequential.items_to_decide_mean(self.non_inferiority_margin, self.assumed_deviation)
        return None

    def settings(self, *, rendered: bool) -> dict[str, Any]:
        """Settings of this task that change responses or scores, by name; defaults are left out.

        Args:
            rendered: whether prompts go through a chat template.
        """
        names = {"definition", "overrides", "repeats", "scored_by", "responses_of", "chat_template"}
        names |= {"thinking"} if rendered else set()
        return self.model_dump(include=names, exclude_defaults=True)


class OwnQuestions(BaseModel):
    """suite.yaml of an own evaluation: how its questions are asked and scored.

    Attributes:
        metric: exact, contains, choice or tool_call; None for what fits each question.
        non_inferiority_margin: largest loss of the share of right responses that counts as equal.
        assumed_discordance: share of questions that only one of two equally good variants gets right.
        max_gen_toks: longest response, tokens.
        thinking: enable_thinking of the chat template; None leaves its default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: Metric | None
    non_inferiority_margin: NonNegativeFloat
    assumed_discordance: float = Field(gt=0, lt=1)
    max_gen_toks: PositiveInt
    thinking: bool | None


class Suite(Settings):
    """Tasks that are scored together.

    Attributes:
        tasks_folder: folder of the suite's own lm-eval task files, relative to the repository.
        lm_eval_folders: folders of lm-eval's own tasks that hold its definitions.
        chat_template: whether prompts go through the checkpoint's chat template.
        text_prefix: text of the token before each scored text, as in training, or several, of which the first that is a
            token of the checkpoint is taken; its id differs between vocabularies.
        sample: which items a limited run scores: `first` of the file, or `drawn`: those with the smallest hashes.
        datasets: hub datasets, fetched by `slimqwen download --suite`.
        nltk: nltk resources for scoring, fetched by the same command.
        tasks: tasks in the order of the file, without those whose data are missing.
        left_out: names of the tasks whose data are missing.
        proof_share: share of the items that are kept from a search for the proof of its result; it also splits the
            texts of fidelity and the documents of acceptance of the same gate.
        questions: how the questions of an own evaluation are asked; None for other suites.
    """

    folder: ClassVar[str] = "suites"
    own_file: ClassVar[str] = "suite"

    tasks_folder: Path | None = None
    lm_eval_folders: tuple[str, ...] = ()
    chat_template: bool
    text_prefix: Prefix | None = None
    sample: Literal["first", "drawn"]
    datasets: tuple[HubDataset, ...] = ()
    nltk: tuple[str, ...] = ()
    tasks: tuple[SuiteTask, ...] = Field(min_length=1)
    left_out: tuple[str, ...] = ()
    proof_share: float = Field(default=0.5, gt=0, lt=1)
    questions: OwnQuestions | None = None

    @model_validator(mode="after")
    def _check_scored_again(self) -> Self:
        earlier: set[str] = set()
        for task in self.tasks:
            if (task.measure == ENDED) != (task.responses_of in earlier):
                raise ValueError(
                    f"{task.name}: measure {ENDED} needs responses_of with the name of an earlier task, and the other "
                    "way round"
                )
            earlier.add(task.name)
        return self

    @classmethod
    def load(cls, name: str, root: Path) -> Self:
        """Read a suite; tasks whose data are missing are left out and named in `left_out`.

        Args:
            name: file of eval/suites/ without its suffix, or folder of eval/own/ with an own evaluation.
            root: folder of the workspace or checkout.

        Raises:
            SettingsError: the file is missing, or fields are missing or wrong.
        """
        suite = super().load(name, root)
        present = [task for task in suite.tasks if task.data is None or is_fetched(task.data, root)]
        left_out = tuple(task.name for task in suite.tasks if task not in present)
        return suite.model_copy(update={"tasks": tuple(present), "left_out": left_out})

    def describe_left_out(self) -> str | None:
        """One line that names the tasks whose data are missing, with the cure; None if there are none."""
        if not self.left_out:
            return None
        return (
            f"left out, for the data are not here: {', '.join(self.left_out)}; `slimqwen download --suite "
            f"{self.name}` fetches them, with --data FOLDER from a folder of yours"
        )

    @classmethod
    def _from_text(cls, text: YamlText, name: str) -> "Suite":
        if not isinstance(text.content, dict) or "metric" not in text.content:
            return super()._from_text(text, name)
        own = text.validate(OwnQuestions, text.content)
        task = SuiteTask(
            task=f"{name}_questions",
            measure=questions.SCORE,
            non_inferiority_margin=own.non_inferiority_margin,
            assumed_discordance=own.assumed_discordance,
            thinking=own.thinking,
        )
        return cls(name=name, chat_template=True, sample="first", tasks=(task,), questions=own)

    def items_planned(self, task: SuiteTask) -> int | None:
        """Number of items planned to decide a task and those that score its responses; None without a plan."""
        scored = [each for each in self.tasks if task.name in (each.name, each.responses_of)]
        return max((each.items_to_decide for each in scored if each.items_to_decide), default=None)

    def uses_chat_template(self, task: SuiteTask) -> bool:
        """Whether the prompts of a task go through the chat template."""
        return self.chat_template if task.chat_template is None else task.chat_template

    def settings_of(self, task: SuiteTask) -> dict[str, Any]:
        """All settings that change a task's responses or scores; `code` is the digest of the code that asks and scores.

        Two records must share them to be comparable, in addition to measure and items.
        """
        settings = task.settings(rendered=self.uses_chat_template(task))
        if self.questions is None:
            shared = {"chat_template", "text_prefix", "sample", "lm_eval_folders"}
            scoring = ("lm_eval_run._score", "lm_eval_run.score_stated_choice", "loops.is_looping")
            suite = self.model_dump(mode="json", include=shared)
            return {**settings, "suite": suite, "code": _digest_code(*scoring)}
        own = self.questions.model_dump(include={"metric", "max_gen_toks"})
        asking = _digest_code("own_questions.ask_questions")
        return {**settings, **own, "sampling": questions.SAMPLING, "code": asking}

    def inputs(self, root: Path) -> list[Path]:
        """Files on which scores depend: the questions of an own evaluation; else the suite's task files and their code.

        The suite's own YAML file is left out, because its settings are compared field by field (`settings_of`).
        """
        if questions_file := self.questions_file(root):
            return [root / questions_file]
        folder = locate(self.tasks_folder, root) if self.tasks_folder else None
        return sorted(file for end in ("yaml", "py") for file in (folder.glob(f"*.{end}") if folder else ()))

    def questions_file(self, root: Path) -> Path | None:
        """Path of the questions of an own evaluation, relative to the repository; None for other suites.

        Raises:
            CorpusError: there are several files.
        """
        if self.questions is None:
            return None
        with contextlib.chdir(root):  # so that messages have relative paths
            return find_table(OWN / self.name, "questions")

    def describe_questions(self, root: Path, for_runaways: int | None = None) -> str | None:
        """Summarise an own evaluation's questions and how many a verdict needs, in words; None for other suites.

        Args:
            root: folder of the workspace or checkout.
            for_runaways: number of questions needed to decide on responses that run away; None without such a limit.

        Raises:
            CorpusError: the file of questions cannot be read, or a question cannot be used.
        """
        if self.questions is None:
            return None
        found = questions.describe(self.read_questions(root), self.questions.metric)
        (task,) = self.tasks
        planned = [(task.items_to_decide, "the score"), (for_runaways, "whether responses run away")]
        decide = " and ".join(f"{count:,} to decide {what}" for count, what in planned if count)
        return f"{self.questions_file(root)}: {found}{f'; planned are {decide}' if decide else ''}"

    def require_questions(self, root: Path) -> None:
        """Check the questions of an own evaluation; does nothing for other suites.

        Raises:
            CorpusError: the file cannot be read, has fewer than two questions, or rows cannot be used.
        """
        if self.questions is not None:
            self.read_questions(root)

    def offers_tools(self, root: Path) -> bool:
        """Whether any question of the suite offers tools.

        Raises:
            CorpusError: the questions of an own evaluation cannot be read or used.
        """
        if self.questions is None:
            return any(task.tools for task in self.tasks)
        return any(question.tools for question in self.read_questions(root))

    def read_questions(self, root: Path) -> list[Question]:
        """Read and check the questions of an own evaluation; other suites have none.

        Raises:
            CorpusError: the file cannot be read, has fewer than two questions, or rows cannot be used.
        """
        assert self.questions is not None
        with contextlib.chdir(root):  # so that messages have relative paths
            return questions.read_questions(find_table(OWN / self.name, "questions"), self.questions.metric)

    def split(self, side: Side | None) -> Split | None:
        """One side of the split of the suite's items between search and proof; None for all items."""
        return Split(side=side, proof_share=self.proof_share) if side else None


@functools.cache
def _digest_code(*starts: str) -> str:
    """Digest of the code of this package that these functions reach; with another one scores may be others."""
    return reach(*(f"{__package__}.{start}" for start in starts), within=__package__).digest[:16]
