"""Measurement of levers: the CPU first, then predictions, then every variant once a round, in turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimqwen import checkpoint, host_load
from slimqwen.analysis.levers import device, prediction, turns
from slimqwen.analysis.levers.record import Arm, Cpu, Levers
from slimqwen.analysis.levers.turns import Task, TurnError
from slimqwen.analysis.roofline import cost
from slimqwen.analysis.roofline.architecture import Model, served_model
from slimqwen.host_load import HostBusyError, HostLoad, Watch
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.journal import Journal, journal_file, locked
from slimqwen.records.record import Ratio
from slimqwen.serving import speed_only
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Side:
    """One variant to time.

    Attributes:
        command: the server's command, whose flags and environment the engine gets.
        depth: drafted tokens per step (K).
        set_length: acceptance length that the variant sets, None where drafts are judged.
    """

    command: ServerCommand
    model: Model
    depth: int
    set_length: float | None

    @property
    def variant(self) -> Variant:
        """The variant."""
        return self.command.variant

    @classmethod
    def load(cls, variant: Variant) -> "Side":
        """Read checkpoint and flags of a variant.

        Raises:
            TurnError: it is served on CUDA alone, or compiles.
            RooflineError: an unsupported checkpoint.
        """
        variant.require_weights()
        command = ServerCommand.resolve(variant)
        if command.platform != "cpu":
            raise TurnError(f"{variant.name} is not served on a CPU here; levers are timed on the CPU")
        if not command.flags.get("enforce-eager"):
            raise TurnError(f"{variant.name} compiles; levers are timed eager, set VLLM_ENFORCE_EAGER=1")
        speculation = command.flags.get("speculative-config") or {}
        return cls(
            command,
            served_model(variant.weights, command.flags),
            int(speculation.get("num_speculative_tokens", 0)),
            speed_only.synthetic_acceptance_length(command.flags),
        )


def write(
    variants: Sequence[Variant],
    *,
    rounds: int,
    prompt_tokens: int,
    output_tokens: int,
    command: Sequence[str],
    even_if_busy: bool = False,
    progress: Progress = silent,
) -> Path:
    """Measure the CPU, predict step times, time the variants in turns, and write the record.

    The same command continues an interrupted run.

    Args:
        variants: at least two; ratios are relative to the first.
        rounds: turns of each variant, at least two.
        even_if_busy: accept turns on a busy host too; the record is marked.

    Raises:
        HostBusyError: the host was too busy in all attempts at a turn; the same command continues from there.
        TurnError: a variant cannot be timed here, or fewer than two variants or rounds.
        RooflineError: an unsupported checkpoint.
    """
    if len(variants) < 2 or rounds < 2:
        raise TurnError("levers take two variants and two rounds at least; name more with --against")
    started = provenance.utc_now()
    sides = [Side.load(variant) for variant in variants]
    first = sides[0]
    lengths = (prompt_tokens, output_tokens)
    names = [journal_file("levers", side.command, lengths).name for side in sides]
    with locked(journal_file("levers", first.command, lengths, names, even_if_busy)) as journal:
        timing = _Timing(lengths, journal, even_if_busy, progress)
        cpu = _cpu(sides, timing)
        rows: dict[str, list[dict[str, float]]] = {side.variant.name: [] for side in sides}
        for number in range(rounds):
            for side in sides:
                key = [number, side.variant.name]
                rows[side.variant.name].append(timing.turn(key, side.command, side.variant.weights))
                progress("turns", sum(map(len, rows.values())), rounds * len(sides))
        context_len = prompt_tokens + output_tokens // 2
        arms: list[Arm] = []
        for side in sides:
            arms.append(_arm(side, cpu, rows[side.variant.name], context_len, arms[0] if arms else None))
        load = host_load.worst(timing.loads)
        block = provenance.of_variant(
            first.variant, command, started, **provenance.of_server(first.command), host_load=load
        )
        record = Levers(
            variant=first.variant.name,
            provenance=block,
            cpu=cpu,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rounds=rounds,
            repeated_turns=load.repeated,
            arms=tuple(arms),
        )
        path = store.write(first.variant.root / "results", record)
        journal.discard()
    return path


@dataclass
class _Timing:
    """Timing of the worker processes of a run.

    Attributes:
        lengths: tokens of the prompt and of the answer.
        journal: figures of an interrupted run; new ones are added.
        even_if_busy: accept figures of a busy host too.
        loads: load of the host in each turn so far.
    """

    lengths: tuple[int, int]
    journal: Journal
    even_if_busy: bool
    progress: Progress
    loads: list[HostLoad] = field(default_factory=list)

    def turn(self, key: Sequence[Any], command: ServerCommand, weights: Path) -> dict[str, float]:
        """Time one engine with a command's flags and environment; `key` names the turn in the journal."""
        return self.figures(key, turns.decode, command, weights, Task(dict(command.flags), *self.lengths))

    def figures(
        self, key: Sequence[Any], function: Any, command: ServerCommand, weights: Path, task: Any
    ) -> dict[str, float]:
        """The figures of a function that measures in a worker process while the host is quiet."""

        def measure(watch: Watch) -> dict[str, float]:
            figures, load = turns.in_worker(
                function,
                weights,
                task,
                environment=command.process_environment(),
                log=command.variant.root / "logs" / f"levers-{command.variant.name}.log",
                timeout_s=_TIMEOUT_S,
                progress=self.progress,
            )
            watch.add(load)
            return figures

        entry = self.journal.get(key)
        if entry is None:
            activity = f"a turn of {command.variant.name}"
            try:
                measured, load = host_load.undisturbed(measure, activity, even_if_busy=self.even_if_busy)
            except HostBusyError as error:
                raise HostBusyError(f"{error}; the same command continues from there") from error
            entry = [measured, load.model_dump()]
            self.journal.add(key, entry)
        self.loads.append(HostLoad(**entry[1]))
        figures: dict[str, float] = entry[0]
        return figures


