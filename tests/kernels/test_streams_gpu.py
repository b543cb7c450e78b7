"""The mirror on a CUDA stream of the caller's: everything is queued there, nothing on another stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime_service import PageFeed, PageUpdate, ReqToPage, block_table, paged_kv, req_to_token, row_digests, slot_mapping

pytestmark = pytest.mark.gpu

MAX_ROWS, WIDTH = 8, 64
SLEEP_CYCLES = 1 << 32
"""Seconds, of which the test needs a few milliseconds."""


def _update(pages: np.ndarray, end: int) -> PageUpdate:
    """All rows grow to `end` pages."""
    rows, begin = np.arange(1, MAX_ROWS + 1), end - 1
    return PageUpdate(
        rows,
        np.full(MAX_ROWS, end),
        np.full(MAX_ROWS, begin),
        np.ones(MAX_ROWS, dtype=int),
        np.full(MAX_ROWS, begin == 0),
        pages[:, begin],
    )


def _fed(feed: PageFeed, pages: np.ndarray) -> ReqToPage:
    """The mirror, fed from one end to the other, in more steps than there are staging buffers."""
    feed.reset()
    for end in range(1, WIDTH + 1):
        feed.apply(_update(pages, end))
    return feed.mirror


def _new() -> PageFeed:
    return PageFeed(ReqToPage(MAX_ROWS, WIDTH, MAX_ROWS * WIDTH, page_size=4, device="cuda"))


def _compare(mirror: ReqToPage, pages: np.ndarray) -> None:
    """Every view says what was fed."""
    rows = np.arange(1, MAX_ROWS + 1)
    order, lens = rows[::-1].copy(), np.full(MAX_ROWS, 4 * WIDTH)
    assert block_table(mirror, rows).tolist() == pages.tolist()
    assert block_table(mirror, order).tolist() == pages[::-1].tolist()
    assert paged_kv(mirror, order, lens).kv_indices.tolist() == pages[::-1].ravel().tolist()
    slots = (pages[:, :, None] * 4 + np.arange(4)).reshape(MAX_ROWS, -1)
    assert slot_mapping(mirror, rows, np.zeros(MAX_ROWS, dtype=int), lens).tolist() == slots.ravel().tolist()
    assert req_to_token(mirror, rows).tolist() == slots.tolist()
    host = ReqToPage(MAX_ROWS, WIDTH, MAX_ROWS * WIDTH, page_size=4)
    full = np.ones(MAX_ROWS, dtype=bool)
    host.apply(PageUpdate(rows, np.full(MAX_ROWS, WIDTH), 0 * rows, np.full(MAX_ROWS, WIDTH), full, pages.ravel()))
    assert row_digests(mirror, rows).tolist() == row_digests(host, rows).tolist()


def test_updates_and_views_are_queued_on_the_stream_of_the_caller() -> None:
    """While the default stream is busy, a mirror is fed and read on another one: nothing waits for the default stream."""
    pages = np.random.default_rng(3).permutation(np.arange(1, MAX_ROWS * WIDTH + 1)).reshape(MAX_ROWS, WIDTH)
    feed, side = _new(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        _compare(_fed(feed, pages), pages)  # compiles and allocates for this stream, which may wait for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    with torch.cuda.stream(side):
        _compare(_fed(feed, pages), pages)
        side.synchronize()
    assert not behind.query()
    torch.cuda.synchronize()


def test_another_stream_reads_behind_an_event() -> None:
    """A stream that waits for an event behind `apply` sees the update, however long it takes to get there."""
    pages = np.arange(1, MAX_ROWS * WIDTH + 1).reshape(MAX_ROWS, WIDTH)
    mirror, reader, writer = _fed(_new(), pages), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(SLEEP_CYCLES >> 6)
        mirror.apply(PageUpdate([3], [1], [0], [1], [True], [7]))
        applied = writer.record_event()
    with torch.cuda.stream(reader):
        reader.wait_event(applied)
        seen = block_table(mirror, [3], max_pages=2).clone()
        assert seen.tolist() == [[7, 0]]
