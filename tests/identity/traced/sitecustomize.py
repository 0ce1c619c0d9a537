"""Imported by every Python process on whose path this folder lies: it writes down which functions of slimqwen run."""

import os

from calls import trace_into

if folder := os.environ.get("SLIMQWEN_CALLS"):
    trace_into(folder, os.environ["SLIMQWEN_CALLS_OF"])
