"""Several tests at once: p-values that hold for all of them together."""

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: rejecting those up to alpha bounds the probability of any false rejection by alpha.

    The smallest of m is multiplied by m, the next by m - 1, and none falls below its predecessor; the p-values may
    depend on each other (Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of
    Statistics 6 (1979), 65-70).

    Returns:
        Adjusted p-values in the order of those given.
    """
    adjusted = [1.0] * len(p_values)
    lower_bound = 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        lower_bound = max(lower_bound, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = lower_bound
    return adjusted
