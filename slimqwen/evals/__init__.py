"""Evaluations: is a variant right? Quality, fidelity, acceptance, engine and the gate, each a record kind."""

from slimqwen.errors import SlimqwenError


class EvalError(SlimqwenError):
    """An evaluation cannot be made: settings, suite or checkpoint are unusable, or a response got no score."""
