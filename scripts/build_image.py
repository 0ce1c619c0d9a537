"""Build the container image of a variant: library, environment, checkpoint, compile cache and flags."""

import argparse
from pathlib import Path

from _console import console, progress_bar, run

from slimqwen import variant
from slimqwen.image import build, context


def main() -> int:
    """Gather, build, name the image."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument(
        "--platform", choices=("cpu", "cuda"), help="instead of what the variant or this machine says"
    )
    parser.add_argument("--base-image", help=f"name@sha256:…, a local image, or {build.BOOTSTRAP}")
    parser.add_argument(
        "--container-tool", choices=build.TOOLS, help="by default the first of them that works here"
    )
    parser.add_argument("--tag", help="by default localhost/slimqwen:VARIANT-PLATFORM")
    parser.add_argument(
        "--wheelhouse", type=Path, help="fill this folder with the lock's wheels, and install from it alone"
    )
    parser.add_argument(
        "--cache", type=Path, help="compile_cache.tar.gz of another host, both its manifests beside it"
    )
    arguments = parser.parse_args()
    tool, base = build.find_tool(arguments.container_tool), build.check_base(arguments.base_image)
    with progress_bar() as progress:
        progress("read the variant", 0, 0)
        content = context.gather(variant.load(arguments.variant), arguments.platform, arguments.cache)
        one = content.command.variant
        tag = arguments.tag or build.tag_of(one.name, content.command.platform)
        build.build(
            content,
            tool=tool,
            base=base,
            tag=tag,
            log=one.root / "logs" / f"image-{one.name}.log",
            wheelhouse=arguments.wheelhouse,
            progress=progress,
        )
    console.print(f"built {tag}; `make verify-image VARIANT={one.name}` looks into it", markup=False)
    return 0


if __name__ == "__main__":
    run(main)
