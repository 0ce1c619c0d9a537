"""The base class of all errors that a person is meant to read."""


class SlimqwenError(Exception):
    """An expected failure in one line: the cause, then the cure.

    The command line prints the message without a traceback and exits with code 2 (3 for a verb that gives a verdict).
    Any other exception is a defect: it prints the cause and the log that has the traceback, and exits with code 1 (3).
    """
