"""Several tests at once: p-values that hold for all of them together."""

from collections.abc import Sequence


def intersection_union(p_values: Sequence[float]) -> float:
    """The p-value of "at least one of these hypotheses is true": the largest.

    To reject it, every hypothesis has to be rejected, each at the whole level; no correction is due (Berger,
    Multiparameter hypothesis testing and acceptance sampling, Technometrics 24 (1982), 295-300).

    Args:
        p_values: of the hypotheses; at least one.
    """
    return max(p_values)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: rejecting those up to alpha makes any false rejection at most alpha likely.

    The smallest of m is multiplied by m, the next by m - 1, and none falls below one before it; nothing is assumed of
    their dependence (Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics
    6 (1979), 65-70).

    Args:
        p_values: of the family, in any order.

    Returns:
        Adjusted p-values in that order.
    """
    adjusted = [1.0] * len(p_values)
    least = 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = least
    return adjusted
