"""What the runtime remembers of a lease, from its first op to its release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from runtime_service.ops import RefusalCode

NewSession = Callable[..., Any]

PAGE_SIZE = 4


def test_first_op_of_a_lease_may_start_anywhere_and_later_ones_not(new_session: NewSession, ops: Any) -> None:
    """A cached prefix was computed by others, so a lease begins at any num_computed; from then on steps are contiguous."""
    session = new_session()
    session.take(ops.make(1, ops.first_chunk(pages=(1, 2, 3), computed=8, ids=(1,))))
    refusal = session.refused(ops.make(2, ops.decode(computed=8, row_len=3, begin=3)))
    assert refusal.code is RefusalCode.NOT_CONTIGUOUS


def test_refreshed_rows_of_a_lease_must_be_contiguous_too(begun_session: NewSession, ops: Any) -> None:
    """A refresh rewrites pages; it does not excuse a lost step."""
    session = begun_session()
    refusal = session.refused(ops.make(2, ops.Row(1, (1, 2), 2, begin=2, computed=6)))
    assert refusal.code is RefusalCode.NOT_CONTIGUOUS


def test_refresh_within_a_lease_does_not_compare_begin(begun_session: NewSession, ops: Any) -> None:
    """full_refresh overrides begin, so a row that shrank or flipped below begin is taken as it is sent."""
    session = begun_session()
    session.take(ops.make(2, ops.Row(1, (7, 8), 2, begin=2, computed=5)))
    session.take(ops.make(3, ops.decode(computed=6, row_len=3, pages=(1,))))


def test_released_row_needs_a_higher_generation(begun_session: NewSession, ops: Any) -> None:
    """A release ends the lease: its generation is refused from then on, the next one is a new lease."""
    session = begun_session()
    session.take(ops.make(2, released=(1,)))
    assert session.request_ids == {}
    assert session.lease_rows().tolist() == []
    other = begun_session()
    other.take(ops.make(2, released=(1,)))
    other.take(ops.make(3, ops.first_chunk(generation=2)))
    assert other.generations(np.array([1, 2])).tolist() == [2, 0]
    refusal = session.refused(ops.make(3, ops.first_chunk()))
    assert refusal.code is RefusalCode.STALE_GENERATION
    assert "generation 1 was released" in refusal.detail


def test_row_may_be_released_and_leased_again_in_one_op(begun_session: NewSession, ops: Any) -> None:
    """Releases come before everything else of an op; the same generation does not survive one."""
    session = begun_session()
    session.take(ops.make(2, ops.first_chunk(pages=(9,), ids=(1,), generation=2), released=(1, 1, 3)))
    assert session.request_ids == {1: "request-1"}
    refusal = session.refused(ops.make(3, ops.decode(computed=1, row_len=1, begin=1, generation=2), released=(1,)))
    assert refusal.code is RefusalCode.STALE_GENERATION


def test_higher_generation_ends_a_lease_without_a_release(begun_session: NewSession, ops: Any) -> None:
    """A new lease forgets what the old one sampled, computed and held."""
    session = begun_session()
    session.take(ops.make(2, ops.first_chunk(pages=(2,), ids=(1,), sample=False, generation=7)))
    refusal = session.refused(ops.make(3, ops.decode(computed=1, row_len=1, begin=1, generation=7)))
    assert refusal.code is RefusalCode.NEVER_SAMPLED


def test_decode_needs_a_sampled_lease(new_session: NewSession, ops: Any) -> None:
    """A chunk without sampling gives no last token; the chunk that ends the prompt does."""
    session = new_session()
    session.take(ops.make(1, ops.first_chunk(sample=False)))
    session.take(ops.make(2, ops.Row(1, (1, 2), 2, begin=2, computed=5, ids=(3,), sample=True)))
    session.take(ops.make(3, ops.decode(computed=6)))


def test_tail_page_that_the_row_already_holds_is_refused(begun_session: NewSession, ops: Any) -> None:
    """The aliased row of a tail-only mirror, [1, 2] + [1], is a page twice in a row and refused without reading the mirror."""
    session = begun_session()
    refusal = session.refused(ops.make(2, ops.decode(computed=5, row_len=3, pages=(1,))))
    assert refusal.code is RefusalCode.PAGE_REPEATED
    assert "page 1 is already in the row" in refusal.detail


def test_pages_that_a_refresh_took_away_may_come_back(begun_session: NewSession, ops: Any) -> None:
    """After the row was rewritten to [3, 2] its former page 1 is an ordinary page again."""
    session = begun_session()
    session.take(ops.make(2, ops.Row(1, (3, 2), 2, begin=2, computed=5)))
    session.take(ops.make(3, ops.decode(computed=6, row_len=3, pages=(1,))))
    refusal = session.refused(ops.make(4, ops.decode(computed=7, row_len=4, begin=3, pages=(2,))))
    assert refusal.code is RefusalCode.PAGE_REPEATED


def test_clamped_row_goes_on_without_a_second_refusal(new_session: NewSession, ops: Any) -> None:
    """A row wider than a 513-page mirror goes on for 1,000 tokens: begin is compared with the stated length."""
    width = 513
    session = new_session(max_pages_per_row=width, num_pages=1000)
    pages = tuple(range(1, width + 1))
    tokens = width * PAGE_SIZE
    session.take(ops.make(1, ops.first_chunk(pages=pages, computed=tokens - 1, ids=(1,))))
    row_len, computed = width, tokens
    for step in range(2, 1002):
        needed = computed // PAGE_SIZE + 1
        new = tuple(range(row_len + 1, needed + 1))
        session.take(ops.make(step, ops.decode(computed=computed, row_len=needed, begin=row_len, pages=new)))
        row_len, computed = needed, computed + 1
    assert row_len == width + 250
    refusal = session.refused(ops.make(1002, ops.decode(computed=computed, row_len=width, begin=width)))
    assert refusal.code is RefusalCode.GAP


def test_row_too_short_is_not_refused_when_it_is_clamped(new_session: NewSession, ops: Any) -> None:
    """Past the mirror's width tokens are not computed anyway; within it every token needs a page."""
    width = 3
    for row_len, accepted in ((width, False), (width + 1, True)):
        session = new_session(max_pages_per_row=width)
        op = ops.make(1, ops.first_chunk(pages=tuple(range(1, row_len + 1)), computed=40, ids=(1,)))
        if accepted:
            session.take(op)
        else:
            assert session.refused(op).code is RefusalCode.ROW_TOO_SHORT


def test_lenient_session_lets_stale_updates_pass_and_nothing_else(new_session: NewSession, ops: Any) -> None:
    """`tail_only` needs gaps, generations and aliased tails to pass; impossible ids are refused all the same."""
    session = new_session(lenient=True)
    session.take(ops.make(1, ops.first_chunk(pages=(1, 2))))
    session.take(ops.make(2, released=(1,)))
    resumed = ops.Row(1, (1,), row_len=3, begin=2, full=False, computed=4, ids=(8, 9), generation=2, start="request-1")
    session.take(ops.make(3, resumed))
    session.take(ops.make(4, ops.decode(computed=9, row_len=3, begin=3, generation=1)))
    assert session.refused(ops.make(5, ops.decode(row_len=4, begin=3, pages=(65,)))).code is RefusalCode.PAGE_OUT_OF_RANGE
