"""Several tests at once, or tries one after the other: p-values and levels that hold for all of them together."""

from collections.abc import Sequence

from slimqwen.stats.sequential import ALPHA, FIRST_LOOK_SHARE


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


def confidence_of_try(number: int) -> float:
    """Confidence level for the interval of one try, so that at most 5 % of whole series of tries contain a miss.

    Whoever measures again until the interval lies where it should is wrong more often than one interval says. So the
    tries share the error, however many there will be: the first has `FIRST_LOOK_SHARE` of it, because most figures are
    measured once, and try k has 1 / ((k - 1) k) of the rest, which over all later tries sums to 1. By the union bound
    no independence is assumed.

    Args:
        number: number of the try, from 1.
    """
    share = FIRST_LOOK_SHARE if number == 1 else (1 - FIRST_LOOK_SHARE) / ((number - 1) * number)
    return 1 - 2 * ALPHA * share
