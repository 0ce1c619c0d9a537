"""Engine modes: a variant's greedy tokens in each combination of modes, compared with the reference engine's.

Each combination runs in a process of its own, so that a crash of vLLM becomes a result. A combination that changes a
token beyond a near tie, crashes or hangs is unsafe and is added to eval/unsafe_engines.json, with which
`slimqwen.serving` refuses to start a server; a combination that is fine again is removed from the file.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from slimqwen.evals import EvalError
from slimqwen.evals.engine import combinations, scenarios
from slimqwen.evals.engine.combinations import Combination, NearTie, Reference, ServedEngine, TestedBuild
from slimqwen.evals.engine.isolation import Engines, server_here, titled
from slimqwen.evals.engine.scenarios import Answer, EngineSettings, Run
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.journal import journal_file, locked
from slimqwen.records.record import Block, Count, NonNegative, ServedRecord, Table
from slimqwen.serving import unsafe_engines
from slimqwen.serving.unsafe_engines import Modes
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant


class State(StrEnum):
    """What a combination of modes was found to be."""

    FINE = "fine"
    UNSAFE = "unsafe"
    NOT_AVAILABLE = "not available"


class Cell(Block):
    """The result of one combination of modes."""

    modes: Modes
    served: bool = Field(description="The variant's own combination.")
    state: State
    reason: str | None = Field(description="null where it is fine.")
    items: Count = Field(description="Answers compared.")
    near_ties: Count = Field(
        description="Answers that differ where either token is correct for the reference engine."
    )
    tokens_compared: Count = Field(description="Equal tokens, up to the first difference of each answer.")
    drafts: Count = Field(description="Tokens drafted by MTP.")
    accepted_drafts: Count
    prefix_hits: Count = Field(
        description="Prompt tokens found in the prefix cache in the scenario of shared prefixes."
    )
    preemptions: Count | None = Field(
        description="Preempted requests with the small KV cache; null with one request at a time."
    )
    aborted: Count = Field(description="Requests aborted while they were answered, and sent again.")
    notes: tuple[str, ...] = Field(description="Scenarios that had no effect or could not run, and why.")
    seconds: NonNegative


class EngineModes(ServedRecord):
    """A variant's greedy tokens in combinations of engine modes, compared with the reference engine's."""

    kind = "engine"
    verb = "eval engine"

    settings_name: str = Field(
        min_length=1,
        description="Name of the settings in eval/gates/.",
        validation_alias="plan",
        serialization_alias="plan",
    )
    build: TestedBuild
    near_tie_nats: NearTie
    cells: tuple[Cell, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_cell_is_served(self) -> "EngineModes":
        if sum(cell.served for cell in self.cells) != 1:
            raise ValueError("exactly one cell must be the served one")
        return self

    @property
    def served_cells(self) -> list[Cell]:
        """The combinations that a server of the variant runs in: its own, also with fewer concurrent requests."""
        served = next(cell for cell in self.cells if cell.served)
        return [cell for cell in self.cells if unsafe_engines.covers(served.modes.model_dump(), cell.modes)]

    @property
    def served_unsafe(self) -> int:
        """Number of unsafe combinations among those that a server of the variant runs in."""
        return sum(cell.state == State.UNSAFE for cell in self.served_cells)

    @property
    def unsafe(self) -> int:
        """Number of unsafe combinations, served or not."""
        return sum(cell.state == State.UNSAFE for cell in self.cells)

    @property
    def tried(self) -> int:
        """Number of combinations that could run here."""
        return sum(cell.state != State.NOT_AVAILABLE for cell in self.cells)

    @property
    def verdict(self) -> Verdict:
        """Verdict on the variant as it is served; inconclusive where its own combination could not run."""
        if self.served_unsafe:
            return Verdict.FAIL
        fine = all(cell.state == State.FINE for cell in self.cells if cell.served)
        return Verdict.PASS if fine else Verdict.INCONCLUSIVE

    def summary(self) -> str:
        """One sentence on all combinations."""
        return (
            f"{self.unsafe} of {self.tried} combinations of engine modes are unsafe, {self.served_unsafe} of them "
            f"served by {self.variant}; a server does not start with an unsafe one"
        )

    def tables(self, path: Path) -> list[Table]:
        """One row per combination; reasons and notes are numbered below."""
        remarks = [remark for cell in self.cells for remark in (cell.reason, *cell.notes) if remark]
        numbers = {remark: number for number, remark in enumerate(dict.fromkeys(remarks), start=1)}
        columns: dict[str, Callable[[Cell], object]] = {
            "": lambda cell: "served" if cell.served else "",
            "MTP K": lambda cell: cell.modes.draft_tokens or "off",
            "prefix caching": lambda cell: "on" if cell.modes.prefix_caching else "off",
            "KV cache": lambda cell: cell.modes.kv_cache_dtype,
            "prefill": lambda cell: "chunked" if cell.modes.chunked_prefill else "whole",
            "graphs": lambda cell: cell.modes.graphs,
            "state": lambda cell: cell.state,
            "notes": lambda cell: ", ".join(
                str(numbers[remark]) for remark in (cell.reason, *cell.notes) if remark
            ),
            "concurrency": lambda cell: cell.modes.concurrency,
            "answers": lambda cell: cell.items,
            "near ties": lambda cell: cell.near_ties,
            "prefix hits": lambda cell: cell.prefix_hits,
            "preempted": lambda cell: cell.preemptions,
            "seconds": lambda cell: f"{cell.seconds:.0f}",
        }
        near_ties = sum(cell.near_ties for cell in self.cells)
        notes = (
            *(f"{number}: {remark}" for remark, number in numbers.items()),
            f"{self.summary()}. {near_ties} near ties up to {self.near_tie_nats:.3g} nats.",
        )
        title = f"Engine modes of {self.variant}: {self.verdict}"
        return [Table.from_rows(title, self.cells, columns, *notes, text_columns=8)]


@dataclass(frozen=True)
class Comparison:
    """A reply compared with the reference engine's answer.

    Attributes:
        same: number of equal tokens before the first difference.
        near_tie: whether it differs where either token is correct.
        gap_nats: log-probability gap between the two tokens for the reference engine; None where the other token is
            not among its likeliest, or nothing differs.
    """

    same: int
    differs: bool
    near_tie: bool
    gap_nats: float | None


def measure(
    variant: Variant,
    settings_name: str,
    *,
    command: Sequence[str],
    records_folder: Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Compare a variant in every combination of engine modes, and update eval/unsafe_engines.json.

    Combinations that an interrupted run has compared are not compared again.

    Args:
        records_folder: folder of the record instead of the variant's; eval/ then stays unchanged.

    Raises:
        EvalError: the settings do not fit the variant, the reference engine fails, or a process was killed.
    """
    started = provenance.utc_now()
    settings = EngineSettings.load(settings_name, variant.root)
    variant.require_weights()
    server = server_here(variant, "check")
    log = log_file(variant)
    build = unsafe_engines.build(variant.weights, server.platform)
    cells: list[Cell] = []
    with (
        Engines.started(server, settings.timeout_s, log) as engines,
        locked(journal_file("engine", server, settings.model_dump(mode="json"))) as journal,
    ):
        reference: Reference | str = engines.run(
            combinations.answer_by_reference,
            (settings, ServedEngine.from_command(server)),
            titled("reference engine", progress),
        )
        if isinstance(reference, str):
            raise EvalError(
                f"{variant.name}: the reference engine fails ({reference}); its log says why: {log}"
            )
        near_tie_nats = reference.noise.near_tie_nats(settings.noise_factor)
        # The reference engine's own answers are those of cell 0.
        items: list[dict[str, Any]] = [
            {"cell": 0, "group": group, "request": number, "tokens": list(answer.tokens)}
            for group, answers in reference.answers.items()
            for number, answer in enumerate(answers)
        ]
        for number, combination in enumerate(reference.combinations, start=1):
            key = combination.modes.model_dump()
            entry = journal.get(key)
            if entry is None:
                title = f"{number}/{len(reference.combinations)} {combination.modes}"
                cell, compared = _run_combination(
                    combination, reference, engines, near_tie_nats, titled(title, progress)
                )
                entry = (cell.as_json(), compared)
                journal.add(key, entry)
            cells.append(Cell.model_validate(entry[0]))
            items += [{"cell": number, **item} for item in entry[1]]
        record = EngineModes(
            variant=variant.name,
            settings_name=settings_name,
            build=build,
            near_tie_nats=near_tie_nats,
            cells=tuple(cells),
            provenance=provenance.describe(
                server,
                command,
                started,
                datasets=[settings.file(variant.root)],
                seeds={"prompts": settings.seed},
            ),
        )
        path = store.write_record(records_folder or variant.folder, record, items)
        if records_folder is None:
            update_unsafe_engines(record, path, variant.root)
        journal.discard()
    return path


