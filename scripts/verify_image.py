"""Look into a variant's image without a GPU; an image for a CPU is also started and asked a question."""

import argparse
import sys

from _console import console, progress_bar, run, table

from slimqwen import variant
from slimqwen.image import build, context, verify
from slimqwen.records import provenance, results


def main() -> int:
    """Verify, show checks, layers and answer; exit code 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument(
        "--platform", choices=("cpu", "cuda"), help="instead of what the variant or this machine says"
    )
    parser.add_argument(
        "--container-tool", choices=build.TOOLS, help="by default the first of them that works here"
    )
    parser.add_argument("--tag", help="by default localhost/slimqwen:VARIANT-PLATFORM")
    parser.add_argument(
        "--record", action="store_true", help="write what an image for a CPU did into results/"
    )
    arguments = parser.parse_args()
    tool, started = build.find_tool(arguments.container_tool), provenance.utc_now()
    with progress_bar() as progress:
        progress("read the variant", 0, 0)
        content = context.gather(variant.load(arguments.variant), arguments.platform, needs_cache=False)
        one, platform = content.command.variant, content.command.platform
        tag = arguments.tag or build.tag_of(one.name, platform)
        log = one.root / "logs" / f"image-server-{one.name}.log"
        found = verify.verify(content, tool=tool, tag=tag, log=log, progress=progress)
    checks = table(("check", ""), ())
    for check in found.checks:
        checks.add_row(check.name, "; ".join(check.faults[:5]) or "holds")
    console.print(checks)
    sizes = table(("layer", "made by"), ("MB",))
    for number, layer in enumerate(found.layers, 1):
        sizes.add_row(str(number), " ".join(layer.made_by.split())[:80], f"{layer.bytes / 1e6:,.1f}")
    for part, size in found.bytes_by_part.items():
        sizes.add_row("", f"files: {part}", f"{size / 1e6:,.1f}")
    console.print(sizes)
    if found.trial is not None:
        trial = found.trial
        console.print(
            f"started as uid {', '.join(map(str, trial.uids)) or 'unknown'}; /ping answered 200 after "
            f"{trial.ready_seconds} s (before: {dict(trial.unready_answers)}); models: {', '.join(trial.models)}\n"
            f"{trial.question} -> {trial.answer}\n"
            f"SIGTERM: ended after {trial.end_seconds} s, exit code {trial.exit_code}",
            markup=False,
        )
    if arguments.record and found.trial is not None:
        record = results.write(
            "image_cpu",
            one,
            found.as_record(tool, tag),
            command=sys.argv,
            started=started,
            **provenance.of_server(content.command),
        )
        console.print(f"record: {record.relative_to(one.root)}", markup=False)
    console.print(
        f"{tag} {'is what it has to be' if found.holds else 'is not what it has to be'}", markup=False
    )
    return 0 if found.holds else 1


if __name__ == "__main__":
    run(main)
