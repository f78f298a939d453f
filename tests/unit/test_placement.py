"""Expert placement: everything is somewhere, nothing twice on a seat, home prefers itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.experts.placement import ExpertPlacement


def test_contiguous_runs() -> None:
    """7 experts on seats 2 and 5: | 0 1 2 3 | 4 5 6 |."""
    placement = ExpertPlacement.contiguous(7, [2, 5])
    assert placement.physical_on(2) == (0, 1, 2, 3)
    assert placement.physical_on(5) == (4, 5, 6)
    assert placement.physical_on(3) == ()
    assert placement.seats == (2, 5)
    assert placement.num_physical == 7
    assert placement.logical_to_physical(5).tolist() == list(range(7))


def test_replicas_and_home() -> None:
    """3 experts on seats 0, 1, 2 with two copies more: 0 -> also on 1, 1 -> also on 0."""
    placement = ExpertPlacement.contiguous(3, [0, 1, 2], num_redundant=2)
    assert placement.replicas(0) == (0, 3)
    assert placement.replicas(1) == (1, 4)
    assert placement.replicas(2) == (2,)
    for seat in placement.seats:
        chosen = placement.logical_to_physical(seat)
        for physical in placement.physical_on(seat):
            assert chosen[placement.physical_to_logical[physical]] == physical


@given(
    num_logical=st.integers(1, 40),
    seats=st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True),
    num_redundant=st.integers(0, 40),
    home=st.integers(0, 30),
)
def test_any_placement_is_whole(
    num_logical: int, seats: list[int], num_redundant: int, home: int
) -> None:
    if len(seats) > num_logical or num_redundant > num_logical * (len(seats) - 1):
        with pytest.raises(ConfigError):
            ExpertPlacement.contiguous(num_logical, seats, num_redundant)
        return
    placement = ExpertPlacement.contiguous(num_logical, seats, num_redundant)
    assert placement.num_physical == num_logical + num_redundant
    assert placement.seats == tuple(sorted(seats))
    sizes = [len(placement.physical_on(seat)) for seat in seats]
    assert sum(sizes) == placement.num_physical
    if num_redundant == 0:
        assert max(sizes) - min(sizes) <= 1
    chosen = placement.logical_to_physical(home)
    assert [placement.physical_to_logical[p] for p in chosen] == list(range(num_logical))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="no seat"):
        ExpertPlacement(num_logical=2, physical_to_logical=(0,), physical_to_seat=(0,))
    with pytest.raises(ConfigError, match="two replicas"):
        ExpertPlacement(num_logical=1, physical_to_logical=(0, 0), physical_to_seat=(1, 1))
    with pytest.raises(ConfigError, match="use 1 to 2"):
        ExpertPlacement.contiguous(2, [0, 1, 2])
