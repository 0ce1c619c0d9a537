"""The one base of every error that a person is meant to read."""


class SlimqwenError(Exception):
    """An expected failure, told in one line: the cause, then the cure.

    Raise a subclass that is defined beside the code that detects the failure. Scripts print the message
    without a traceback and exit with status 2; any other exception is a defect and keeps its traceback.
    """
