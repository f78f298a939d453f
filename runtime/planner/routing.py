"""How many ranks a token's experts lie on."""

import math

from coterie.runtime.planner.shape import Experts


def distinct_destinations(experts: Experts, ranks: int) -> float:
    """Expected number of the ``ranks`` that have one of a token's top-k, experts used evenly.

    A token goes once to each of them, however many of its experts they have.
    """
    count = experts.num_experts
    elsewhere = count - count / ranks
    missed = math.prod(max(0.0, elsewhere - i) / (count - i) for i in range(experts.top_k))
    return ranks * (1 - missed)


def touched_share(experts: Experts, tokens: int) -> float:
    """Expected share of the experts that ``tokens`` tokens use, experts used evenly."""
    return 1 - (1 - experts.density) ** tokens
