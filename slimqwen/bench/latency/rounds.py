"""Rounds of requests to variants that are measured in turns on fresh servers: A B A B.

All variants get the same texts in the same order and at the same arrival times. If the host was too busy, a round is
measured again.
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimqwen import host_load
from slimqwen.bench import BenchError
from slimqwen.bench.latency import figures
from slimqwen.bench.latency.measured_variant import MeasuredVariant, SharedState
from slimqwen.bench.latency.memory_limit import find_bandwidth, shortest_tpot_ms
from slimqwen.bench.latency.record import Arrival, ClassFigures, Latency, PrefixCache
from slimqwen.bench.latency.speedups import by_class_and_round, by_round
from slimqwen.bench.load_shapes import SHAPES, SUFFIX_TOKENS
from slimqwen.bench.workload import PromptClass, Workload
from slimqwen.errors import SlimqwenError
from slimqwen.host_load import HostBusyError, HostLoad, Watch
from slimqwen.plan import start
from slimqwen.processes import spawner
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.journal import journal_file, locked
from slimqwen.records.record import Ratio
from slimqwen.serving import checks
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.shared_server import ServerLostError, share_server
from slimqwen.stats import intervals
from slimqwen.text.prompts import digest
from slimqwen.variant import Variant


@spawner.share_spawner()
def measure_latency(
    variants: Sequence[Variant],
    workload: Workload,
    *,
    command: Sequence[str],
    rounds: int | None = None,
    port: int | None = None,
    records_folders: Sequence[Path] | None = None,
    even_if_busy: bool = False,
    progress: Progress = silent,
) -> list[Path]:
    """Measure variants over a workload in turns and write a latency record for each.

    Every round starts a fresh server, unless a variant's server already runs, which is then used for all rounds. After
    an interruption the same call continues with the first round that is missing.

    Args:
        variants: the variants, in the order of their turns.
        workload: prompts, lengths and arrivals.
        command: command line that the records state as their origin.
        rounds: number of rounds instead of the workload's.
        port: TCP port of the servers instead of the variants' own.
        records_folders: folders of the records instead of the variants' own, in the order of the variants.
        even_if_busy: whether to measure on a busy host; the records are then marked, and never compared.
        progress: receives (activity, done, total) in requests.

    Returns:
        Paths of the records, in the order of the variants.

    Raises:
        HostBusyError: the host was too busy in all attempts at a round; no record is written.
        ServerLostError: a server died; no record is written.
        BenchError, CorpusError: the workload does not fit the server, or has too little text.
        MissingCheckpointError, CorruptCheckpointError: a variant's checkpoint is missing or damaged.
    """
    rounds = workload.rounds if rounds is None else rounds
    if rounds < 1:
        raise BenchError(f"{rounds} rounds measure nothing; set --rounds to 1 or more")
    for variant in variants:
        variant.require_weights()  # the tokenizer cuts texts before any server starts
    started = provenance.utc_now()
    shared = SharedState(workload, max_num_seqs(variants, workload), rounds, progress)
    sides = [MeasuredVariant(_with_settings(variant, workload), shared) for variant in variants]
    if workload.prompts:
        # A class has one name and one length, so lengths are those in the tokens of the first variant.
        prompts, output_tokens = zip(*sides[0].own_prompts, strict=True)
        workload = shared.workload = workload.of_own_prompts(prompts, output_tokens)
    with locked(_journal(sides, workload, rounds, even_if_busy)) as finished:
        for number in range(rounds):
            if (state := finished.get(number)) is not None:
                _resume(shared, sides, state)
                continue
            try:
                _take_round(shared, sides, number, port, even_if_busy)
            except (ServerLostError, HostBusyError) as error:
                if number:
                    error.args = (f"{error}; rounds 1 to {number} of {rounds} are kept for the next run",)
                raise
            if number < rounds - 1:
                finished.add(number, _state(shared, sides))
        bandwidth = find_bandwidth(ServerCommand.resolve(variants[0]).platform, variants[0].root)
        records = [_record(side, sides, finished.reused, started, command, bandwidth) for side in sides]
        folders = records_folders or [variant.folder for variant in variants]
        paths = [
            store.write_record(
                folder, record, (row for result in side.results.values() for row in result.rows)
            )
            for folder, record, side in zip(folders, records, sides, strict=True)
        ]
        finished.discard()
    return paths


def _take_round(
    shared: SharedState, sides: Sequence[MeasuredVariant], number: int, port: int | None, even_if_busy: bool
) -> None:
    before = _state(shared, sides)
    attempts = itertools.count()

    def send(watch: Watch) -> None:
        if next(attempts):
            # All variants continue at the same document, after every text that a server has seen.
            furthest = max(side.cutter.documents_used for side in sides)
            states = [{**state, "documents_used": furthest} for state in before["sides"]]
            _resume(shared, sides, {**before, "sides": states})
        for side in sides:
            log = side.logs / f"serve-{side.variant.name}.log"
            with share_server(side.variant, port=port, log=log, progress=shared.progress) as served:
                side.take_round(number, served, watch)

    _, load = host_load.retry_until_idle(send, f"round {number + 1}", even_if_busy=even_if_busy)
    shared.loads.append(load)


def _state(shared: SharedState, sides: Sequence[MeasuredVariant]) -> dict[str, Any]:
    return {
        "saturation": dict(shared.saturation),
        "loads": [load.model_dump() for load in shared.loads],
        "sides": [side.state() for side in sides],
    }


def _resume(shared: SharedState, sides: Sequence[MeasuredVariant], state: Mapping[str, Any]) -> None:
    shared.saturation = dict(state["saturation"])
    shared.loads = [HostLoad(**load) for load in state["loads"]]
    for side, side_state in zip(sides, state["sides"], strict=True):
        side.resume(side_state)


def _journal(sides: Sequence[MeasuredVariant], workload: Workload, rounds: int, even_if_busy: bool) -> Path:
    first, *others = [ServerCommand.resolve(side.variant) for side in sides]
    names = [journal_file("latency", other).name for other in others]
    root = first.variant.root
    texts = provenance.data_digests(workload.inputs(root), root)
    return journal_file(
        "latency", first, workload.model_dump(mode="json"), texts, rounds, names, even_if_busy
    )


def _with_settings(variant: Variant, workload: Workload) -> Variant:
    """The variant with the config.env lines of a workload.

    Raises:
        BenchError: this platform cannot serve with one of the lines.
        ServingError: known trouble says that a server with these lines would die or give wrong tokens.
    """
    if not workload.config:
        return variant
    changed_variant = variant.with_lines(workload.config)
    command = ServerCommand.resolve(changed_variant)
    for row in command.platform_changes:
        if row.key in workload.config:
            raise BenchError(
                f"{workload.name}: {variant.name} cannot be served with this workload's settings here: "
                f"{row.key}={row.value}: {row.why}; choose another --workload"
            )
    checks.refuse_trouble(command, start.match_flag_trouble(command).dies)
    return changed_variant


def max_num_seqs(variants: Sequence[Variant], workload: Workload) -> int:
    """Largest VLLM_MAX_NUM_SEQS of the variants, for a workload that sweeps the concurrency up to it; else 1.

    Raises:
        BenchError: a variant does not set it, although the workload sweeps the concurrency.
    """
    if not workload.sweeps_concurrency:
        return 1
    limits = []
    for variant in variants:
        limit = ServerCommand.resolve(variant).flags.get("max-num-seqs")
        if limit is None:
            raise BenchError(
                f"{workload.name} sends up to VLLM_MAX_NUM_SEQS requests at once, and {variant.name} does not set "
                "it; add VLLM_MAX_NUM_SEQS=8, for example, to its config.env"
            )
        limits.append(int(limit))
    return max(limits)


def _record(
    side: MeasuredVariant,
    sides: Sequence[MeasuredVariant],
    reused_rounds: int,
    started: str,
    command: Sequence[str],
    bandwidth: float | None,
) -> Latency:
    assert side.served is not None
    served, shared, workload = side.served, side.shared, side.shared.workload
    load = host_load.highest_load(shared.loads)
    root = side.variant.root
    unscaled_classes = workload.expanded(shared.max_num_seqs)
    return Latency(
        variant=side.variant.name,
        workload=workload.name,
        max_model_len=served.max_model_len,
        scale=workload.scale(served.max_model_len),
        rounds=shared.rounds,
        rounds_of_earlier_run=reused_rounds,
        rounds_repeated=load.repeated,
        run=started,
        interleaved_with=tuple(other.variant.name for other in sides if other is not side),
        memory_bandwidth_gb_per_s=bandwidth and bandwidth / 1e9,
        config=workload.config,
        columns=workload.columns,
        classes={
            c.name: _class(side, place, c, unscaled, bandwidth)
            for place, (c, unscaled) in enumerate(zip(side.classes, unscaled_classes, strict=True))
        },
        provenance=provenance.describe(
            served.server.command,
            command,
            started,
            datasets=workload.inputs(root),
            seeds={"documents": workload.seed},
            already_running=served.already_running,
            host_load=load,
        ),
    )


def _class(
    side: MeasuredVariant, place: int, c: PromptClass, unscaled: PromptClass, bandwidth: float | None
) -> ClassFigures:
    result = side.results[c.name]
    accepted, memory_limit = figures.acceptance(result), None
    if bandwidth and c.limit:
        context = c.prompt_tokens + c.output_tokens // 2
        with suppress(SlimqwenError):  # `fit` may not know the checkpoint; its times count anyway
            memory_limit = shortest_tpot_ms(
                side.variant, bandwidth, context, c.limit, accepted.length if accepted else None
            )
    arrival = None
    if result.rate_per_s is not None:
        arrival = Arrival(process="fixed gap" if c.gap_ms else "Poisson", rate_per_s=result.rate_per_s)
    prefix_cache = None
    if side.shared.workload.needs_prefix_cache:
        known = SHAPES[side.shared.workload.shape].known_from(place)
        first = None if known is None else side.classes[known]
        prefix_cache = PrefixCache(
            block_tokens=side.block_tokens,
            prefix_tokens=_prefix_tokens(side, c, first),
            queried_tokens=round(result.queried_tokens),
            hit_tokens=round(result.hit_tokens),
            repeats=first.name if first else None,
            repeat_speedup=_repeat_speedup(side, c, first),
        )
    return ClassFigures(
        prompt_tokens=c.prompt_tokens,
        output_tokens=c.output_tokens,
        spread=c.spread,
        named_prompt_tokens=unscaled.prompt_tokens,
        named_output_tokens=unscaled.output_tokens,
        concurrency=c.limit,
        arrival=arrival,
        durations_s=tuple(result.durations_s),
        **figures.summarise(result.rows, sum(result.durations_s), side.shared.workload.service_level),
        memory_limit_ms=memory_limit,
        acceptance=accepted,
        prefix_cache=prefix_cache,
        prompts_sha256=digest(result.prompts),
    )


def _prefix_tokens(side: MeasuredVariant, c: PromptClass, first: PromptClass | None) -> int:
    """Number of tokens of a prompt that can be found in a prefix cache: whole blocks."""
    if SHAPES[side.shared.workload.shape].whole_blocks:
        return c.prompt_tokens - SUFFIX_TOKENS
    known = first.prompt_tokens + first.output_tokens if first else c.prompt_tokens
    return known // side.block_tokens * side.block_tokens


def _repeat_speedup(side: MeasuredVariant, c: PromptClass, first: PromptClass | None) -> Ratio | None:
    """Median TTFT of prefixes that are sent for the first time, over that of their repetition in class `c`.

    None if `c` repeats no prefixes, or if the two classes differ in concurrency or have an arrival process.
    """
    repeats = first is not None and side.shared.workload.shape == "prefixes"
    if not repeats or first is None or first.concurrency != c.concurrency or first.arrives or c.arrives:
        return None
    rounds = by_class_and_round([row for name in (first.name, c.name) for row in side.results[name].rows])
    if first.name not in rounds or c.name not in rounds:
        failed = first.name if first.name not in rounds else c.name
        raise BenchError(
            f"{side.variant.name}: no request of class {failed} succeeded; read why in the server's log: {side.log}"
        )
    cold, warm = (by_round(rounds[name], "ttft_ms") for name in (first.name, c.name))
    ratio, _ = intervals.ratio_by_round(cold, warm, in_turns=True)
    return ratio
