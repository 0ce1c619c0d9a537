"""The base class of every record kind, and the field types that kinds share.

docs/contributing.md says what a kind consists of. A field whose JSON name is a Python keyword is declared as
`class_: str = Field(validation_alias="class", serialization_alias="class")`. Modules of kinds import torch, vLLM and
transformers only inside functions.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from slimqwen.host_load import HostLoad
from slimqwen.records.figures import Figure as Figure
from slimqwen.records.figures import figures_of
from slimqwen.records.table import Table as Table
from slimqwen.stats.estimates import Estimate as Estimate
from slimqwen.stats.estimates import Ratio as Ratio
from slimqwen.stats.verdict import Verdict as Verdict
from slimqwen.variant.claims import Claim, read_claims

Utc = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
VariantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
RelativePath = Annotated[str, Field(pattern=r"^[^/~]")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Block(BaseModel):
    """Base class of a record and of its parts: frozen; an unknown key or a number that is not finite is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def model_post_init(self, context: Any, /) -> None:
        """Make `as_json` write the field `schema` although its value is the default."""
        if "schema_" in type(self).model_fields:
            self.model_fields_set.add("schema_")

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON, as a file has them; fields that were never set are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class Finding(Block):
    """One figure of a check: its value and interval, the limit with which it is compared, and the verdict."""

    gate: str = Field(min_length=1)
    figure: str = Field(min_length=1, description="Name of the figure, with its unit.")
    value: float | None
    low: float | None = Field(default=None, description="Lower end of the interval; null without one.")
    high: float | None = Field(default=None, description="Upper end of the interval; null without one.")
    limit: float = Field(description="Limit with which the interval is compared.")
    verdict: Verdict
    p_value: Share | None = Field(
        default=None,
        description="One-sided, of the hypothesis that the figure lies on the wrong side of its limit; null or absent "
        "without an interval, absent in old records.",
    )
    items_needed: Positive | None = Field(
        default=None,
        description="Number of items that was planned to decide, before the first look; null or absent where none was "
        "planned. Old records have the number with which an inconclusive value would pass.",
    )


class Items(Block):
    """The per-item results beside a record, one JSON object a line."""

    file: str = Field(pattern=r"^[^/]+\.items\.jsonl$")
    sha256: Sha256
    count: Positive


class Git(Block):
    """The git state of a checkout or workspace when the record was written: `dirty` compares its files with `commit`.

    Charts of records do not count either. Both are null outside a git checkout; an installed package is never dirty.
    """

    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = Field(
        description="null outside a git checkout"
    )
    dirty: bool | None = Field(description="Whether other files than records and Markdown differed.")


class InstalledGpu(Block):
    """A GPU of the machine that measured."""

    name: str
    memory_bytes: Count
    driver: str


class Hardware(Block):
    """CPU, memory and GPUs of a machine."""

    cpu_model: str
    cpu_flags: tuple[str, ...] = Field(description="Only flags that choose vLLM's kernels.")
    cpu_count: Positive = Field(description="Logical CPUs that the process may use.")
    memory_bytes: Count = Field(description="Of the machine, or the limit of the process's container.")
    gpus: tuple[InstalledGpu, ...]

    @property
    def basis(self) -> dict[str, Any]:
        """Facts, by name, that two records must share for their times to be compared."""
        return self.model_dump(exclude={"memory_bytes"})


Build = Literal["same", "another build", "unknown build", "another recipe"]
"""How one checkpoint is related to another of the same variant.

same: the same bytes. another build: other bytes of the same recipe, as another kind of CPU makes them. unknown build:
other bytes, and the record is of before records had a recipe key. another recipe: other parameters, data or base.
"""


class MeasuredCheckpoint(Block):
    """The checkpoint that was measured."""

    path: RelativePath = Field(description="Path relative to the repository.")
    digest: Annotated[str, Field(min_length=16)]
    size_bytes: Count
    recipe_key: Sha256 | None = Field(
        default=None,
        description="Key of what the recipe says, the same on every machine; null without a recipe, absent in old "
        "records whose recipe is unknown.",
    )

    def compare_build(self, present: "MeasuredCheckpoint") -> Build:
        """Compare with the checkpoint that is present.

        Returns:
            "same": the same bytes. "another build": other bytes by the same recipe. "unknown build": other bytes, and
            only the recipe of the present one is known. "another recipe": all else.
        """
        if self.digest == present.digest:
            return "same"
        if self.recipe_key == present.recipe_key:
            return "another build" if self.recipe_key else "another recipe"
        return "another recipe" if self.recipe_key else "unknown build"

    def has_recipe_of(self, other: "MeasuredCheckpoint") -> bool:
        """Whether both are builds of one recipe, so that a record of one holds for the other."""
        return self.compare_build(other) in ("same", "another build")


