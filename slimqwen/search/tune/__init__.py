"""The fastest way to speculate for a variant on this machine, found by measurement.

`arms` lists the ways that vLLM may have for a checkpoint, `tuner` measures them in turns with the undrafted server and
ends slow ones early, `contest` compares their turns, `responses` checks their greedy responses, and `record` is the
record kind with its table.
"""

from slimqwen.search.tune.record import Tune
from slimqwen.search.tune.tuner import apply_chosen, tune_variant

__all__ = ["Tune", "apply_chosen", "tune_variant"]
