"""Cost of the server's middleware to a request: a variant's server compared with bare vLLM."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pydantic import Field

from slimqwen import host_load
from slimqwen.bench.client import StreamingClient
from slimqwen.host_load import HostLoad, Watch
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
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
        headings = ("median of a round", "with / without", "95 % interval")
        rows = tuple(
            (name, f"{ratio.value:.4f}", f"{ratio.low:.4f} to {ratio.high:.4f}")
            for name, ratio in ratios.items()
        )
        title = f"Cost of the middleware, {self.variant}"
        return [Table(title, headings, rows, provenance.source_notes(self, path))]


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
        pairs: questions to each server a round.

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
    pairs_by_round: dict[int, list[Pair]] = {}
    loads: list[HostLoad] = []
    for number in range(rounds):
        progress("rounds", number, rounds)
        pairs_by_round[number], load = host_load.undisturbed(
            partial(_round, variant, number, pairs), f"round {number + 1}", even_if_busy=even_if_busy
        )
        loads.append(load)
    progress("rounds", rounds, rounds)
    record = Middleware(
        variant=variant.name,
        pairs=tuple(itertools.chain.from_iterable(pairs_by_round.values())),
        ttft_ms_with_over_without=_ratio(pairs_by_round, lambda times: times.ttft_ms),
        tpot_ms_with_over_without=_ratio(pairs_by_round, lambda times: times.tpot_ms),
        provenance=provenance.of_served_variant(variant, command, started, host_load=host_load.worst(loads)),
    )
    return store.write(variant.root / "results", record)


def _round(variant: Variant, number: int, pairs: int, watch: Watch) -> list[Pair]:
    measured_pairs = []
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
            times = {}
            for name in ("with", "without") if pair % 2 else ("without", "with"):
                answer = clients[name].ask(question, ANSWER_TOKENS)
                times[name] = Times(ttft_ms=answer.ttft_ms, tpot_ms=round(answer.tpot_ms, 4))
            if pair >= 0:
                measured_pairs.append(Pair(round=number, with_=times["with"], without=times["without"]))
    return measured_pairs


def _ratio(rounds: Mapping[int, Sequence[Pair]], milliseconds: Callable[[Times], float]) -> Ratio:
    with_ = {number: [milliseconds(pair.with_) for pair in pairs] for number, pairs in rounds.items()}
    without = {number: [milliseconds(pair.without) for pair in pairs] for number, pairs in rounds.items()}
    return Ratio.from_ratio(intervals.ratio_by_round(with_, without, in_turns=True)[0])
