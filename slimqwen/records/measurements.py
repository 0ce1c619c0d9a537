"""A variant's measurements.json: what it claims, where the claim stands, and the records that support it."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from slimqwen.records.record import VariantName, Verdict, Versioned


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a file is named twice")
    return names


class Measurements(Versioned):
    """What a variant claims."""

    kind: ClassVar = "measurements"

    hypothesis: str = Field(min_length=1)
    baseline: VariantName | None = Field(
        description="The variant that this one is compared with; null for a baseline itself."
    )
    status: Literal["planned", "measured", "promoted", "rejected"]
    verdict: Verdict | None = Field(description="null until a comparison has given one.")
    records: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[^/]+\.json$")], ...],
        AfterValidator(_unique),
        Field(description="File names in the variant's folder.", json_schema_extra={"uniqueItems": True}),
    ]
