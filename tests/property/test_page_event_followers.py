"""Random traffic through the core, and followers of the page events: after each call each of them has exactly the cached pages.

A follower that reads every batch, one that comes anew and takes the state, one that goes on where it was: all in the public
formats. Batches are kept small, so that large events are cut, and few, so that slow followers miss some.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from page_followers import GatewayFollower, StreamFollower, tree_hashes
from scheduler_driver import DEFAULTS, Driver
from scheduler_service import page_event_log, page_events
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import RequestError
from scheduler_service.errors import EventsGoneError, EventsMissedError
from scheduler_service.gateway.kv_events import kv_event_batch
from scheduler_service.page_event_log import PageEventLog
from scheduler_service.page_event_messages import batch_message, batch_of
from scheduler_service.page_events import PageBatch


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch holds a few pages, the list a few batches."""
    monkeypatch.setattr(page_events, "MAX_BATCH_BYTES", 800)
    monkeypatch.setattr(page_event_log, "MAX_HISTORY_BYTES", 8_000)
    monkeypatch.setattr(page_event_log, "LINGER_S", 1e9)


class Followers:
    """A log of a scheduler's pages, and one follower of each kind."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.cache = driver.scheduler.placement.cache
        self.log = PageEventLog(now=lambda: 5.0)
        self.log.attach(self.cache, driver.config.num_pages, driver.config.page_size)
        self.reader = self.log.follow()
        self.stream, self.gateway = StreamFollower(), GatewayFollower()
        self.slow = StreamFollower()
        self.slow_reader = self.log.follow()
        self.num_missed = self.num_gone = self.num_resumed = 0

    def look(self) -> None:
        """After a change of the core: everybody who reads all of it has exactly what the tree holds."""
        self.log.drain()
        for batch in pending(self.reader):
            self.stream.apply(batch_message(batch))
            self.stream_once_more(batch)
            self.gateway.apply(kv_event_batch(batch))
        expected = tree_hashes(self.cache)
        assert self.stream.hashes == expected
        assert self.gateway.hashes == expected
        assert len(expected) == self.cache.num_pages

    @staticmethod
    def stream_once_more(batch: PageBatch) -> None:
        """What is received is what was sent."""
        message = batch_message(batch)
        assert batch_message(batch_of(message)) == message

    def read_slowly(self, most: int) -> None:
        """The slow one reads a few batches, and begins anew where it has missed some."""
        try:
            for _, batch in zip(range(most), pending(self.slow_reader), strict=False):
                self.slow.apply(batch_message(batch))
        except EventsMissedError:
            self.num_missed += 1
            self.slow_reader.close()
            self.slow_reader, self.slow = self.log.follow(), StreamFollower()
            return
        if self.slow_reader.is_idle:
            assert self.slow.hashes == tree_hashes(self.cache)

    def reconnect(self) -> None:
        """The slow one's connection is lost, wherever it was; it goes on where that can be done."""
        self.slow_reader.close()
        try:
            self.slow_reader = self.log.follow(self.slow.after or None)
            self.num_resumed += bool(self.slow.after)
            self.slow.interrupted()
        except EventsGoneError:
            self.num_gone += 1
            self.slow_reader, self.slow = self.log.follow(), StreamFollower()


def pending(reader: Any) -> Any:
    """What the reader need not wait for."""
    while not reader.is_idle:
        waiting = reader.take()
        try:
            waiting.send(None)
        except StopIteration as done:
            yield done.value


def play(driver: Driver, followers: Followers, draw: random.Random, steps: int) -> None:
    """Requests with few prefixes and few namespaces, retractions, aborts, resets, lost runtimes."""
    scheduler = driver.scheduler
    for number in range(steps):
        act = draw.random()
        names = list(scheduler.requests)
        if act < 0.25 and len(names) < 6:
            prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
            space = draw.choice(["", "", "tenant", "other"])
            with contextlib.suppress(RequestError):
                driver.submit(f"{number}", prompt, draw.randrange(1, 8), cache_namespace=space)
        elif act < 0.30 and scheduler.rows():
            driver.retract(draw.choice(list(scheduler.rows().values()))[0].request_id)
        elif act < 0.35 and names:
            driver.abort(draw.choice(names))
        elif act < 0.365:
            scheduler.reset_prefix_cache(force=True)
            driver.collect()
        elif act < 0.38:
            driver.restart()
        elif act < 0.42:
            followers.reconnect()
        else:
            driver.step()
        followers.look()
        if draw.random() < 0.06:
            followers.read_slowly(draw.randrange(1, 20))


def config_of(**options: Any) -> SchedulerConfig:
    return SchedulerConfig(**DEFAULTS | options)


@given(
    seed=st.integers(0, 2**32),
    page_size=st.integers(1, 4),
    num_pages=st.integers(4, 24),
    overlap_depth=st.integers(0, 2),
)
@settings(max_examples=25, deadline=None)
def test_followers_have_exactly_the_cached_pages(seed: int, page_size: int, num_pages: int, overlap_depth: int) -> None:
    """Any pool, any traffic: each follower's set is the tree's after every call."""
    driver = Driver(config_of(page_size=page_size, num_pages=num_pages, overlap_depth=overlap_depth, max_rows=4))
    play(driver, Followers(driver), random.Random(seed), 80)


def test_thousands_of_steps() -> None:
    """A long run in a small pool: everything that followers can meet happens, and often."""
    driver = Driver(config_of(page_size=2, num_pages=24, max_rows=4, overlap_depth=1))
    followers = Followers(driver)
    play(driver, followers, random.Random(7), 2400)
    assert followers.stream.num_cleared > 50
    assert followers.stream.num_events > 1200
    assert min(followers.num_missed, followers.num_gone, followers.num_resumed) > 5
    assert {namespace for _, _, namespace in followers.stream.pages.values()} <= {"", "tenant", "other"}
