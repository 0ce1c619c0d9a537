"""Suites: the lm-eval tasks that are scored together, as eval/suites/<name>.yaml states them."""

import contextlib
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
from slimqwen.evals.suites.datasets import HubDataset
from slimqwen.evals.suites.questions import Question
from slimqwen.records.settings import OWN, Settings
from slimqwen.records.split import Side, Split
from slimqwen.stats import non_inferiority

ANSWER_MARGIN: Final = "answer_margin_nats"
"""Answer log-probability gap: log-probability of the right option minus that of the best wrong one, in nats."""

BITS_PER_BYTE: Final = "bits_per_byte"
"""Negative log2-likelihood of a text per UTF-8 byte; comparable across vocabularies."""

ENDED: Final = "ended"
"""1 for a response that ends: it neither loops nor runs to its token limit (`loops.is_looping`)."""

AUTO: Final = "auto"
"""Limit of a sample size by power analysis: as many items as decide at a task's margin by the suite's assumptions."""

Limit = int | Literal["auto"] | None
"""Items of each task; None for all."""


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
        definition: lm-eval task, or group of tasks whose items are pooled; the name by default.
        overrides: fields of that definition to replace.
        thinking: enable_thinking of the chat template; None leaves the default. Thoughts are not scored.
        repeats: generations of each item, each with its own seed.
        responses_of: earlier task whose responses are scored by ENDED; nothing is generated for this one.
        tools: whether items offer tools, so that the server's chat endpoint and its tool parser respond.
        too_long_is_wrong: whether a prompt beyond the served context has an empty response; else it is an error.
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
    responses_of: str | None = None
    tools: bool = False
    too_long_is_wrong: bool = False

    @property
    def lm_eval_name(self) -> str:
        """Name of the lm-eval task or group."""
        return self.definition or self.name

    @property
    def items_to_decide(self) -> int | None:
        """Items that decide at the margin under the suite's assumption; None without one."""
        if self.assumed_discordance is not None:
            return non_inferiority.items_to_decide(self.non_inferiority_margin, self.assumed_discordance)
        if self.assumed_deviation is not None:
            return non_inferiority.items_to_decide_mean(self.non_inferiority_margin, self.assumed_deviation)
        return None

    def settings(self, *, rendered: bool) -> dict[str, Any]:
        """Settings that two records must share to be comparable, besides the measure and the items.

        Args:
            rendered: whether prompts go through a chat template.
        """
        names = {"definition", "overrides", "repeats", "responses_of", *(["thinking"] if rendered else [])}
        return self.model_dump(include=names, exclude_defaults=True)


class OwnQuestions(BaseModel):
    """suite.yaml of an own evaluation: how questions.jsonl is asked and scored; eval/own.yaml explains each field."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: questions.Metric | None
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
        text_prefix: token before each text to be scored, as in training; a name, because ids differ.
        sample: items of a limited run: the first of the file, or those chosen by their hashes.
        datasets: hub datasets, fetched by `slimqwen download --suite`.
        nltk: nltk resources for scoring, fetched by the same command.
        tasks: tasks in the order of the file.
        proof_share: share of the items that a search never sees, because its proof is made on them; it also splits the
            texts of fidelity and the documents of acceptance of the same gate.
        questions: how the questions of an own evaluation are asked; None for other suites.
    """

    folder: ClassVar[str] = "suites"
    own_file: ClassVar[str] = "suite"

    tasks_folder: Path | None = None
    lm_eval_folders: tuple[str, ...] = ()
    chat_template: bool
    text_prefix: str | None = None
    sample: Literal["first", "drawn"]
    datasets: tuple[HubDataset, ...] = ()
    nltk: tuple[str, ...] = ()
    tasks: tuple[SuiteTask, ...] = Field(min_length=1)
    proof_share: float = Field(default=0.5, gt=0, lt=1)
    questions: OwnQuestions | None = None

    @model_validator(mode="after")
    def _check_scored_again(self) -> Self:
        earlier: set[str] = set()
        for task in self.tasks:
            if (task.measure == ENDED) != (task.responses_of in earlier):
                raise ValueError(
                    f"{task.name}: measure {ENDED} goes with responses_of, which names an earlier task"
                )
            earlier.add(task.name)
        return self

    @classmethod
    def _from_content(cls, content: Any, name: str) -> "Suite":
        if "metric" not in content:
            return super()._from_content(content, name)
        own = OwnQuestions.model_validate(content)
        task = SuiteTask(
            task=f"{name}_questions",
            measure=questions.SCORE,
            non_inferiority_margin=own.non_inferiority_margin,
            assumed_discordance=own.assumed_discordance,
            thinking=own.thinking,
        )
        folder = Path(".cache") / "own" / name
        return cls(
            name=name, tasks_folder=folder, chat_template=True, sample="first", tasks=(task,), questions=own
        )

    def require_questions(self, root: Path) -> None:
        """Check the questions of an own evaluation; nothing for other suites.

        Raises:
            CorpusError: as `questions.read_questions`.
        """
        if self.questions is not None:
            self._read_questions(root, self.questions)

    def offers_tools(self, root: Path) -> bool:
        """Whether a question offers tools.

        Raises:
            CorpusError: as `require_questions`.
        """
        if self.questions is None:
            return any(task.tools for task in self.tasks)
        return any(question.tools for question in self._read_questions(root, self.questions))

    def _read_questions(self, root: Path, own: OwnQuestions) -> list[Question]:
        with contextlib.chdir(root):  # paths stand in messages
            return questions.read_questions(OWN / self.name / "questions.jsonl", own.metric)

    def write_own_task(self, root: Path) -> None:
        """Write the questions of an own evaluation as a task into `tasks_folder`; nothing for other suites.

        Raises:
            CorpusError: a question is unusable.
        """
        if self.questions is None or self.tasks_folder is None:
            return
        file = OWN / self.name / "questions.jsonl"
        with contextlib.chdir(root):  # lm-eval reads its task file there, and paths stand in messages
            questions.write_task(
                self.tasks[0].name,
                file,
                self.questions.metric,
                self.questions.max_gen_toks,
                self.tasks_folder,
            )

    def split(self, side: Side | None) -> Split | None:
        """A side of the split of its items; None for all of them."""
        return Split(side=side, proof_share=self.proof_share) if side else None
