"""The callable through which long work reports its progress, without knowing who shows it."""

from collections.abc import Callable

Progress = Callable[[str, float, float], None]
"""Receives (activity, done, total); done and total share a unit, total is 0 while unknown."""


def silent(activity: str, done: float, total: float) -> None:
    """Show nothing: the default of every function that reports progress."""


def progress_of(subject: str, progress: Progress) -> Progress:
    """A callable for a part of long work; it puts the part's name `subject` before each activity."""
    return lambda activity, done, total: progress(f"{subject}: {activity}", done, total)
