"""lm-eval's client of a served model, made to tell how far it is and why each generation ended.

Imported where it is used only: importing lm-eval takes tens of seconds.
"""

from collections.abc import Callable
from typing import Any

import aiohttp
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
    """`local-completions` that reports requests answered and keeps the finish reason of generations.

    The first request that fails is the last one sent: what the model is asked next would be asked of nobody.
    """

    def __init__(self, *, progress: Progress, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._progress = progress
        self._failure: Exception | None = None
        self.activity, self._done, self._total = "starting", 0, 0

    @staticmethod
    def parse_generations(outputs: Any, **_: Any) -> list[str]:
        """The texts of one response, each with its finish reason."""
        choices = sorted(outputs["choices"], key=lambda choice: choice["index"])
        return [Generation(choice["text"], choice["finish_reason"]) for choice in choices]

    async def amodel_call(self, *arguments: Any, **keywords: Any) -> Any:
        """One request, counted; a failure is kept for the end of the batch, which nobody would await otherwise."""
        if self._failure is None:
            try:
                answer = await super().amodel_call(*arguments, **keywords)
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                self._failure = error
            else:
                self._done += 1
                self._progress(self.activity, min(self._done, self._total), self._total)
                return answer
        return [(0.0, False)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate, under that activity."""
        return self._all_or_nothing("generating answers", requests, super().generate_until)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score given answers, under that activity."""
        return self._all_or_nothing("scoring options", requests, super().loglikelihood)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, under that activity; a text longer than the context takes several requests."""
        return self._all_or_nothing("scoring texts", requests, super().loglikelihood_rolling)

    def _all_or_nothing(
        self, activity: str, requests: list[Any], answer: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        self.activity, self._done, self._total = activity, 0, len(requests)
        self._progress(activity, 0, self._total)
        answers = answer(requests)
        if self._failure is not None:
            raise self._failure
        return answers
