"""Check before a release: length sweep, malformed requests and soak of a variant, one verdict on one page.

A record is used again while checkpoint, flags, environment, versions and hardware are those it was made with and no
code that serves has changed since, so an interrupted check goes on where it stopped.
"""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from slimqwen.bench import fuzz, soak
from slimqwen.bench.fuzz import Fuzz
from slimqwen.bench.soak import Soak
from slimqwen.captured_log import capture_output
from slimqwen.evals.engine import length_sweep
from slimqwen.evals.engine.length_sweep import LengthSweep
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.collection import Collection
from slimqwen.records.provenance import source_note
from slimqwen.records.record import Block, Record, RelativePath, Table, Verdict
from slimqwen.records.store import AnyRecord
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.verdict import overall
from slimqwen.variant import Variant

_SERVING = ("slimqwen", "requirements")
"""Folders with the code and the versions that decide how a variant is served."""


class Part(Block):
    """One measurement of a release check."""

    check: str = Field(min_length=1)
    verdict: Verdict
    finding: str = Field(min_length=1, description="What its record found, in a line.")
    record: RelativePath = Field(description="From the root of the repository.")
    reused: bool = Field(description="Whether the record was there before.")


class ReleaseCheck(Record):
    """Whether a variant may be released: prompt lengths, malformed requests and memory under load; one verdict."""

    kind = "release_check"
    verb = "release-check"

    parts: tuple[Part, ...] = Field(min_length=1)
    verdict: Verdict

    def cited(self) -> Sequence[str]:
        """The records of its measurements."""
        return [part.record for part in self.parts]

    def finding(self, path: Path, records: Collection) -> str:
        """The verdict, and the measurements that do not pass."""
        not_passed = [part.check for part in self.parts if part.verdict != Verdict.PASS]
        return f"{self.verdict}: {', '.join(not_passed or [part.check for part in self.parts])}"

    def tables(self, path: Path) -> list[Table]:
        """A row per measurement."""
        return [
            Table.from_rows(
                f"Release check of {self.variant}: {self.verdict}",
                self.parts,
                {
                    "check": lambda part: part.check,
                    "verdict": lambda part: part.verdict,
                    "found": lambda part: part.finding.removeprefix(f"{part.verdict}: "),
                    "record": lambda part: f"{part.record}{' (made before)' if part.reused else ''}",
                },
                source_note(self, path),
                text_columns=4,
            )
        ]


def write(
    variant: Variant,
    settings_name: str,
    *,
    minutes: float,
    examples: int,
    command: Sequence[str],
    progress: Progress = silent,
) -> Path:
    """Make what is missing of a variant's length sweep, fuzz and soak, and write the record of the release check.

    Args:
        settings_name: name of a file in eval/length_sweep/.
        minutes: shortest soak that counts, minutes.
        examples: fewest requests of the fuzz for each endpoint that count.

    Raises:
        SlimqwenError: a measurement failed.
    """
    started = provenance.utc_now()
    variant.require_weights()
    logs = variant.root / "logs"
    options: dict[str, Any] = {"command": command, "progress": progress}

    def measure_lengths() -> Path:
        with capture_output(length_sweep.log_file(variant)):
            return length_sweep.measure(variant, settings_name, **options)

    def measure_fuzz() -> Path:
        return fuzz.write(variant, examples, logs / f"fuzz-{variant.name}.log", **options)

    def measure_soak() -> Path:
        return soak.write(variant, 60 * minutes, logs / f"soak-{variant.name}.log", **options)

    lengths = _reusable(variant, LengthSweep, lambda record: record.settings_name == settings_name)
    parts = [_part("length sweep", variant, lengths, measure_lengths)]
    requests = _reusable(variant, Fuzz, lambda record: record.examples >= examples)
    parts.append(_part("malformed requests", variant, requests, measure_fuzz))
    # Samples are five seconds apart, so the last one is a little before the end.
    memory = _reusable(variant, Soak, lambda record: record.seconds >= 60 * minutes - 10)
    parts.append(_part("soak", variant, memory, measure_soak))
    record = ReleaseCheck(
        variant=variant.name,
        parts=tuple(parts),
        verdict=overall([part.verdict for part in parts]),
        provenance=provenance.of_served_variant(variant, command, started),
    )
    return store.write(variant.root / "results", record)


def _part(check: str, variant: Variant, reusable: Path | None, measure: Callable[[], Path]) -> Part:
    """A check from its newest record that still holds, else from a new one."""
    path = reusable or measure()
    record = store.read(path)
    return Part(
        check=check,
        verdict=Verdict(record.outcome),
        finding=record.outcome,
        record=path.relative_to(variant.root).as_posix(),
        reused=reusable is not None,
    )


def _reusable(variant: Variant, kind: type[AnyRecord], fits: Callable[[AnyRecord], bool]) -> Path | None:
    """The newest record of a variant that a new measurement would only repeat; None without one.

    Args:
        fits: whether a record is large enough.
    """
    server = ServerCommand.resolve(variant)
    in_results = kind.folder == "results"
    paths = (
        store.results(variant.root, kind, variant.name) if in_results else store.records(variant.folder, kind)
    )
    for path in paths:
        record = store.read(path, kind)
        block = record.provenance
        is_valid = fits(record) and provenance.still_holds(block, server)
        if is_valid and _is_of_this_code(block.git.commit, block.git.dirty, variant.root):
            return path
    return None


def _is_of_this_code(commit: str | None, dirty: bool | None, root: Path) -> bool:
    """Whether the code that serves is unchanged since a commit; never for a record of a checkout with changes."""
    if commit is None or dirty:
        return False
    diff_command = ["git", "-C", str(root), "diff", "--quiet", commit, "--", *_SERVING]
    return subprocess.run(diff_command, capture_output=True, check=False).returncode == 0
