"""How long work tells its caller how far it is, without knowing who listens."""

from collections.abc import Callable

Progress = Callable[[str, float, float], None]
"""Called as progress(activity, done, total); done and total share a unit, total is 0 while unknown."""


def silent(activity: str, done: float, total: float) -> None:
    """The listener that nobody is behind: the default of every function that reports progress."""
