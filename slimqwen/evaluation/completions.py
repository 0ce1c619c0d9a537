"""lm-eval's client of a served model, made to tell how far it is and why each generation ended.

Imported where it is used only: importing lm-eval takes tens of seconds.
"""

from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from slimqwen.progress import Progress


class Generation(str):
    """A generated text that remembers why it ended: "stop", or "length" where the token limit cut it."""

    finish_reason: str | None

    def __new__(cls, text: str, finish_reason: str | None = None) -> "Generation":
        """Keep the reason beside the text."""
        generation = super().__new__(cls, text)
        generation.finish_reason = finish_reason
        return generation


class ServedCompletions(LocalCompletionsAPI):  # type: ignore[misc]  # lm_eval is untyped
    """`local-completions` that reports requests answered and keeps the finish reason of generations."""

    def __init__(self, *, progress: Progress, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._progress = progress
        self.activity, self._done, self._total = "starting", 0, 0

    @staticmethod
    def parse_generations(outputs: Any, **_: Any) -> list[str]:
        """The texts of one response, each with its finish reason."""
        choices = sorted(outputs["choices"], key=lambda choice: choice["index"])
        return [Generation(choice["text"], choice["finish_reason"]) for choice in choices]

    async def amodel_call(self, *arguments: Any, **keywords: Any) -> Any:
        """One request, counted."""
        answer = await super().amodel_call(*arguments, **keywords)
        self._done += 1
        self._progress(self.activity, min(self._done, self._total), self._total)
        return answer

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate, under that activity."""
        self._begin("generating answers", len(requests))
        return list(super().generate_until(requests, disable_tqdm=disable_tqdm))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score given answers, under that activity."""
        self._begin("scoring options", len(requests))
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, under that activity; a text longer than the context takes several requests."""
        self._begin("scoring texts", len(requests))
        return list(super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm))

    def _begin(self, activity: str, total: int) -> None:
        self.activity, self._done, self._total = activity, 0, total
        self._progress(activity, 0, total)
