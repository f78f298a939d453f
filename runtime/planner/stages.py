"""Cutting a model's layers into pipeline stages of nearly equal bytes."""

from collections.abc import Sequence


def balance(costs: Sequence[int], first: int, last: int, stages: int) -> list[tuple[int, int]]:
    """Contiguous stages whose largest cost is the least possible.

    Args:
        costs: of each layer.
        first: of what stands before the layers, on stage 0.
        last: of what stands behind them, on the last stage.
        stages: at most ``len(costs)``; every stage gets a layer.

    Returns:
        ``(start, stop)`` of each stage.
    """
    costs = [*costs]
    costs[0] += first
    costs[-1] += last
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(_pack(costs, middle, stages)) <= stages:
            high = middle
        else:
            low = middle + 1
    return _pack(costs, low, stages)


def _pack(costs: Sequence[int], limit: int, stages: int) -> list[tuple[int, int]]:
    """Fill stages up to ``limit``, leaving at least one layer for each of those to come."""
    bounds: list[tuple[int, int]] = []
    start = total = 0
    for index, cost in enumerate(costs):
        to_come = stages - len(bounds) - 1
        if index > start and (total + cost > limit or len(costs) - index <= to_come):
            bounds.append((start, index))
            start, total = index, 0
        total += cost
    return [*bounds, (start, len(costs))]
