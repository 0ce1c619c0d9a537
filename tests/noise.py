"""Tolerances of tests, from noise that is measured in the same run: no machine rounds as another does."""

from collections.abc import Sequence
from typing import Any

from slimqwen.evals.engine.scenarios import Answer, Request, measure_tie_noise
from slimqwen.progress import silent

NOISE_FACTOR = 3
"""Most times that the noise of the unchanged model may be reached."""


def near_tie_nats(llm: Any, requests: Sequence[Request], answers: Sequence[Answer]) -> float:
    """Gap of two tokens up to which either is correct; the engine gave the answers, with log-probabilities."""
    return measure_tie_noise(llm, {"all": requests}, {"all": answers}, silent).near_tie_nats(NOISE_FACTOR)