def log_file(variant: Variant) -> Path:
    """The file that receives vLLM's output while a variant's engine modes are compared."""
    return variant.root / "logs" / f"engine-{variant.name}.log"


def _run_combination(
    combination: Combination,
    reference: Reference,
    engines: Engines,
    near_tie_nats: float,
    progress: Progress,
) -> tuple[Cell, list[dict[str, Any]]]:
    """Run the scenarios in one combination of modes, and compare its answers."""
    start_s = time.monotonic()
    run: Run | str | None = None
    if combination.refusal is None:
        requests = {
            group: group_requests
            for group, group_requests in reference.requests.items()
            if combination.mixed or group != "mixed"
        }
        task = (combination.modes, combination.flags, requests)
        run = engines.run(scenarios.play, task, progress, modes=combination.modes)
    seconds = round(time.monotonic() - start_s, 1)
    return judge(combination, run, reference.answers, near_tie_nats, seconds=seconds)


def judge(
    combination: Combination,
    run: Run | str | None,
    answers: Mapping[str, Sequence[Answer]],
    near_tie_nats: float,
    *,
    seconds: float,
) -> tuple[Cell, list[dict[str, Any]]]:
    """Compare the answers of a combination with the reference engine's.

    Args:
        run: the reason where the combination broke down; None where it is not available.
        answers: the reference engine's, by group.

    Returns:
        The cell, and one item per reply; an item has tokens where they differ.
    """
    state, reason = State.FINE, None
    if run is None:
        state, reason = State.NOT_AVAILABLE, combination.refusal
    elif isinstance(run, str):
        state, reason = State.UNSAFE, run
    counts = run if isinstance(run, Run) else Run([], 0, 0, 0, None, 0, [])
    items: list[dict[str, Any]] = []
    differences = []
    for reply in counts.replies:
        comparison = compare(answers[reply.group][reply.number], reply.tokens, near_tie_nats)
        items.append(
            {
                "scenario": reply.scenario,
                "group": reply.group,
                "request": reply.number,
                **dataclasses.asdict(comparison),
                "tokens": list(reply.tokens) if comparison.differs else None,
            }
        )
        if comparison.differs and not comparison.near_tie:
            differences.append((reply, comparison))
    if differences:
        reply, first = differences[0]
        gap = (
            "not among the likeliest" if first.gap_nats is None else f"{first.gap_nats:.2f} nats less likely"
        )
        state = State.UNSAFE
        reason = (
            f"{len(differences)} of {len(items)} answers differ; first {reply.scenario}, request {reply.number}, "
            f"token {first.same} ({gap})"
        )
    # What the engine counted has the same names in both.
    counters = {name: value for name, value in vars(counts).items() if name != "replies"}
    cell = Cell(
        modes=combination.modes,
        served=combination.served,
        state=state,
        reason=reason,
        items=len(items),
        near_ties=sum(item["near_tie"] for item in items),
        tokens_compared=sum(item["same"] for item in items),
        seconds=seconds,
        **counters,
    )
    return cell, items


