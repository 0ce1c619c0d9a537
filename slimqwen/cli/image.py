"""`slimqwen image`: build a variant's container image, and verify it."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import command, console, progress_bar, relative, say
from slimqwen.cli.options import PlatformName, VariantName
from slimqwen.cli.plan import consult_target

app = typer.Typer(help="Build and verify container images.", no_args_is_help=True)


ToolName = Annotated[
    Literal["docker", "podman", "buildah"] | None,
    typer.Option(help="default: the first of them that works here"),
]
Tag = Annotated[
    str | None, typer.Option(help="name of the image (default: localhost/slimqwen:NAME-PLATFORM)")
]


@app.command()
def build(
    variant: VariantName,
    platform: PlatformName = None,
    base_image: Annotated[
        str | None, typer.Option(help="name@sha256:…, a local image, or debootstrap")
    ] = None,
    container_tool: ToolName = None,
    tag: Tag = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(help="fill this folder with the lock's wheels, and install from it alone")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="compile_cache.tar.gz from another host, with both its manifests beside it"),
    ] = None,
) -> None:
    """Build the container image of a variant: library, environment, checkpoint, compile cache, flags."""
    from slimqwen.image import build
    from slimqwen.serving.command import ServerCommand

    subject = variants.load(variant)
    consult_target(ServerCommand.resolve(subject, platform=platform))
    with progress_bar() as progress:
        tag = build.build_variant(
            subject,
            base=base_image,
            platform=platform,
            tool=container_tool,
            tag=tag,
            wheelhouse=wheelhouse,
            cache=cache,
            progress=progress,
        )
    say(f"built {tag}; `slimqwen image verify --variant {variant}` verifies it")


@app.command()
def verify(
    variant: VariantName,
    platform: PlatformName = None,
    container_tool: ToolName = None,
    tag: Tag = None,
    record: Annotated[
        bool, typer.Option("--record", help="record how a CPU image started and answered, into results/")
    ] = False,
) -> None:
    """Check what a variant's image holds, without a GPU; start a CPU image and query it. Exit code 1: a check fails."""
    from slimqwen.image.verify import verify_variant

    with progress_bar() as progress:
        tag, result, path = verify_variant(
            variants.load(variant),
            platform=platform,
            tool=container_tool,
            tag=tag,
            record=record,
            command=command(),
            progress=progress,
        )
    for table in result.tables():
        console.print(table.as_rich())
    if path is not None:
        say(f"record: {relative(path)}")
    say(f"{tag} {'passes every check' if result.holds else 'fails a check'}")
    raise typer.Exit(0 if result.holds else 1)
