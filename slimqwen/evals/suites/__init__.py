"""Suites of tasks: their files, their data, and their run through lm-eval against a server."""
