"""Draft depth by load: the depth with most tokens per second at each batch size, as vLLM's own schedule.

vLLM takes it as `num_speculative_tokens_per_batch_size` in the speculative config: ranges of batch sizes, a K each;
`num_speculative_tokens` is the largest, for which it allots states. At depth 0 an engine with a schedule makes a draft
pass nevertheless, which keeps the KV cache of the MTP head filled, and throws the draft away (vLLM's V2 model runner,
`vllm/v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py`): that costs more than an engine without speculation.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from slimqwen.records.record import Block, Count, Positive, Table

Speeds = Mapping[int, Sequence[float]]
"""Tokens per second by depth, then by batch size from 1."""


class DepthRange(Block):
    """Batch sizes that draft equally deep."""

    first: Positive = Field(description="Smallest batch size.")
    last: Positive = Field(description="Largest batch size.")
    depth: Count = Field(description="Tokens drafted at a time (K).")


class Load(Block):
    """What one batch size gains by the schedule."""

    batch_size: Positive
    depth: Count = Field(description="Of the schedule.")
    tokens_per_second: float = Field(gt=0, description="Of the batch, by the schedule.")
    fixed_tokens_per_second: float = Field(gt=0, description="Of the batch, at the best fixed depth.")

    @property
    def gain(self) -> float:
        """Tokens per second of the schedule over those of the best fixed depth, minus 1."""
        return self.tokens_per_second / self.fixed_tokens_per_second - 1


class DepthSchedule(Block):
    """The depth to draft at each batch size; a single range where one fixed depth is as good."""

    method: str = Field(
        min_length=1,
        description='"roofline of <gpu>".',
        validation_alias="by",
        serialization_alias="by",
    )
    fixed_depth: Count = Field(
        description="Best fixed depth: highest geometric mean of tokens per second over all batch sizes."
    )
    ranges: tuple[DepthRange, ...] = Field(min_length=1)
    loads: tuple[Load, ...] = Field(
        min_length=1, description="Both ends of every range, and powers of two in between."
    )

    def config_line(self) -> str:
        """The line of config.env that serves it."""
        deepest = max(each.depth for each in self.ranges)
        if not deepest:
            return "VLLM_SPECULATIVE_CONFIG="
        speculation: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": deepest}
        if len(self.ranges) > 1:
            speculation["num_speculative_tokens_per_batch_size"] = [
                [each.first, each.last, each.depth] for each in self.ranges
            ]
        return f"VLLM_SPECULATIVE_CONFIG='{json.dumps(speculation)}'"

    def table(self, source: str) -> Table:
        """A row per batch size of `loads`."""
        return Table.from_rows(
            "Draft depth by batch size",
            self.loads,
            {
                "batch": lambda load: load.batch_size,
                "K": lambda load: load.depth,
                f"tokens/s (bound, {self.method})": lambda load: f"{load.tokens_per_second:,.0f}",
                f"tokens/s, K = {self.fixed_depth} fixed": lambda load: (
                    f"{load.fixed_tokens_per_second:,.0f}"
                ),
                "gain": lambda load: f"{load.gain:+.1%}",
            },
            f"`{self.config_line()}`",
            f"K = {self.fixed_depth} is the best fixed depth: highest geometric mean over all batch sizes.",
            "Predicted, not timed: acceptance is taken as equal at every batch size, kernel launches as free.",
            source,
            text_columns=0,
        )


def graph_sizes(ranges: Iterable[DepthRange]) -> str:
    """Sizes of CUDA graphs in config.env, tokens: a step computes K + 1 tokens of each sequence of a batch."""
    sizes = {
        (each.depth + 1) * batch_size for each in ranges for batch_size in range(each.first, each.last + 1)
    }
    return ",".join(map(str, sorted(sizes)))


def of_speeds(method: str, fixed: Speeds, scheduled: Speeds) -> DepthSchedule:
    """The schedule with the fastest depth at each batch size, and its gain over the best fixed depth.

    Of equally fast depths that of the previous batch size is kept, else the shallowest is taken. Where changing depths
    gains nothing over the best fixed depth in the geometric mean over batch sizes, there is one range with that depth.

    Args:
        method: source of the speeds.
        fixed: speeds of engines with one depth each.
        scheduled: speeds of an engine that changes its depth, of the same depths and batch sizes; they differ from
            `fixed` at depth 0.
    """
    fixed_depth = max(sorted(fixed), key=lambda depth: _log_mean(fixed[depth]))
    num_batch_sizes = len(fixed[fixed_depth])
    depths: list[int] = []
    for index in range(num_batch_sizes):
        best_speed = max(speeds[index] for speeds in scheduled.values())
        fastest = [depth for depth in sorted(scheduled) if math.isclose(scheduled[depth][index], best_speed)]
        depths.append(depths[-1] if depths and depths[-1] in fastest else fastest[0])
    scheduled_mean = _log_mean([scheduled[depth][index] for index, depth in enumerate(depths)])
    fixed_mean = _log_mean(fixed[fixed_depth])
    if scheduled_mean <= fixed_mean or math.isclose(scheduled_mean, fixed_mean):
        depths = [fixed_depth] * num_batch_sizes
    ranges = []
    for depth, members in itertools.groupby(range(num_batch_sizes), key=depths.__getitem__):
        indices = list(members)
        ranges.append(DepthRange(first=indices[0] + 1, last=indices[-1] + 1, depth=depth))
    speeds = scheduled if len(ranges) > 1 else fixed
    return DepthSchedule(
        method=method,
        fixed_depth=fixed_depth,
        ranges=tuple(ranges),
        loads=tuple(
            Load(
                batch_size=batch_size,
                depth=each.depth,
                tokens_per_second=speeds[each.depth][batch_size - 1],
                fixed_tokens_per_second=fixed[fixed_depth][batch_size - 1],
            )
            for each in ranges
            for batch_size in range(each.first, each.last + 1)
            if batch_size in (each.first, each.last) or batch_size.bit_count() == 1
        ),
    )


def _log_mean(speeds: Sequence[float]) -> float:
    return math.fsum(map(math.log, speeds)) / len(speeds)
