"""The contest of arms: computes each arm's figures from its turns, ends arms that are too slow, and finds the winner.

An arm's turn is compared with the reference arm's turn of the same round, which got the same requests.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from slimqwen.host_load import HostLoad
from slimqwen.records.record import Block, Count, NonNegative, Positive, Ratio
from slimqwen.search.tune.arms import UNDRAFTED, Arm
from slimqwen.search.tune.record import LoadFigures, TunedArm
from slimqwen.stats import intervals
from slimqwen.stats.verdict import Verdict

FEWEST_ROUNDS = 3
"""Rounds of a verdict: with two, Student's t interval is too wide to say anything."""

MOST_ROUNDS = 5
"""Rounds after which a change that is not surely faster has not paid."""

_PAYS = "pays alone"


class LoadTurn(Block):
    """The requests of one turn at one load, in the same order for each arm.

    Attributes:
        load: number of concurrent requests, or `sessions`.
        output_tokens: tokens of all responses.
        seconds: wall time of all requests.
        ttft_ms: time to first token of each request.
        e2el_ms: end-to-end latency of each request.
        drafts: number of drafts.
        accepted_tokens: number of accepted draft tokens.
    """

    load: str
    output_tokens: Positive
    seconds: NonNegative
    ttft_ms: tuple[NonNegative, ...]
    e2el_ms: tuple[NonNegative, ...]
    drafts: Count
    accepted_tokens: Count

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.output_tokens / self.seconds


class Turn(Block):
    """One start of an arm's server, and its requests.

    Attributes:
        arm: name of the arm.
        number: number of the round, from 0.
        seconds: time of the whole turn.
        failure: why the turn failed, which ends the arm; empty if it did not fail.
        loads: the requests at each load; empty if the turn failed.
        kv_tokens: tokens that the KV cache holds; None if unknown.
        near_ties: number of greedy responses that differ from the reference engine's only by a near tie.
        host: load of the host while requests were timed; None if none were.
    """

    arm: str
    number: Count
    seconds: NonNegative
    failure: str = ""
    loads: tuple[LoadTurn, ...] = ()
    kv_tokens: Count | None = None
    near_ties: Count = 0
    host: HostLoad | None = None


