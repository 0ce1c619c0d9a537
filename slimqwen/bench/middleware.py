"""Cost of the server's middleware to a request: a variant's server compared with bare vLLM."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic import Field

from slimqwen import host_load
from slimqwen.bench.client import StreamingClient
from slimqwen.host_load import HostLoad, Watch
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.panel import Line, Panel
from slimqwen.records.record import Block, Count, NonNegative, Ratio, Record
from slimqwen.records.table import Table
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port, run_server
from slimqwen.stats import intervals
from slimqwen.variant import Variant

ANSWER_TOKENS = 32
"""Length of an answer, tokens."""

_WARM_UP_PAIRS = 2


class Times(Block):
    """Times of one request."""

    ttft_ms: NonNegative
    tpot_ms: NonNegative


class Pair(Block):
    """The same question to both servers."""

    round: Count | None = Field(
        default=None, description="Both servers start anew in each; null in old records."
    )
    with_: Times = Field(
        validation_alias="with", serialization_alias="with", description="With the middleware."
    )
    without: Times = Field(description="Bare vLLM.")


class Middleware(Record):
    """Cost of a server's middleware to a request: times with it and under bare vLLM, in turns."""

    kind = "middleware"
    verb = "bench middleware"

    pairs: tuple[Pair, ...] = Field(min_length=2, description="In the order of measuring.")
    ttft_ms_with_over_without: Ratio = Field(
        description="Of a round's medians, over rounds; of records without rounds, by bootstrap over pairs."
    )
    tpot_ms_with_over_without: Ratio = Field(description="Likewise.")

    def tables(self, path: Path) -> list[Table]:
        """The two ratios."""
        ratios = {"TTFT": self.ttft_ms_with_over_without, "TPOT": self.tpot_ms_with_over_without}
        columns: dict[str, Callable[[tuple[str, Ratio]], object]] = {
            "median of a round": lambda row: row[0],
            "with / without": lambda row: f"{row[1].value:.4f}",
            "95 % interval": lambda row: f"{row[1].low:.4f} to {row[1].high:.4f}",
        }
        return [
            Table.from_rows(
                f"Cost of the middleware, {self.variant}",
                ratios.items(),
                columns,
                *provenance.source_notes(self, path),
            )
        ]

    def panels(self) -> list[Panel]:
        """TTFT and TPOT of each pair."""
        numbers = range(1, len(self.pairs) + 1)
        sides = {
            "with": [pair.with_ for pair in self.pairs],
            "without": [pair.without for pair in self.pairs],
        }
        return [
            Panel(
                "pair",
                f"{name.upper()} (ms)",
                [
                    Line(
                        f"{side} middleware",
                        numbers,
                        [getattr(times, f"{name}_ms") for times in side_times],
                    )
                    for side, side_times in sides.items()
                ],
            )
            for name in ("ttft", "tpot")
        ]


def write(
    variant: Variant,
    rounds: int,
    pairs: int,
    *,
    command: Sequence[str],
    even_if_busy: bool = False,
    progress: Progress = silent,
) -> Path:
    """Send both servers the same questions in turns, each first in every other pair, and write the record.

    One question is in flight at a time. Both servers run at once: on a GPU, give the variant less than half of the
    memory. Two starts of one server differ by more than the middleware costs, so both start anew every round.

    Args:
        rounds: starts of each server, at least 2.
        pairs: questions to each server a round, at least 1.
        even_if_busy: take rounds on a busy host too; the record is marked.

    Raises:
        HostBusyError: the host was too busy in all attempts at a round.
        BenchError: a server refused a request, or an answer has another length.
        TooFewItemsError: fewer than 2 rounds, or no pair.
    """
    if rounds < 2 or pairs < 1:
        raise intervals.TooFewItemsError(
            f"{rounds} round(s) of {pairs} pair(s) show no spread: take 2 rounds or more, of 1 pair or more"
        )
    started = provenance.utc_now()
    measured_pairs: list[Pair] = []
    loads: list[HostLoad] = []
    for number in range(rounds):
        progress("rounds", number, rounds)
        round_pairs, load = host_load.undisturbed(
            partial(_round, variant, number, pairs), f"round {number + 1}", even_if_busy=even_if_busy
        )
        measured_pairs += round_pairs
        loads.append(load)
    progress("rounds", rounds, rounds)
    record = Middleware(
        variant=variant.name,
        pairs=tuple(measured_pairs),
        ttft_ms_with_over_without=_ratio(measured_pairs, "ttft_ms"),
        tpot_ms_with_over_without=_ratio(measured_pairs, "tpot_ms"),
        provenance=provenance.of_served_variant(variant, command, started, host_load=host_load.worst(loads)),
    )
    return store.write(variant.root / "results", record)


def _round(variant: Variant, number: int, pairs: int, watch: Watch) -> list[Pair]:
    measured_pairs: list[Pair] = []
    with contextlib.ExitStack() as stack:
        clients = {}
        for name in ("with", "without") if number % 2 else ("without", "with"):
            command = ServerCommand.resolve(variant, port=free_port())
            if name == "without":
                command = command.without_middleware()
            log = variant.root / "logs" / f"middleware-{variant.name}-{name}.log"
            server = stack.enter_context(run_server(command, log=log))
            clients[name] = stack.enter_context(StreamingClient(server, watch))
        stack.enter_context(watch.section(counters=clients["with"].counters))
        # The first pairs warm up the bare server, which has no warm-up of its own.
        for pair in range(-_WARM_UP_PAIRS, pairs):
            question = f"Question {number}, {pair}: where is it?"
            times = {
                name: _question_times(clients[name], question)
                for name in (("with", "without") if pair % 2 else ("without", "with"))
            }
            if pair >= 0:
                measured_pairs.append(Pair(round=number, with_=times["with"], without=times["without"]))
    return measured_pairs


def _question_times(client: StreamingClient, question: str) -> Times:
    answer = client.ask(question, ANSWER_TOKENS)
    return Times(ttft_ms=answer.ttft_ms, tpot_ms=round(answer.tpot_ms, 4))


def _ratio(pairs: Sequence[Pair], measure: str) -> Ratio:
    sides: tuple[dict[int, list[float]], ...] = ({}, {})
    for pair in pairs:
        for rounds, times in zip(sides, (pair.with_, pair.without), strict=True):
            rounds.setdefault(pair.round or 0, []).append(getattr(times, measure))
    return Ratio.from_ratio(intervals.ratio_by_round(*sides, in_turns=True)[0])