def _cpu(sides: Sequence[Side], timing: _Timing) -> Cpu:
    """The rates of the CPU in products and copies, and the host's work for the layers of the first variant."""
    first = sides[0]
    depths = sorted({side.depth for side in sides})
    root = first.variant.root
    weights = first.variant.weights
    depth_tokens = sorted({1, *(depth + 1 for depth in depths)})
    figures = timing.figures(["cpu", depths], device.measure, first.command, weights, depth_tokens)
    text = checkpoint.text_config(checkpoint.read_config(weights))
    narrow_weights = prediction.narrow_checkpoint(
        text, root / ".cache" / "levers" / f"narrow-{len(text['layer_types'])}-layers", root / "weights" / "tiny"
    )  # fmt: skip
    host = {}
    for depth in depths:
        side = next(side for side in sides if side.depth == depth)
        row = timing.turn(["host", depth], side.command, narrow_weights)
        host[str(depth)] = 1e3 * row["seconds"] / row["steps"]
    rates = {
        name: value / 1e9 for name, value in figures.items() if name.startswith(("bf16_", "int8_", "int4_"))
    }
    return Cpu(
        name=provenance.hardware_name(provenance.hardware()),
        memory_bandwidth_gb_per_s=max(figures["copy"] / 1e9, rates["bf16_1"]),
        copy_gb_per_s=figures["copy"] / 1e9,
        bf16_peak_tflops=figures["peak"] / 1e12,
        weight_gb_per_s=rates,
        host_ms=host,
    )


def _arm(
    side: Side,
    cpu: Cpu,
    rows: Sequence[Mapping[str, float]],
    context_len: int,
    first: Arm | None,
) -> Arm:
    """One variant's figures from its turns; ratios are to `first`, None for the first itself."""
    counted = [row["tokens"] / row["steps"] for row in rows]
    length = side.set_length
    if length is None:
        length = max(1.0, sum(row["tokens"] for row in rows) / sum(row["steps"] for row in rows))
    steps = [1e3 * row["seconds"] / row["steps"] for row in rows]
    speeds = [length / step for step in steps]
    rates = {key: value * 1e9 for key, value in cpu.weight_gb_per_s.items()}
    roofline = 1e3 * cost.decode(side.model, cpu, 1, context_len, side.depth).seconds
    parts = prediction.parts_ms(
        side.model, rates, cpu.bandwidth, cpu.host_ms[str(side.depth)], side.depth, context_len
    )
    predicted = sum(parts.values()) / (first.predicted_ms if first else sum(parts.values()))
    measured = Ratio.of_rounds(steps, first.step_ms if first else steps)
    return Arm(
        variant=side.variant.name,
        checkpoint=checkpoint.digest(side.variant.weights),
        random_weights=checkpoint.has_random_weights(side.variant.weights),
        num_speculative_tokens=side.depth,
        acceptance_length=length,
        acceptance_is_set=side.set_length is not None,
        bytes_per_step=sum(cost.part_bytes(side.model, side.depth, context_len).values()),
        roofline_ms=roofline,
        predicted_parts_ms=parts,
        step_ms=tuple(steps),
        counted_acceptance_length=tuple(counted),
        resident_bytes=tuple(int(row["memory"]) for row in rows),
        step_ratio=measured,
        predicted_step_ratio=predicted,
        roofline_step_ratio=roofline / first.roofline_ms if first else 1.0,
        prediction_error=predicted / measured.value - 1,
        speed_up=Ratio.of_rounds(
            speeds, [first.acceptance_length / step for step in first.step_ms] if first else speeds
        ),
    )
