"""lm-eval's client of a model server, extended by progress, a journal of responses, and finish reasons.

Importing lm-eval takes tens of seconds, so other modules import this one inside functions.
"""

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
from lm_eval.models.openai_completions import LocalCompletionsAPI

from slimqwen.evals.suites.generation import SLOWEST_TOKEN_S, TIMEOUT_S, Generation, PromptTooLongError
from slimqwen.evals.suites.questions import as_request, chat_of, chat_text
from slimqwen.progress import Progress
from slimqwen.records.journal import Journal


class ServedCompletions(LocalCompletionsAPI):  # type: ignore[misc]  # lm_eval is untyped
    """lm-eval's `local-completions` model with progress, a journal of responses, and finish reasons.

    Responses are read from the journal where an interrupted run has written them. No request is sent after one that
    failed, because the server is probably gone.

    Attributes:
        thinking: enable_thinking of the chat template; thoughts are then removed from responses, and a response with
            unfinished thoughts is empty. None if prompts use no chat template: responses stay as they are.
        task: name of the task that the requests belong to.
        activity: current activity, for progress and errors.
    """

    def __init__(
        self,
        *,
        server_url: str,
        progress: Progress,
        answers: Journal | None,
        max_model_len: int,
        **arguments: Any,
    ) -> None:
        base_url = f"{server_url}/v1/completions"
        super().__init__(base_url=base_url, max_length=max_model_len, timeout=TIMEOUT_S, **arguments)
        self._server_url = server_url
        self.thinking: bool | None = None
        self.task = ""
        self._by_chat, self._too_long_is_wrong = False, False
        self._progress, self._answers, self._max_model_len = progress, answers, max_model_len
        self._failure: Exception | None = None
        self.activity, self._done, self._total = "starting", 0, 0

    def begin_task(self, name: str, thinking: bool | None, *, by_chat: bool, too_long_is_wrong: bool) -> None:
        """Set how the requests of the next task are sent.

        Args:
            name: name of the task.
            thinking: enable_thinking of the chat template; None if prompts use no chat template.
            by_chat: whether requests go to the chat endpoint, which renders prompts and parses tool calls itself.
            too_long_is_wrong: whether a prompt beyond the served context counts as an empty response; else an error.
        """
        self.task, self.thinking = name, thinking
        self._by_chat, self._too_long_is_wrong = by_chat, too_long_is_wrong
        self.tokenized_requests = not by_chat
        self.base_url = f"{self._server_url}/v1/{'chat/' if by_chat else ''}completions"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> Any:
        """Render a chat with the checkpoint's chat template, or encode it as text if the server is to render it."""
        messages, tools = chat_of(chat_history)
        if self._by_chat:
            return chat_text(messages, tools)
        return render(self.tokenizer, messages, self.thinking, add_generation_prompt, tools)

    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
        """Read the generations of one HTTP response, each with finish reason and length."""
        usage = outputs.get("usage", {})
        return [Generation.of_choice(choice, usage, self.thinking) for choice in outputs["choices"]]

    async def amodel_call(self, **request: Any) -> Any:
        """Send one request. A failure is kept and raised at the end of the batch, when lm-eval collects the results."""
        if self._failure is not None:
            return [(0.0, False)]
        try:
            key = self._journal_key(**request)
            stored = self._answers.get(key) if self._answers is not None else None
            if stored is not None:
                answer = [Generation(*each) if request["generate"] else tuple(each) for each in stored]
            else:
                answer = await super().amodel_call(**request)
                if self._answers is not None:
                    self._answers.add(
                        key,
                        [each.as_json() if isinstance(each, Generation) else list(each) for each in answer],
                    )
        except (aiohttp.ClientError, OSError, PromptTooLongError) as error:  # a TimeoutError is an OSError
            if not (self._too_long_is_wrong and isinstance(error, PromptTooLongError)):
                self._failure = error
                return [(0.0, False)]
            answer = [Generation("")]
        self._done += 1
        self._progress(self.activity, min(self._done, self._total), self._total)
        return answer

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a response to each of lm-eval's requests."""
        longest = max(request.args[1].get("max_gen_toks", self._max_gen_toks) for request in requests)
        self.timeout = max(TIMEOUT_S, math.ceil(longest * SLOWEST_TOKEN_S))
        # lm-eval would cut prompts from the left until both fit; _create_payload lowers the limit instead.
        self.max_length = sys.maxsize
        try:
            return self._all_or_nothing("generating responses", requests, super().generate_until)
        finally:
            self.timeout, self.max_length = TIMEOUT_S, self._max_model_len - 1

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihoods of given answers, in nats, and whether each is the greedy response."""
        return self._all_or_nothing("scoring options", requests, super().loglikelihood)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in nats; a text longer than the context takes several requests."""
        return self._all_or_nothing("scoring texts", requests, super().loglikelihood_rolling)

    def _create_payload(self, messages: Any, *, generate: bool = False, **keywords: Any) -> dict[str, Any]:
        payload: dict[str, Any] = super()._create_payload(messages, generate=generate, **keywords)
        if not generate:
            return payload
        if not self._by_chat:
            (prompt,) = messages
        else:
            chat, tools = chat_of([{"role": "user", "content": payload.pop("prompt")}])
            messages = [as_request(message) for message in chat]
            payload |= {"messages": messages, "chat_template_kwargs": {"enable_thinking": self.thinking}}
            payload |= {"tools": tools} if tools else {}
            prompt = self.tok_encode(render(self.tokenizer, chat, self.thinking, tools=tools))
        if len(prompt) >= self._max_model_len:
            raise PromptTooLongError.of(len(prompt), self._max_model_len)
        payload["max_tokens"] = min(payload["max_tokens"], self._max_model_len - len(prompt))
        return payload

    def _journal_key(
        self, *, messages: Any, generate: bool, gen_kwargs: Any = None, ctxlens: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Journal key of a request: everything that affects its response, the parsing of the response included."""
        payload = self._create_payload(
            self.create_message(messages),
            generate=generate,
            gen_kwargs=copy.deepcopy(gen_kwargs),
            seed=self._seed,
        )
        return {"payload": payload, "context_tokens": ctxlens, "thinking": self.thinking}

    def _all_or_nothing(
        self, activity: str, requests: list[Any], answer: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        self.activity, self._done, self._total = f"{activity} of {self.task}", 0, len(requests)
        self._progress(self.activity, 0, self._total)
        answers = answer(requests)
        if self._failure is not None:
            raise self._failure
        return answers


def render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    thinking: bool | None,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Render messages with a chat template.

    Args:
        tokenizer: tokenizer of transformers, which has the template.
        messages: the chat, as chat templates take it.
        thinking: its enable_thinking; None leaves the template's default.
        add_generation_prompt: whether the beginning of a response follows; if not, the last message is continued.
        tools: functions that the chat offers; None for none.
    """
    switch = {} if thinking is None else {"enable_thinking": thinking}
    return str(
        tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            tools=tools,
            **switch,
        )
    )
