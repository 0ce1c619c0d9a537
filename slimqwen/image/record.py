"""Record kind image_cpu: a built image for a CPU, its content, and one start of its server without a network."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slimqwen.records.record import Block, Count, NonNegative, Positive, Record
from slimqwen.records.table import Table

NonEmpty = Annotated[str, Field(min_length=1)]


class Check(Block):
    """One check of an image; it holds where there is no fault."""

    name: NonEmpty
    faults: tuple[str, ...] = Field(description="Empty where the check holds.")


class Layer(Block):
    """One layer of an image."""

    bytes: Count = Field(description="Uncompressed.")
    made_by: str = Field(description="The step of the image's history that made it.")


class BytesByPart(Block):
    """Sizes of an image's regular files by what they belong to."""

    environment: Count
    checkpoint: Count
    library: Count
    system: Count


class Trial(Block):
    """One start of an image's server without a network, as the image's own user."""

    command: NonEmpty
    ready_seconds: NonNegative = Field(description="From the start to the first 200 of /ping.")
    unready_answers: dict[str, Positive] = Field(
        description="Answers of /ping before that, by status code; `none` before the server listened."
    )
    uids: tuple[int, ...] = Field(description="User ids of the server's processes.")
    models: tuple[str, ...] = Field(min_length=1, description="Models that /v1/models lists.")
    question: NonEmpty
    answer: NonEmpty
    completion_tokens: Positive
    end_seconds: NonNegative = Field(description="From SIGTERM to the end of the container.")
    exit_code: int


class ImageCpu(Record):
    """A built image for a CPU: its content, its command, and one start of its server without a network."""

    kind = "image_cpu"
    verb = "image verify"

    tool: Literal["docker", "podman", "buildah"]
    tag: NonEmpty
    checks: tuple[Check, ...] = Field(min_length=1)
    layers: tuple[Layer, ...] = Field(min_length=1, description="From the base up.")
    bytes_by_part: BytesByPart
    history: tuple[str, ...] = Field(description="The steps that made it.")
    dry_run: tuple[str, ...] = Field(description="Output of `--dry-run` in the image, line by line.")
    trial: Trial

    def tables(self, path: Path) -> list[Table]:
        """Checks, layers and sizes, and the trial."""
        return tables(self.checks, self.layers, self.bytes_by_part, self.trial)


def tables(
    checks: tuple[Check, ...], layers: tuple[Layer, ...], parts: BytesByPart, trial: Trial | None
) -> list[Table]:
    """Checks, layers and sizes of an image, and the trial of its server where there was one."""
    rows = tuple((check.name, "; ".join(check.faults[:5]) or "holds") for check in checks)
    sizes = [
        (f"layer {number}: {' '.join(layer.made_by.split())[:80]}", f"{layer.bytes / 1e6:,.1f}")
        for number, layer in enumerate(layers, 1)
    ]
    sizes += [(f"files: {part}", f"{size / 1e6:,.1f}") for part, size in parts.as_json().items()]
    result = [Table("Checks", ("check", "result"), rows), Table("Size", ("part", "MB"), tuple(sizes))]
    if trial is not None:
        rows = (
            ("user ids", ", ".join(map(str, trial.uids)) or "unknown"),
            ("start to the first 200 of /ping, s", str(trial.ready_seconds)),
            ("answers of /ping before", str(trial.unready_answers)),
            ("models", ", ".join(trial.models)),
            (trial.question, trial.answer),
            ("SIGTERM to the end, s", str(trial.end_seconds)),
            ("exit code", str(trial.exit_code)),
        )
        result.append(Table("Server without a network", ("trial", "result"), rows))
    return result