class Provenance(Block):
    """Everything needed to repeat a measurement and to decide whether two measurements may be compared."""

    schema_: Literal["provenance/3"] = Field(
        default="provenance/3", validation_alias="schema", serialization_alias="schema"
    )
    command: str = Field(min_length=1, description="Shell command for the repository's root folder.")
    started: Utc
    ended: Utc
    git: Git
    workspace: Git | None = Field(
        default=None, description="State of the workspace; absent where that is the checkout itself."
    )
    threads: Positive | None = Field(
        description="OpenMP threads of the engine, or of the measuring process where that is the engine; null where "
        "nothing set them."
    )
    packages: dict[str, str] = Field(description="Versions.")
    hardware: Hardware
    flags: dict[str, Any] = Field(
        default={}, description="Resolved vLLM flags; empty where no engine was started."
    )
    files: dict[str, Sha256] = Field(
        default={},
        description="Digests of files and checkpoints that flags name beside the model (a chat template), by flag; "
        "absent where none does, and in old records.",
    )
    environment: dict[str, str] = Field(
        default={}, description="Environment variables of the server, secrets redacted."
    )
    checkpoint: MeasuredCheckpoint | None = Field(default=None, description="null if none was measured.")
    datasets: dict[RelativePath, Sha256] = Field(
        default={}, description="SHA-256 of every file that items came from."
    )
    seeds: dict[str, int] = {}
    server: Literal["started", "found"] | None = Field(
        default=None,
        description="started: by this command, only for it; found: it was already running; null: no server.",
    )
    devices: Sha256 | None = Field(default=None, description="Digest of eval/devices.yaml.")
    host_load: HostLoad | None = Field(
        default=None,
        description="Load of the host during timing; null in old records and if nothing was timed.",
    )

    @property
    def host_was_busy(self) -> bool:
        """Whether the host was so busy that the figures must not be compared with others."""
        return self.host_load is not None and self.host_load.busy

    @property
    def checkpoint_digest(self) -> str | None:
        """Digest of the checkpoint; None if no checkpoint was measured."""
        return self.checkpoint.digest if self.checkpoint else None


class ServedProvenance(Provenance):
    """Everything needed to repeat a measurement of a served variant."""

    flags: dict[str, Any] = Field(description="Resolved vLLM flags.")
    environment: dict[str, str] = Field(description="Environment variables of the server, secrets redacted.")
    checkpoint: MeasuredCheckpoint
    datasets: dict[RelativePath, Sha256] = Field(description="SHA-256 of every file that items came from.")
    seeds: dict[str, int]
    server: Literal["started", "found"] = Field(
        description="started: by this command, only for it; found: it was already running."
    )


