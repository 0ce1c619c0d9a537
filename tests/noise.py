"""Tolerances of tests, from noise that is measured in the same run: no machine rounds as another does."""

from collections.abc import Sequence
from typing import Any

from slimqwen.evals.engine_process import Request, Response, measure_tie_noise

NOISE_FACTOR = 3
"""Most times that the noise of the unchanged model may be reached."""


def near_tie_nats(llm: Any, requests: Sequence[Request], responses: Sequence[Response]) -> float:
    """Gap of two tokens up to which either is correct; the engine gave the responses, with log-probabilities."""
    return NOISE_FACTOR * measure_tie_noise(llm, requests, responses)
