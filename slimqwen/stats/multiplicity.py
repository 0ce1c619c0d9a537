"""Several tests at once: p-values that hold for all of them together."""

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values: rejecting each hypothesis whose adjusted value is at most alpha keeps false rejections rare.

    The probability of any false rejection is then at most alpha, even if the p-values depend on each other. The
    smallest of m values is multiplied by m, the next by m - 1, and none gets smaller than its predecessor (Holm, A
    simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979), 65-70).

    Returns:
        Adjusted p-values in the order of those given.
    """
    adjusted = [1.0] * len(p_values)
    lower_bound = 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        lower_bound = max(lower_bound, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = lower_bound
    return adjusted
