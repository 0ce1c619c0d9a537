"""Evaluations: is a variant right? Quality, fidelity, acceptance, engine and the gate, each a record kind."""

from slimqwen.errors import SlimqwenError


class EvalError(SlimqwenError):
    """An evaluation that cannot be made: unusable settings, suite or checkpoint, or a response without a score."""
