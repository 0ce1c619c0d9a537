#!/usr/bin/env python3
"""Serve a variant as `slimqwen serve` does: read its config.env, check it, and become vLLM."""

import typer

from slimqwen.cli import console
from slimqwen.cli.serve import serve

if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(serve)
    console.run_command_line(app, "serve.py")