class VersionedFile(Block):
    """Base class of JSON files with a kind and a schema version: records, measurements.json, field reports.

    Attributes:
        kind: name of the schema, with which file names begin, such as start_up.
        version: version of the schema.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1

    schema_: str = Field(
        default="", validation_alias="schema", serialization_alias="schema", validate_default=True
    )

    @classmethod
    def present_schema(cls) -> str:
        """Name and version of the schema, such as quality/2."""
        return f"{cls.kind}/{cls.version}"

    @field_validator("schema_")
    @classmethod
    def _is_present(cls, schema: str) -> str:
        if schema not in ("", cls.present_schema()):
            raise ValueError(f"expected {cls.present_schema()}")
        return cls.present_schema()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        json_schema = handler.resolve_ref_schema(handler(schema))
        json_schema["properties"]["schema"] = {"const": cls.present_schema()}
        json_schema["required"] = ["schema", *json_schema["required"]]
        return json_schema


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a file is named twice")
    return names


class Measurements(VersionedFile):
    """The claims of a variant, from its measurements.json."""

    kind: ClassVar = "measurements"

    hypothesis: str = Field(min_length=1)
    baseline: VariantName | None = Field(
        description="The variant that this one is compared with; null for a baseline itself."
    )
    claims: tuple[Claim, ...] | None = Field(
        default=None,
        description="What is claimed against the baseline; absent in old files, whose hypothesis says it.",
    )
    status: Literal["planned", "measured", "promoted", "rejected"]
    verdict: Verdict | None = Field(description="Verdict of a comparison; null before there is one.")
    records: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[^/]+\.json$")], ...],
        AfterValidator(_unique),
        Field(description="Cited files of the variant's folder.", json_schema_extra={"uniqueItems": True}),
    ]

    @property
    def claimed(self) -> tuple[Claim, ...]:
        """The claims against the baseline; empty for a baseline itself."""
        if self.baseline is None:
            return ()
        return read_claims(self.hypothesis) if self.claims is None else self.claims


class Record(VersionedFile):
    """One measurement: its figures, and everything needed to repeat it. Each record kind is a subclass.

    Methods that may need the items have a parameter `path`, the file of the record: the items are in a file beside it.

    Attributes:
        verb: the `slimqwen` verb that makes such a record, such as "bench startup"; empty if no verb does.
        verb_options: options beside --variant that the verb needs to write a record, such as "--record".
        looked_up: whether commands use the newest record of this kind; git may then hold records that no page cites.
        needs_baseline: whether the record compares a variant with its baseline, so that a baseline has none.
        deciding_flags: the only flags of vLLM that affect the figures, if the measurement's engine uses no others.
        units: unit by the ending of a field's name, for endings that figures.py lacks.
        leaderboard_columns: heading of a leaderboard column, by the name of the figure that the column shows.
    """

    verb: ClassVar[str] = ""
    verb_options: ClassVar[str] = ""
    looked_up: ClassVar[bool] = False
    needs_baseline: ClassVar[bool] = False
    deciding_flags: ClassVar[Collection[str] | None] = None
    units: ClassVar[Mapping[str, str]] = {}
    leaderboard_columns: ClassVar[Mapping[str, str]] = {}

    variant: VariantName
    items: Items | None = Field(
        default=None, description="Filled in by `store.write_record`; absent for a kind without items."
    )
    provenance: Provenance

    @classmethod
    def making_command(cls, variant: str) -> str:
        """The command that measures a variant and writes a record of this kind."""
        return " ".join(filter(None, ("slimqwen", cls.verb, "--variant", variant, cls.verb_options)))

    def figures(self) -> Mapping[str, Figure]:
        """The named numbers of the record: all numbers except those of the provenance."""
        return figures_of(self.as_json(), self.units)

    @property
    def topic(self) -> str:
        """What the record is about within its kind, such as a workload.

        A page shows the newest record of each topic. It is empty for a kind without topics.
        """
        return ""

    @property
    def basis(self) -> dict[str, Any]:
        """Properties, by name, that two records must share to be compared; by default digests of the data files."""
        return {f"data file {name}": digest for name, digest in self.provenance.datasets.items()}

    @property
    def outcome(self) -> str:
        """The verdict as text; for a kind with only `passed`, pass or fail; empty for a kind with neither."""
        passed = {True: "pass", False: "fail", None: ""}[getattr(self, "passed", None)]
        return str(getattr(self, "verdict", None) or passed)

    @property
    def caution(self) -> str:
        """A warning to show with the verdict; empty for none."""
        return ""

    def cited(self) -> Sequence[str]:
        """Paths, relative to the repository, of the records on which this one is based."""
        return ()

    def tables(self, path: Path) -> list[Table]:
        """Tables of the record for terminal, Markdown and page; by default one table with a row per figure.

        Args:
            path: file of the record, beside which its items are.
        """
        rows = tuple(
            (name, f"{figure.value:.4g}", _interval(figure), figure.unit)
            for name, figure in self.figures().items()
        )
        title = f"{self.kind.replace('_', ' ').capitalize()} of {self.variant}"
        return [Table(title, ("figure", "value", "95 % interval", "unit"), rows)]

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        json_schema = super().__get_pydantic_json_schema__(schema, handler)
        properties = json_schema["properties"]
        if issubclass(cls, ServedRecord):
            properties["items"] = properties["items"]["anyOf"][0]
            json_schema["required"].append("items")
        else:
            del properties["items"]
        return json_schema


class ServedRecord(Record):
    """A measurement of one served variant, with per-item results beside the record."""

    provenance: ServedProvenance


def _interval(figure: Figure) -> str:
    return "" if figure.low is None or figure.high is None else f"[{figure.low:.4g}, {figure.high:.4g}]"
