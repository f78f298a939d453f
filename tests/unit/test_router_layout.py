"""Index math of the router: state word, segment layout, routing table, combine order."""

import pytest
import torch

from coterie.experts.placement import ExpertPlacement
from coterie.router.alignment import PassPredictor
from coterie.router.dispatcher import routing_tables
from coterie.router.state import SeatState, StepKind
from coterie.router.transports import segment as seg
from coterie.router.transports.announcements import Announcement, FrameType
from coterie.router.transports.base import RoundShape


@pytest.mark.parametrize("kind", list(StepKind))
def test_state_word_round_trip(kind: StepKind) -> None:
    for epoch, step, layer in ((0, 0, 0), (1, 5, 30), (0x7FFFFF, 0xFFFFFF, 0xFFF)):
        state = SeatState(epoch=epoch, step=step, layer=layer, kind=kind)
        word = state.pack()
        assert 0 <= word < 1 << 63
        assert SeatState.unpack(word) == state


def test_step_counter_wraps() -> None:
    state = SeatState(epoch=2, step=1 << 24 | 7, layer=1, kind=StepKind.DECODE)
    assert SeatState.unpack(state.pack()).step == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segment_layout_does_not_overlap(dtype: torch.dtype) -> None:
    shape = RoundShape(hidden_size=5, top_k=3, dtype=dtype, max_rows=7, num_slots=3)
    layout = seg.SegmentLayout.of(shape)
    rows = 7 * 3
    sizes = [rows * 5 * dtype.itemsize, rows * 3 * 4, rows * 3 * 4, rows * 5 * 4]
    starts = [layout.hidden_states, layout.topk_weights, layout.topk_ids, layout.replies]
    assert starts[0] >= 64 * (seg.HEADERS + shape.num_slots)
    for start, size, end in zip(starts, sizes, [*starts[1:], layout.total_bytes], strict=True):
        assert start % seg.PAGE == 0
        assert start + size <= end


def test_slot_headers_have_own_lines() -> None:
    words = [seg.header_word(sequence, 2) for sequence in (1, 2, 3)]
    assert words == [16, 24, 16]


def test_announcement_round_trip() -> None:
    frame = Announcement(FrameType.ROUND, 3, 1 << 40, 17, 9, True, 1)
    assert Announcement.unpack(frame.pack(), max_rows=9) == frame


def test_routing_tables_of_uneven_experts() -> None:
    # 3 experts over seats 4 and 6: seat 4 holds 0 and 1, seat 6 holds 2.
    tables = routing_tables(ExpertPlacement.contiguous(3, (4, 6)), home_seat=4)
    assert {seat: table.tolist() for seat, table in tables.items()} == {
        4: [0, 1, -1],
        6: [-1, -1, 2],
    }


def test_replicas_go_home_first() -> None:
    placement = ExpertPlacement.contiguous(2, (0, 1), num_redundant=2)
    for home in (0, 1):
        tables = routing_tables(placement, home)
        assert set(tables[home].tolist()) == set(placement.physical_on(home))
        assert tables[1 - home].tolist() == [-1, -1]


def test_window_follows_merged_passes_only() -> None:
    predictor = PassPredictor()
    predictor.observe(0.004, merged=True)
    window = predictor.window_s()
    for _ in range(100):
        predictor.observe(0.0001, merged=False)
    assert predictor.window_s() == window == pytest.approx(0.008)
    predictor.observe(10.0, merged=True)  # a preempted pass
    assert predictor.window_s() < 0.012
