"""Get the checkpoint that a variant is a copy of from the model hub."""

import argparse
import os

from _console import console, progress_bar, run

from slimqwen import hub, variant


def main() -> int:
    """Download, or say that it is there, and tell the line that pins the commit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    one = variant.load(parser.parse_args().variant)
    # The hub's client reads these when it is imported: else it warns by itself and sends telemetry first.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with progress_bar() as progress:
        copy = hub.download(one, progress)
    name = copy.folder.name
    size = sum(record.bytes for record in copy.manifest.files.values())
    end = "every file as the hub lists it" if copy.fetched else f"`make verify VARIANT={name}` re-hashes it"
    console.print(
        f"weights/{name} {'is complete' if copy.fetched else 'is there already'}: {copy.source.value} at "
        f"{copy.revision}, {len(copy.manifest.files)} files, {size / 1e6:.1f} MB; {end}",
        markup=False,
        soft_wrap=True,
    )
    if not copy.pinned:
        console.print(
            f"To pin it, write below {copy.source.place}:\nREVISION={copy.revision}",
            markup=False,
            soft_wrap=True,
        )
    return 0


if __name__ == "__main__":
    run(main)
