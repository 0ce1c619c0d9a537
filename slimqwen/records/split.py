"""The split of items between a search and the proof of its result.

A search picks the best of many candidates, so the items of the search overrate the winner. The proof uses items that
the search never saw. Only the hash of an item's text decides on which side it is: order, number and task do not matter.
"""

import hashlib
from typing import Literal

from pydantic import Field

from slimqwen.records.record import Block, Record, ServedRecord, Share

Side = Literal["search", "proof"]


class Split(Block):
    """One side of the split: the items of the search, or those of the proof."""

    side: Side
    proof_share: Share = Field(description="Share of all texts on the proof's side; the search has the rest.")

    def has(self, text: str) -> bool:
        """Whether a text belongs to this side; white space around the text does not matter.

        Args:
            text: question or document of an item.
        """
        digest = hashlib.sha256(f"proof split\n{text.strip()}".encode()).digest()
        in_proof = int.from_bytes(digest[:8], "big") < self.proof_share * 2**64
        return in_proof == (self.side == "proof")

    def __str__(self) -> str:
        share = self.proof_share if self.side == "proof" else 1 - self.proof_share
        return f"{self.side} split, {share:.0%} of the items"


class SplitRecord(ServedRecord):
    """A record that a search can measure on one side of its split of the items.

    Only records of the same side are compared with each other, and those of all items with those of all items.
    """

    split: Split | None = Field(
        default=None, description="Side of the split that was measured; null or absent for all items."
    )


def split_of(record: Record) -> Split | None:
    """The side of the split that was measured; None for all items."""
    return record.split if isinstance(record, SplitRecord) else None
