"""The claims of a variant against its baseline, such as speed, memory or quality."""

import re
from typing import Literal, get_args

Claim = Literal["speed", "memory", "quality"]
"""speed: faster than the baseline. memory: a smaller checkpoint. quality: as good, by every check of the gate."""

CLAIMS: tuple[Claim, ...] = get_args(Claim)

_WORDS: dict[Claim, str] = {
    "speed": r"fast(er|est)?|quicker|speed|sooner|throughput|latency|cheaper|beats?",
    "memory": r"smaller|memory|fewer bytes",
}


def read_claims(hypothesis: str) -> tuple[Claim, ...]:
    """The claims that the words of a hypothesis make, for a measurements.json that does not state them.

    Quality is always claimed; speed and memory are if the hypothesis has words for them, such as faster or smaller.
    """
    return tuple(
        claim
        for claim in CLAIMS
        if claim == "quality" or re.search(rf"\b({_WORDS[claim]})\b", hypothesis, re.IGNORECASE)
    )