def compare(answer: Answer, tokens: Sequence[int], near_tie_nats: float) -> Comparison:
    """Compare tokens with the reference engine's up to the first difference; later tokens depend on it."""
    pairs = enumerate(zip(answer.tokens, tokens, strict=False))
    first = next((position for position, (expected, token) in pairs if expected != token), None)
    if first is None:
        shorter = min(len(answer.tokens), len(tokens))
        return Comparison(shorter, len(answer.tokens) != len(tokens), False, None)
    likeliest = answer.log_probabilities[first]
    log_probability = likeliest.get(tokens[first])
    gap = None if log_probability is None else likeliest[answer.tokens[first]] - log_probability
    return Comparison(first, True, gap is not None and gap <= near_tie_nats, gap)


def update_unsafe_engines(record: EngineModes, path: Path, root: Path) -> None:
    """Write the findings of a record, which lies in experiments/, to eval/unsafe_engines.json."""
    location = provenance.portable(str(path), root)
    unsafe_engines.update(
        root,
        record.build,
        location,
        unsafe=[
            unsafe_engines.Finding(
                build=record.build, modes=cell.modes, reason=cell.reason or "", record=location
            )
            for cell in record.cells
            if cell.state == State.UNSAFE
        ],
        fine=[cell.modes for cell in record.cells if cell.state == State.FINE],
    )
