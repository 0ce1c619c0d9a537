"""The command `slimqwen`: every verb, grouped in panels."""

import sys
from typing import Annotated, NoReturn

import typer

from slimqwen import lifeline
from slimqwen.cli import (
    bench,
    compare,
    console,
    demo,
    downloads,
    evals,
    fit,
    gate,
    image,
    optimise,
    plan,
    recipe,
    report,
    search,
    serve,
    status,
    variants,
    workspaces,
)
from slimqwen.cli.installed import describe_version
from slimqwen.cli.variant_argument import with_variant_option

_MAKE, _SERVE = "Make a variant", "Try one, serve one"
_MEASURE, _READ = "Will it run? Is it as good? Is it faster?", "Which one? Ship it"

app = typer.Typer(
    name="slimqwen",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        console.say(describe_version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="show version and commit"),
    ] = False,
) -> None:
    """Make a smaller, faster variant of a Qwen checkpoint, serve it with vLLM, measure it against its baseline."""


app.command(rich_help_panel=_SERVE)(workspaces.install)
app.command(rich_help_panel=_MAKE)(workspaces.init)
app.add_typer(variants.app, name="variant", rich_help_panel=_MAKE)
app.add_typer(recipe.app, name="recipe", rich_help_panel=_MAKE)
app.command(rich_help_panel=_MAKE)(downloads.download)
app.command(rich_help_panel=_SERVE)(demo.demo)
app.command(rich_help_panel=_SERVE, cls=console.Judge)(optimise.optimise)
app.command(rich_help_panel=_SERVE)(serve.serve)
app.command(rich_help_panel=_SERVE)(status.status)
app.command(rich_help_panel=_MEASURE)(fit.fit)
app.command(rich_help_panel=_MEASURE)(plan.plan)
app.add_typer(evals.app, name="eval", rich_help_panel=_MEASURE)
app.command(rich_help_panel=_MEASURE, cls=console.Judge)(gate.gate)
app.command(rich_help_panel=_MEASURE)(search.search)
app.command(rich_help_panel=_MEASURE)(search.tune)
app.add_typer(bench.app, name="bench", rich_help_panel=_MEASURE)
app.command("compare", rich_help_panel=_READ)(compare.compare_variants)
app.command(rich_help_panel=_READ)(report.report)
app.add_typer(image.app, name="image", rich_help_panel=_READ)


def main() -> NoReturn:
    """Run the command line, and end this process without Python's slow clean-up (`lifeline.exit_after`)."""
    lifeline.exit_after(run_command)


def run_command() -> None:
    """Run the command line, and exit with its exit code."""
    sys.argv[1:] = with_variant_option(typer.main.get_command(app), sys.argv[1:])
    console.run_command_line(app, "slimqwen")
