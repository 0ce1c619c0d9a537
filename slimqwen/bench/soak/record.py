"""The record kind soak: memory, files and outcomes of requests under a mixed load."""

from pathlib import Path

from pydantic import Field

from slimqwen.records.collection import Collection
from slimqwen.records.provenance import source_notes
from slimqwen.records.record import Block, Count, NonNegative, Record, Table, Verdict


class Growth(Block):
    """Growth of resident memory, MiB an hour: the median slope between two samples, with its 95 % interval.

    Theil, Proc. Royal Netherlands Academy of Sciences 53, 1950; Sen, J. American Statistical Association 63, 1968.
    """

    value: float
    low: float
    high: float


class ProcessGrowth(Growth):
    """Growth of one process."""

    process: str


class Resident(Block):
    """Resident memory of all processes, MiB."""

    settled: NonNegative = Field(description="After the first third.")
    end: NonNegative


class OpenFiles(Block):
    """Open files of all processes, sockets included."""

    before: Count
    after: Count


class Limits(Block):
    """Largest growth that passes."""

    growth_mib_per_hour: NonNegative
    noise_mib: NonNegative = Field(description="Growth that is no fault whatever its slope, MiB.")
    new_files: Count


class Soak(Record):
    """Whether a server's memory stays flat under a mixed load, and every request ends."""

    kind = "soak"
    verb = "bench soak"

    seconds: NonNegative
    clients: Count
    chats: bool = Field(description="Whether the server accepts chats.")
    requests: dict[str, Count] = Field(min_length=1, description="Number of requests by outcome.")
    streams_left: Count = Field(description="Streams that a client left in the middle.")
    resident_mib: Resident
    growth_mib_per_hour: Growth = Field(description="Of all processes after the first third.")
    by_process: tuple[ProcessGrowth, ...] = Field(min_length=1)
    open_files: OpenFiles
    kv_cache_used: NonNegative = Field(description="Share of the KV cache in use at rest.")
    limits: Limits
    faults: tuple[str, ...]
    verdict: Verdict = Field(
        description="fail: there is a fault; inconclusive: the interval of growth reaches beyond its limit."
    )

    def finding(self, path: Path, records: Collection) -> str:
        """The verdict, the load, the growth of memory and the faults."""
        slope, limit = self.growth_mib_per_hour, self.limits.growth_mib_per_hour
        summary = (
            f"{self.verdict}: {sum(self.requests.values()):,} requests in {self.seconds / 60:.0f} minutes, memory "
            f"grew by {slope.value:.1f} [{slope.low:.1f}, {slope.high:.1f}] MiB an hour (limit {limit:g})"
        )
        return "; ".join([summary, *self.faults])

    def tables(self, path: Path) -> list[Table]:
        """Outcomes of requests, memory and files beside their limits."""
        slope, limits, files = self.growth_mib_per_hour, self.limits, self.open_files
        rows = (
            *((f"requests {outcome}", f"{count:,}", "") for outcome, count in sorted(self.requests.items())),
            ("streams left by their client", f"{self.streams_left:,}", ""),
            ("resident after the first third, MiB", f"{self.resident_mib.settled:,.1f}", ""),
            ("resident at the end, MiB", f"{self.resident_mib.end:,.1f}", ""),
            (
                "growth, MiB an hour",
                f"{slope.value:.2f} ({slope.low:.2f} to {slope.high:.2f})",
                f"{limits.growth_mib_per_hour:g}",
            ),
            ("open files before, after", f"{files.before}, {files.after}", f"+{limits.new_files}"),
            ("KV cache in use at rest", f"{self.kv_cache_used:.1%}", "0"),
        )
        notes = (
            f"{self.seconds / 60:.0f} minutes, {self.clients} clients and one that leaves its streams; growth of all "
            "processes after the first third, with Theil and Sen's 95 % interval.",
            *(f"Fault: {fault}." for fault in self.faults),
            *source_notes(self, path),
        )
        return [Table(f"Soak of {self.variant}: {self.verdict}", ("figure", "value", "limit"), rows, notes)]