class Contest:
    """The turns of all arms so far, what they say about each arm, and which arms still take turns.

    Args:
        arms: all arms, the reference among them.
        refused: name of an arm that cannot be served here -> the reason; such an arm takes no turn.
        reference: the arm with which all others are compared; by default no drafts.
        separately: whether each arm gets a verdict of its own, as for flags; otherwise only the fastest is judged.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        refused: Mapping[str, str],
        reference: Arm = UNDRAFTED,
        *,
        separately: bool = False,
    ) -> None:
        """Begin a contest.

        Args:
            arms: arms to measure, including the reference.
            refused: reasons why arms cannot be tried, by the arm's name.
            reference: the arm with which the others are compared.
            separately: each arm is judged by itself, as changes that are united later; else the fastest is sought.
        """
        self.arms = list(arms)
        self.reference, self.separately = reference, separately
        self.ended = dict(refused)
        self.turns: list[Turn] = []

    @property
    def alive(self) -> list[Arm]:
        """Arms that still take turns: they were neither refused nor ended."""
        return [arm for arm in self.arms if arm.name not in self.ended]

    def add_turn(self, turn: Turn) -> None:
        """Add a turn; a failed turn ends its arm."""
        if turn.failure:
            self.ended[turn.arm] = turn.failure
            # Earlier turns of an arm whose server died or was wrong do not count.
            self.turns = [each for each in self.turns if each.arm != turn.arm]
        else:
            self.turns.append(turn)

    def end_slow_arms(self) -> None:
        """End each arm that is slower than the best at every load, by its whole interval; the fastest arm always stays.

        If arms are judged separately, end those that are slower than the reference in this sense or have a verdict.
        """
        others = [arm for arm in self.alive if arm is not self.reference]
        fastest = None if self.separately else self.find_fastest()
        ratios = {
            arm.name: {
                load: ratio for load, each in self.describe(arm).loads.items() if (ratio := each.speedup)
            }
            for arm in others
        }
        loads = {load for each in ratios.values() for load in each}
        lows = {load: [each[load].low for each in ratios.values() if load in each] for load in loads}
        best = {load: 1.0 if self.separately else max(1.0, *low) for load, low in lows.items()}
        for arm in others:
            slow, rounds, verdict = ratios[arm.name], len(self.turns_of(arm)), self.judge(arm)
            if slow and arm is not fastest and all(ratio.high < best[load] for load, ratio in slow.items()):
                self.ended[arm.name] = f"surely slower than {'it' if self.separately else 'the best'}"
            elif self.separately and verdict == Verdict.PASS:
                self.ended[arm.name] = _PAYS
            elif self.separately and (verdict == Verdict.FAIL or rounds >= MOST_ROUNDS):
                self.ended[arm.name] = f"no gain over all loads in {rounds} rounds"

    @property
    def paid(self) -> list[Arm]:
        """Separately judged arms whose whole interval is above the reference's speed, the fastest first."""
        arms = [arm for arm in self.arms if self.ended.get(arm.name) == _PAYS]
        return sorted(arms, key=lambda arm: -self.describe(arm).speed)

    def find_fastest(self) -> Arm | None:
        """The fastest arm that still takes turns, without the reference; None if no such arm had a turn."""
        measured = [arm for arm in self.alive if arm is not self.reference and self.turns_of(arm)]
        return max(measured, key=lambda arm: self.describe(arm).speed, default=None)

    @property
    def verdict(self) -> Verdict:
        """Whether the fastest arm is faster than the reference; if arms are judged separately, whether any is.

        It is inconclusive until the arms that decide have three rounds, and where their interval contains 1.
        """
        is_open = any(arm is not self.reference for arm in self.alive)
        fastest = None if self.separately else self.find_fastest()
        if fastest is None:
            return Verdict.INCONCLUSIVE if is_open else Verdict.PASS if self.paid else Verdict.FAIL
        return self.judge(fastest)

    def judge(self, arm: Arm) -> Verdict:
        """Whether an arm is faster than the reference, from the interval of its speed-up over all loads.

        Pass if the whole interval is above 1, fail if it is below 1; inconclusive otherwise and before three rounds.
        """
        speedup = self.describe(arm).speedup
        if speedup is None or len(self.turns_of(arm)) < FEWEST_ROUNDS:
            return Verdict.INCONCLUSIVE
        return Verdict.PASS if speedup.low > 1 else Verdict.FAIL if speedup.high < 1 else Verdict.INCONCLUSIVE

    @property
    def is_decided(self) -> bool:
        """Whether further turns could change neither the verdict nor the winner, so that the contest may end."""
        return self.verdict != Verdict.INCONCLUSIVE and len(self.alive) <= 2

    def describe(self, arm: Arm) -> TunedArm:
        """Compute the figures of an arm over its rounds."""
        turns = self.turns_of(arm)
        loads: dict[str, LoadFigures] = {}
        for load in dict.fromkeys(each.load for turn in turns for each in turn.loads):
            own = self._at_load(arm, load)
            drafts, accepted = (
                sum(getattr(each, name) for each in own.values()) for name in ("drafts", "accepted_tokens")
            )
            loads[load] = LoadFigures(
                tokens_per_second=sum(each.output_tokens for each in own.values())
                / sum(each.seconds for each in own.values()),
                ttft_ms=statistics.median(ttft for each in own.values() for ttft in each.ttft_ms),
                speedup=None
                if arm is self.reference
                else _compare_turns(own, self._at_load(self.reference, load)),
                acceptance_length=1 + accepted / drafts if drafts else None,
            )
        return TunedArm(
            name=arm.name,
            speculation=arm.speculation,
            changes=arm.changes,
            needs_gate=arm.rounds,
            ended=self.ended.get(arm.name, "" if turns else "it had no turn in the given time"),
            rounds=len(turns),
            speedup=None if arm is self.reference else self._compare_loads(arm),
            loads=loads,
            kv_tokens=turns[0].kv_tokens if turns else None,
            near_ties=turns[0].near_ties if turns else 0,
        )

    def describe_all(self) -> tuple[TunedArm, ...]:
        """Figures of every arm: arms that were not ended early, then the others, each group from fastest to slowest."""
        figures = map(self.describe, self.arms)
        return tuple(sorted(figures, key=lambda arm: (bool(arm.ended), -arm.speed)))

    def turns_of(self, arm: Arm) -> list[Turn]:
        """An arm's turns so far; empty for an arm that failed."""
        return [turn for turn in self.turns if turn.arm == arm.name]

    def _at_load(self, arm: Arm, load: str) -> dict[int, LoadTurn]:
        """An arm's requests at a load, by round."""
        return {turn.number: each for turn in self.turns_of(arm) for each in turn.loads if each.load == load}

    def _compare_loads(self, arm: Arm) -> Ratio | None:
        """Speed-up of an arm, the geometric mean over the loads, paired by round; None with fewer than two rounds."""
        means = [
            {
                turn.number: statistics.geometric_mean(each.tokens_per_second for each in turn.loads)
                for turn in self.turns_of(one)
            }
            for one in (arm, self.reference)
        ]
        return _ratio_by_round(*means)


def _compare_turns(own: Mapping[int, LoadTurn], reference: Mapping[int, LoadTurn]) -> Ratio | None:
    """Tokens per second of an arm at a load over those of the reference arm; None if no round has both.

    With a single round the interval is over requests, whose mean time at a constant load is inversely proportional to
    the tokens per second. It ignores that overlapping requests are dependent, so no verdict uses it.
    """
    ratio = _ratio_by_round(
        *({n: turn.tokens_per_second for n, turn in side.items()} for side in (own, reference))
    )
    rounds = [number for number in own if number in reference]
    if ratio is not None or not rounds:
        return ratio
    own_times, reference_times = (side[rounds[0]].e2el_ms for side in (own, reference))
    weights = np.ones(len(own_times))
    return intervals.paired_ratio(own_times, reference_times, weights, weights)


def _ratio_by_round(own: Mapping[int, float], reference: Mapping[int, float]) -> Ratio | None:
    rounds: Iterable[int] = [number for number in own if number in reference]
    pairs = [(own[number], reference[number]) for number in rounds]
    if len(pairs) < 2:
        return None
    first, second = zip(*pairs, strict=True)
    return intervals.ratio_of_rounds(first, second, in_turns=True)
