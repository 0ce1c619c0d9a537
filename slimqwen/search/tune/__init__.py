"""The fastest drafts and serving flags for a variant on this machine, found by measurement.

`arms` lists the ways to speculate that vLLM may have for a checkpoint, `changes` has the flags, `preparation` finds
what cannot be served here, `tuner` measures the rest of a `subject` in turns, `contest` compares them and ends slow
arms, `responses` checks greedy responses, and `record` is the record kind with its tables.
"""

from slimqwen.search.tune.record import Tune
from slimqwen.search.tune.subject import SESSIONS
from slimqwen.search.tune.tuner import FLAGS, apply_chosen, tune_variant

__all__ = ["FLAGS", "SESSIONS", "Tune", "apply_chosen", "tune_variant"]
