"""Suites of tasks: their files, their data, and the code that runs them through lm-eval against a server."""
