"""Turns of arms, made up, and the record of a contest."""

from collections.abc import Mapping

from slimqwen.search.tune.arms import UNDRAFTED, Arm
from slimqwen.search.tune.changes import SettingsChange
from slimqwen.search.tune.contest import Contest, LoadTurn, Turn
from slimqwen.search.tune.record import Tune
from tests import record_files

K2, K4 = (Arm({"method": "mtp", "num_speculative_tokens": depth}) for depth in (2, 4))
NGRAM = Arm({"method": "ngram", "num_speculative_tokens": 4})
WINNER = SettingsChange("winner", {"VLLM_ENABLE_PREFIX_CACHING": "1"})
SECOND = SettingsChange("second winner", {"VLLM_MAX_NUM_BATCHED_TOKENS": "64"})
SLOW = SettingsChange("slow one", {"VLLM_MAX_NUM_BATCHED_TOKENS": "32"})
WRONG = SettingsChange("wrong one", {"VLLM_LONG_PREFILL_TOKEN_THRESHOLD": "16"})
ROUNDING = SettingsChange("16-bit states", {"VLLM_MAMBA_SSM_CACHE_DTYPE": "bfloat16"})
PLANTED = (WINNER, SECOND, SLOW, WRONG, ROUNDING)
ARMS = {"none": UNDRAFTED, "k2": K2, "k4": K4, "ngram": NGRAM}


def turn(
    arm: Arm, number: int, speeds: Mapping[int, float], *, drafts: int = 0, kv_tokens: int = 512
) -> Turn:
    """A turn with these tokens a second by load; its requests take 100, 110, 120 and 130 ms at 100 tokens a second."""
    loads = tuple(
        LoadTurn(
            load=str(load),
            output_tokens=1000,
            seconds=1000 / speed,
            ttft_ms=tuple(base * 10 / speed for base in (100, 110, 120, 130)),
            e2el_ms=tuple(base * 100 / speed for base in (100, 110, 120, 130)),
            drafts=drafts,
            accepted_tokens=3 * drafts,
        )
        for load, speed in speeds.items()
    )
    return Turn(arm=arm.name, number=number, seconds=2.0, loads=loads, kv_tokens=kv_tokens, near_ties=1)


def record_of(made: Contest, chosen: str | None, lines: Mapping[str, str]) -> Tune:
    """The record of a contest of the variant a."""
    block = record_files.example("latency", variant="a")["provenance"]
    return Tune.model_validate(
        {
            "variant": "a", "workload": "classes", "temperature": 0.0, "near_tie_nats": 0.1, "sequences": None,
            "arms": made.describe_all(), "chosen": chosen, "lines": lines, "verdict": made.verdict,
            "provenance": block,
        }
    )  # fmt: skip
