"""The log of page events: who reads what, and from where on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from page_followers import StreamFollower, tree_hashes
from scheduler_service import page_event_log
from scheduler_service.core.radix_cache import RadixCache
from scheduler_service.errors import DrainingError, EventsGoneError, EventsMissedError, TooManyFollowersError
from scheduler_service.page_event_log import PageEventLog, PageFollower
from scheduler_service.page_event_messages import batch_message
from scheduler_service.page_events import PagesCleared

LIMIT_S = 10.0


class Tree:
    """A cache of pages of two tokens, with a log."""

    def __init__(self, now: float = 1000.0) -> None:
        self.cache = RadixCache(2)
        self.log = PageEventLog(now=lambda: now)
        self.log.attach(self.cache, 1000, 2)
        self.next_page = 1

    def store(self, *tokens: int) -> None:
        """One sequence of pages."""
        pages = np.arange(self.next_page, self.next_page + len(tokens) // 2, dtype=np.int32)
        self.next_page += len(pages)
        self.cache.insert_prefix(self.cache.root(), np.array(tokens, dtype=np.int32), pages)
        self.log.drain()


@pytest.fixture
def tree() -> Tree:
    return Tree()


@pytest.fixture
async def one_reader_less(tree: Tree) -> Iterator[PageFollower]:
    """A reader that has left."""
    reader = tree.log.follow()
    await take_all(reader)
    reader.close()
    return reader


async def take_all(reader: PageFollower, follower: StreamFollower | None = None) -> StreamFollower:
    """Read what there is."""
    follower = StreamFollower() if follower is None else follower
    async with asyncio.timeout(LIMIT_S):
        while not reader.is_idle:
            follower.apply(batch_message(await reader.take()))
    return follower


async def test_state_comes_first_and_then_what_happens(tree: Tree) -> None:
    """Who comes late begins with a clearing and everything stored; numbers go on without a gap."""
    early = tree.log.follow()
    tree.store(1, 2, 3, 4)
    late = tree.log.follow()
    tree.store(1, 2, 5, 6)
    followers = [await take_all(early), await take_all(late)]
    assert [follower.hashes for follower in followers] == [tree_hashes(tree.cache)] * 2
    assert [(follower.num_cleared, len(follower)) for follower in followers] == [(1, 3)] * 2
    assert followers[0].sequence == followers[1].sequence == tree.log.last_sequence


async def test_reader_waits_for_what_happens(tree: Tree) -> None:
    """A reader that has everything sleeps until there is more."""
    reader = tree.log.follow()
    follower = await take_all(reader)
    waiting = asyncio.create_task(reader.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    tree.store(1, 2)
    async with asyncio.timeout(LIMIT_S):
        follower.apply(batch_message(await waiting))
    assert len(follower) == 1


async def test_reader_goes_on_where_it_was(tree: Tree, one_reader_less: PageFollower) -> None:
    """What happened while it was away is told, and nothing else."""
    after = tree.log.last_sequence
    tree.store(1, 2)
    reader = tree.log.follow(after)
    batch = await reader.take()
    assert (batch.sequence, batch.snapshot) == (after + 1, None)
    assert reader.is_idle


@pytest.mark.parametrize("distance", [-2, 1, 10**6])
async def test_numbers_that_are_not_kept_are_refused(tree: Tree, one_reader_less: PageFollower, distance: int) -> None:
    """Neither what was before the first batch that is kept nor what has not been yet can be gone on from."""
    with pytest.raises(EventsGoneError):
        tree.log.follow(tree.log.last_sequence + distance)


async def test_numbers_of_another_process_are_refused() -> None:
    """A scheduler that was started later has other numbers, however little either of them has seen."""
    old, new = Tree(1000.0), Tree(1000.5)
    for tree in (old, new):
        tree.log.follow()
    old.store(1, 2)
    for token in range(5):
        new.store(token, token)
    with pytest.raises(EventsGoneError):
        new.log.follow(old.log.last_sequence)


async def test_slow_reader_is_told_that_it_missed_some(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is bounded: a reader whose place is gone gets an error, others do not notice."""
    monkeypatch.setattr(page_event_log, "MAX_HISTORY_BYTES", 2000)
    slow, quick = tree.log.follow(), tree.log.follow()
    follower = await take_all(quick)
    for token in range(20):
        tree.store(token, token)
        await take_all(quick, follower)
    assert follower.hashes == tree_hashes(tree.cache)
    assert (await slow.take()).events[0] == PagesCleared()
    with pytest.raises(EventsMissedError):
        await slow.take()
    assert sum(batch.num_bytes for batch in tree.log.since(0)) <= 2000


async def test_nobody_reads_nothing_is_noted(
    tree: Tree, one_reader_less: PageFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some time after the last reader has gone the tree takes no notes any more; who comes back then begins anew."""
    assert tree.log.is_recording
    monkeypatch.setattr(page_event_log, "LINGER_S", 0.0)
    after = tree.log.last_sequence
    reader = tree.log.follow(after)
    reader.close()
    async with asyncio.timeout(LIMIT_S):
        while tree.log.is_recording:
            await asyncio.sleep(0)
    assert tree.cache.records is None
    tree.store(1, 2)
    with pytest.raises(EventsGoneError):
        tree.log.follow(after)
    assert (await take_all(tree.log.follow())).hashes == tree_hashes(tree.cache)


async def test_so_many_readers_and_no_more(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is one of readers at a time."""
    monkeypatch.setattr(page_event_log, "MAX_FOLLOWERS", 2)
    first, second = tree.log.follow(), tree.log.follow()
    with pytest.raises(TooManyFollowersError):
        tree.log.follow()
    first.close()
    first.close()
    third = tree.log.follow()
    assert {second, third} == set(tree.log._followers)


async def test_end_comes_after_what_was_not_read(tree: Tree) -> None:
    """Readers get the rest and then the reason; nobody can come any more."""
    reader = tree.log.follow()
    follower = await take_all(reader)
    sleeping = tree.log.follow(tree.log.last_sequence)
    task = asyncio.create_task(sleeping.take())
    await asyncio.sleep(0)
    tree.store(1, 2)
    tree.log.end(DrainingError())
    assert len(await take_all(reader, follower)) == 1
    await task
    for late in (reader, sleeping):
        with pytest.raises(DrainingError):
            await late.take()
    with pytest.raises(DrainingError):
        tree.log.follow()


async def test_iteration_closes_its_reader(tree: Tree) -> None:
    """`batches` reads on; when it is closed the reader has left."""
    batches = tree.log.follow().batches()
    batch = await anext(batches)
    assert batch.snapshot is not None
    assert batch.stamp == tree.log.last_sequence
    await batches.aclose()  # type: ignore[attr-defined]
    assert not tree.log._followers
