"""Comparison of a served arm's greedy responses with the reference engine's: one at a time, and at the largest load.

`slimqwen.evals.engine` has the reference engine (vLLM without speculation, caching, graphs and batching) and the
comparison. The compared responses come from the very server that is timed.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
from pydantic import BaseModel, ConfigDict

from slimqwen.errors import SlimqwenError
from slimqwen.evals import EvalError
from slimqwen.evals.engine import compare_tokens, reference_flags
from slimqwen.evals.engine_process import (
    EngineSettings,
    Request,
    Response,
    choose_lengths,
    cut_requests,
    run_reference,
)
from slimqwen.evals.engine_runs import EngineProcesses
from slimqwen.progress import Progress
from slimqwen.serving.http_client import open_client
from slimqwen.serving.server import RunningServer
from slimqwen.serving.shared_server import server_lost

SETTINGS = "tinyworld"
"""Name of the engine settings in eval/gates/; any settings will do, because two engines can be compared on any text."""

_BLOCK_TOKENS = 16
_TIMEOUT_S = 300.0
_GREEDY = {
    "temperature": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_p": 0,
    "ignore_eos": True, "return_token_ids": True,
}  # fmt: skip
"""Fields of a request; penalties are set, because the checkpoint's generation config would otherwise set them."""


class WrongResponsesError(SlimqwenError):
    """Greedy responses of an arm's server differ from the reference engine's beyond near ties, or prove nothing."""


class PlainResponses(BaseModel):
    """Greedy responses of a variant by the reference engine, with which those of every arm are compared.

    Attributes:
        requests: prompts of many lengths.
        responses: with log-probabilities, in the order of the requests.
        near_tie_nats: log-probability gap up to which either token is correct.
    """

    model_config = ConfigDict(frozen=True)

    requests: list[Request]
    responses: list[Response]
    near_tie_nats: float

    @classmethod
    def generate(
        cls, processes: EngineProcesses, settings: EngineSettings, progress: Progress
    ) -> "PlainResponses":
        """Choose prompts and generate the responses of the plain engine: eager, without drafts, one request at a time.

        Args:
            processes: runs the engine in a process; its server's variant, flags and context length are used.
            settings: lengths and texts of the prompts, output tokens, and the factor of the near ties.

        Raises:
            EvalError: the plain engine fails, or its process is killed.
        """
        server = processes.server
        variant, context_len = server.variant, server.max_model_len
        lengths = choose_lengths(
            settings,
            block_size=_BLOCK_TOKENS,
            token_budget=int(server.flags.get("max-num-batched-tokens") or context_len),
            context_len=context_len,
        )
        requests = cut_requests(settings, variant.weights, variant.root, lengths, context_len)
        result = processes.run(run_reference, (reference_flags(server), requests), "plain engine", progress)
        if isinstance(result, str):
            raise EvalError(
                f"{variant.name}: the plain engine failed ({result}); read why in its log: {processes.log}"
            )
        return cls(
            requests=requests,
            responses=result[0],
            near_tie_nats=settings.noise_factor * result[1],
        )

    def compare(self, server: RunningServer, loads: Sequence[int], progress: Progress) -> int:
        """Compare a server's responses with the reference engine's.

        Args:
            loads: numbers of concurrent requests; all requests are sent once at each.

        Returns:
            Number of near ties: responses that first differ where two tokens are almost equally likely.

        Raises:
            WrongResponsesError: a response differs by more than a near tie.
            ServerLostError: the server does not respond.
        """
        near_ties = 0
        for load in loads:
            progress(f"comparing responses, {load} at a time", 0, 0)
            responses = request_tokens(server, self.requests, load)
            wrong = []
            for request, expected, tokens in zip(self.requests, self.responses, responses, strict=True):
                compared = compare_tokens(expected, tokens, self.near_tie_nats)
                near_ties += compared.near_tie
                if compared.differs and not compared.near_tie:
                    wrong.append(len(request.prompt))
            if wrong:
                raise WrongResponsesError(
                    f"{len(wrong)} of {len(responses)} greedy responses, {load} at a time, differ from the undrafted "
                    f"engine's beyond near ties, the first after a prompt of {wrong[0]} tokens"
                )
        return near_ties


def request_tokens(
    server: RunningServer, requests: Sequence[Request], concurrency: int
) -> list[tuple[int, ...]]:
    """Request greedy responses from a server, `concurrency` at a time; returns token ids in the order of the requests.

    Raises:
        ServerLostError: the server does not respond.
    """
    with open_client(_TIMEOUT_S) as client, ThreadPoolExecutor(concurrency) as pool:

        def ask(request: Request) -> tuple[int, ...]:
            fields = {"model": server.model, "prompt": request.prompt, "max_tokens": request.output_tokens}
            response = client.post(f"{server.base_url}/v1/completions", json={**fields, **_GREEDY})
            return tuple(response.raise_for_status().json()["choices"][0]["token_ids"])

        try:
            return list(pool.map(ask, requests))
        except httpx.HTTPError as error:
            raise server_lost(server, "comparing its responses", error) from error
