"""The front: candidates that no other beats both in forecast quality loss and in forecast decode speed on a GPU.

The forecast loss is the sum of what each change costs alone (`sensitivities`); the forecast time of a decode step is
the roofline of `fit` (`fit.cost`). The checks decide.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from slimqwen.fit import FitError, cost
from slimqwen.fit.architecture import Model, shape_model
from slimqwen.fit.memory import SPEED_CONTEXT_LEN, ServerSettings, fitting_batch
from slimqwen.models.shape import Shape
from slimqwen.plan.devices import Gpu
from slimqwen.search.candidate import Candidate
from slimqwen.search.sensitivities import DEEPEST, Change, Sensitivities


@dataclass(frozen=True)
class Forecast:
    """Forecast quality and speed of a candidate.

    Attributes:
        kl_nats: divergence of its next-token distributions from the base's, nats a token, if all is rounded to nearest.
        acceptance_share: acceptance length at the gate's depth, as a share of the base's.
        tokens_per_second: most output tokens per second of one sequence on the GPU, by the roofline.
    """

    candidate: Candidate
    kl_nats: float
    acceptance_share: float
    tokens_per_second: float


@dataclass(frozen=True)
class Limits:
    """The quality that a candidate may lose.

    Attributes:
        kl_nats: largest divergence, nats a token.
        least_share: smallest share of the base's acceptance length, at `depth` drafted tokens.
    """

    kl_nats: float
    least_share: float
    depth: int


@dataclass(frozen=True)
class _Target:
    """A target model: its changes, their divergence, and the bytes that its layers and its output head save."""

    changes: tuple[Change, ...] = ()
    kl_nats: float = 0.0
    body: int = 0
    head: int = 0


@dataclass(frozen=True)
class Front:
    """The candidates of a base on a GPU, with their forecasts.

    Attributes:
        shape: tensor dimensions of the base.
        server: server settings that affect memory and speed, such as context length and KV cache dtype.
        gpu: the GPU for which speeds are computed.
        sensitivities: what each change costs alone.
        limits: quality that a candidate may lose.
    """

    shape: Shape
    server: ServerSettings
    gpu: Gpu
    sensitivities: Sensitivities
    limits: Limits

    def bound(self, model: Model, depth: int, acceptance_length: float) -> float:
        """Most output tokens per second of one sequence with 2,048 cached tokens on the GPU, by the roofline.

        Args:
            model: bytes and FLOPs of the model, from `model`.
            depth: tokens drafted at a time (K); 0 for no drafts.
            acceptance_length: tokens per verify step; more than `depth` + 1 counts as `depth` + 1.
        """
        length = min(depth + 1.0, acceptance_length)
        return cost.bound_decode_step(model, self.gpu, 1, SPEED_CONTEXT_LEN, depth, length).tokens_per_second

    def bound_candidate(self, candidate: Candidate, acceptance_share: float) -> float:
        """Most output tokens per second of a candidate, as `bound` computes them.

        Args:
            acceptance_share: its acceptance length as a share of the base's.
        """
        return self.bound(
            self.model(candidate.shape(self.shape)),
            candidate.depth,
            acceptance_share * self.length(candidate.depth),
        )

    def model(self, shape: Shape) -> Model:
        """Bytes and FLOPs of a model with these tensor dimensions, served with the cache dtypes of `server`."""
        return shape_model(
            shape, kv_cache_dtype=self.server.kv_cache_dtype, state_dtype=self.server.state_dtype
        )

    def model_with(self, changes: Sequence[Change]) -> Model:
        """Bytes and FLOPs of the base with these changes, which must share one group size."""
        sizes = [each.group_size for each in changes if each.group_size]
        choices: dict[str, Any] = {each.choice: each.value for each in changes}
        choices |= {"group_size": next(iter(sizes), 32), "depth": 1}
        return self.model(Candidate.of(choices).shape(self.shape))

    def length(self, depth: int) -> float:
        """The base's acceptance length with `depth` drafted tokens, tokens."""
        return 1 + sum(self.sensitivities.base_rates[:depth])

    def choose(self, count: int, kl_factor: float = 1.0, known: Sequence[Candidate] = ()) -> list[Forecast]:
        """Choose up to `count` candidates: the fastest within the limits, then the fastest within ever tighter ones.

        Args:
            count: number to choose; fewer are returned if no more are within the limits and fit into the GPU's memory.
            kl_factor: measured over forecast divergence of earlier candidates; scales every forecast.
            known: candidates to leave out.
        """
        chosen: list[Forecast] = []
        for number in range(count):
            share = 1 - number / (count + 1)
            taken = (*known, *(each.candidate for each in chosen))
            found = (
                each
                for each in self._by_speed
                if kl_factor * each.kl_nats <= share * self.limits.kl_nats
                and 1 - each.acceptance_share <= share * (1 - self.limits.least_share)
                and each.candidate not in taken
                and self._fits(each.candidate)
            )
            chosen += [each for each in [next(found, None)] if each]
        return chosen

    def _fits(self, candidate: Candidate) -> bool:
        try:
            fitting_batch(
                self.model(candidate.shape(self.shape)), self.gpu, self.server.context_len, candidate.depth
            )
        except FitError:
            return False
        return True

    @cached_property
    def _by_speed(self) -> list[Forecast]:
        """Every candidate of the front, the fastest first."""
        changes = (*self.sensitivities.kl_nats, *self.sensitivities.rates)
        groups = {change.group_size for change in changes if change.group_size}
        found = [each for size in sorted(groups) or [32] for each in self._of_group(size)]
        return sorted(found, key=lambda each: -each.tokens_per_second)

    def _of_group(self, group_size: int) -> Iterator[Forecast]:
        """The candidates whose groups have one size."""
        plain = self.model(self.shape)
        targets = self._targets(plain, group_size)
        for drafts in self._drafts(group_size):
            drafted = self.model_with(drafts)
            rates = self.sensitivities.rates_with(drafts)
            share = (1 + sum(rates[: self.limits.depth])) / self.length(self.limits.depth)
            for target in targets:
                choices: dict[str, Any] = {each.choice: each.value for each in (*target.changes, *drafts)}
                # Rows of a packed output head are copied as they are.
                if choices.get("head_bits") == 4 and choices.get("draft_bits") == 8:
                    continue
                body = replace(plain.body, bytes=plain.body.bytes - target.body)
                head = replace(plain.head, bytes=plain.head.bytes - target.head)
                model = replace(drafted, body=body, head=head)
                depths = range(1, DEEPEST + 1) if rates else [0]
                speeds = {depth: self.bound(model, depth, 1 + sum(rates[:depth])) for depth in depths}
                depth = max(speeds, key=lambda each: speeds[each])
                choices |= {"group_size": group_size, "depth": depth, "rounding": "gptq"}
                yield Forecast(Candidate.of(choices), target.kl_nats, share, speeds[depth])

    def _targets(self, plain: Model, group_size: int) -> list[_Target]:
        """The target models that no other one beats in divergence and in bytes."""
        targets = [_Target()]
        by_choice: dict[str, list[_Target]] = {}
        for change, kl_nats in self.sensitivities.kl_nats.items():
            if change.group_size in (None, group_size):
                made = self.model_with([change])
                saved = plain.body.bytes - made.body.bytes, plain.head.bytes - made.head.bytes
                by_choice.setdefault(change.choice, []).append(_Target((change,), kl_nats, *saved))
        for options in by_choice.values():
            joined = [
                _Target(
                    (*one.changes, *other.changes),
                    one.kl_nats + other.kl_nats,
                    one.body + other.body,
                    one.head + other.head,
                )
                for one, other in product(targets, [_Target(), *options])
            ]
            targets = []
            for each in sorted(joined, key=lambda one: (one.kl_nats, -one.body - one.head)):
                if not targets or each.body + each.head > targets[-1].body + targets[-1].head:
                    targets.append(each)
        return targets

    def _drafts(self, group_size: int) -> list[tuple[Change, ...]]:
        """The combinations of changes of the drafts."""
        by_choice: dict[str, list[tuple[Change, ...]]] = {}
        for change in self.sensitivities.rates:
            if change.group_size in (None, group_size):
                by_choice.setdefault(change.choice, [()]).append((change,))
        combined = [
            tuple(each for one in several for each in one) for several in product(*by_choice.values())
        ]
        # A draft head is packed only where it is one of its own.
        return [
            each
            for each in combined
            if {"draft_vocabulary", "draft_bits"} & {one.choice for one in each} != {"draft_bits"}
        ]
