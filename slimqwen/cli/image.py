"""`slimqwen image`: builds a variant's container image, and verifies it."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from slimqwen.cli.console import console, progress_bar, say
from slimqwen.cli.options import PlatformName, TrustedCache, VariantOption

app = typer.Typer(help="Build and verify container images.", no_args_is_help=True)


ToolName = Annotated[
    Literal["docker", "podman", "buildah"] | None,
    typer.Option(help="tool that builds or runs the image (default: the first that works here)"),
]
Tag = Annotated[
    str | None, typer.Option(help="name of the image (default: localhost/slimqwen:NAME-PLATFORM)")
]


@app.command("build")
def build_variant_image(
    variant: VariantOption,
    platform: PlatformName = None,
    base_image: Annotated[
        str | None, typer.Option(help="image to build on: name@sha256:…, a local image, or debootstrap")
    ] = None,
    container_tool: ToolName = None,
    tag: Tag = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(help="install only from this folder, which has every wheel of the lock")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="compile_cache.tar.gz made on another host; compile_cache.json and manifest.json must be beside it"
        ),
    ] = None,
    trust_cache: TrustedCache = None,
) -> None:
    """Build the container image of a variant: library, environment, checkpoint, compile cache, flags."""
    from slimqwen.image import build, context, tools
    from slimqwen.serving import baked_cache

    tool = tools.find_tool(container_tool)
    if trust_cache:
        archive = cache or variant.weights / baked_cache.ARCHIVE
        baked_cache.import_archive(variant.root, archive, trust_cache)
    log = variant.root / "logs" / f"image-{variant.name}.log"
    with progress_bar() as progress:
        progress("read the variant", 0, 0)
        content = context.gather(variant, platform, cache)
        tag = tag or build.tag_of(variant.name, content.command.platform)
        build.build_image(
            content, tool=tool, base=base_image, tag=tag, log=log, wheelhouse=wheelhouse, progress=progress
        )
    if content.cache:
        origin = baked_cache.find_origin(variant.root, content.cache)
        say(f"compile cache {origin}, SHA-256 {content.cache.archive_sha256}")
    say(f"built {tag}; `slimqwen image verify --variant {variant.name}` verifies it")


@app.command("verify")
def verify_variant_image(
    variant: VariantOption,
    platform: PlatformName = None,
    container_tool: ToolName = None,
    tag: Tag = None,
) -> None:
    """Check what a variant's image holds, without a GPU; start a CPU image and query it. Exit code 1: a check fails."""
    from slimqwen.image import build, context, tools, verify
    from slimqwen.records.table import Table

    tool = tools.find_tool(container_tool)
    log = variant.root / "logs" / f"image-server-{variant.name}.log"
    with progress_bar() as progress:
        progress("read the variant", 0, 0)
        content = context.gather(variant, platform, needs_cache=False)
        tag = tag or build.tag_of(variant.name, content.command.platform)
        faults = verify.verify_image(content, tool=tool, tag=tag, log=log, progress=progress)
    rows = tuple((name, "; ".join(found[:5]) or "holds") for name, found in faults.items())
    console.print(Table(tag, ("check", "result"), rows).as_rich())
    say(f"{tag} {'fails a check' if any(faults.values()) else 'passes every check'}")
    raise typer.Exit(1 if any(faults.values()) else 0)
