"""The record kind fuzz: what a server does with malformed requests."""

from pathlib import Path

from pydantic import Field

from slimqwen.records.collection import Collection
from slimqwen.records.provenance import source_note
from slimqwen.records.record import Block, Count, Positive, Record, Table, Verdict


class Fault(Block):
    """A request that was neither answered nor refused with a reason."""

    request: str = Field(min_length=1, description="Endpoint, or path, and the beginning of the body.")
    outcome: str = Field(min_length=1, description="Status, or what became of the connection.")


class Fuzz(Record):
    """Whether a server refuses malformed requests with a reason, and serves as before afterwards."""

    kind = "fuzz"
    verb = "bench fuzz"

    examples: Positive = Field(description="Valid, and invalid, requests drawn for each endpoint, at most.")
    endpoints: Positive = Field(description="Endpoints of the server's OpenAPI document.")
    requests: dict[str, Count] = Field(min_length=1, description="Number of requests by outcome.")
    faults: tuple[Fault, ...] = Field(description="The first of each endpoint and outcome.")
    harm: tuple[str, ...] = Field(description="What the server could no longer do afterwards.")
    verdict: Verdict = Field(description="fail: there is a fault, or harm was done.")

    def finding(self, path: Path, records: Collection) -> str:
        """The verdict, the number of requests, and the first fault."""
        faults = [*self.harm, *(f"{fault.outcome} for {fault.request}" for fault in self.faults)]
        first = f"; {len(faults)} faults, the first: {faults[0]}" if faults else ""
        return (
            f"{self.verdict}: {sum(self.requests.values()):,} requests to {self.endpoints} endpoints{first}"
        )

    def tables(self, path: Path) -> list[Table]:
        """Requests by outcome; then the faults."""
        rows = tuple((outcome, f"{count:,}") for outcome, count in sorted(self.requests.items()))
        notes = (
            f"Written by hand, and drawn from the OpenAPI document: {self.examples} valid and {self.examples} invalid "
            f"requests at most for each of {self.endpoints} endpoints.",
            *(f"Afterwards {each}." for each in self.harm),
            source_note(self, path),
        )
        tables = [
            Table(
                f"Malformed requests to {self.variant}: {self.verdict}", ("outcome", "requests"), rows, notes
            )
        ]
        if self.faults:
            faults = tuple((fault.outcome, fault.request) for fault in self.faults)
            tables.append(
                Table("Neither answered nor refused", ("outcome", "request"), faults, text_columns=2)
            )
        return tables
