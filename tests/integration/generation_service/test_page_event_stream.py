"""SubscribePageEvents over real loopback servers, and through a front end: followers have exactly the cached pages."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest

from page_followers import StreamFollower, hashes_of, tree_hashes
from pagemirror.v1 import generation_pb2
from scheduler_service import frontend_worker, page_event_log
from scheduler_service.client import Client, RpcFailedError
from scheduler_service.errors import LinkBrokenError
from scheduler_service.frontend_link import SchedulerLink
from scheduler_service.frontend_servicer import FrontendServicer
from scheduler_service.frontend_settings import load_frontend_settings
from scheduler_service.public_server import HealthBoard, PublicServer

StackOf = Callable[..., AbstractAsyncContextManager[Any]]
Code = grpc.StatusCode

LIMIT_S = 30.0


class WireFollower:
    """A follower that reads one stream after another, and begins anew where it is told to."""

    def __init__(self, client: Client) -> None:
        self.pages = StreamFollower()
        self.ends: list[grpc.StatusCode] = []
        self._client = client
        self.call: Any = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            request = generation_pb2.SubscribePageEventsRequest(after=self.pages.after)
            self.call = self._client.stub.SubscribePageEvents(request)
            self.pages.interrupted()
            try:
                await self.call.initial_metadata()
                async for message in self.call:
                    self.pages.apply(message)
            except grpc.aio.AioRpcError as error:
                self.ends.append(error.code())
                if error.code() in {Code.OUT_OF_RANGE, Code.DATA_LOSS}:
                    self.pages = StreamFollower()
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                self.ends.append(Code.CANCELLED)


@contextlib.asynccontextmanager
async def following(client: Client) -> AsyncIterator[WireFollower]:
    """A follower that runs."""
    follower = WireFollower(client)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def front_of(scheduler: str) -> AsyncIterator[Client]:
    """A front end's worker in this process, and a client of it."""
    given = load_frontend_settings(scheduler=scheduler, listen="127.0.0.1:0", grace=1.0)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(frontend_worker.serve(given, ready.set_result))
    try:
        async with asyncio.timeout(LIMIT_S):
            async with Client(await ready) as client:
                yield client
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_random_traffic_over_the_wire(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests, retractions, evictions, resets, lost sessions, cut streams, a short history: both followers keep up."""
    monkeypatch.setattr(page_event_log, "MAX_HISTORY_BYTES", 6000)
    draw = random.Random(3)
    async with stack_of(max_rows=4) as stack, front_of(stack.client.target) as front:
        cache, log = stack.engine.core.placement.cache, stack.engine.page_events
        async with following(stack.client) as direct, following(front) as through:
            both = [direct, through]

            def agree() -> bool:
                expected = tree_hashes(cache)
                return all(follower.pages.hashes == expected for follower in both)

            for _ in range(25):
                runs, steps = [], stack.engine.num_steps
                for _ in range(4):
                    prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 40))]
                    space = draw.choice(["", "tenant"])
                    runs.append(asyncio.create_task(stack.run(prompt, draw.randrange(1, 20), cache_namespace=space)))
                await stack.until(lambda steps=steps: stack.engine.num_steps > steps)
                act = draw.randrange(5)
                if act == 0:
                    await stack.client.reset_prefix_cache(force=True)
                elif act == 1:
                    stack.engine.link.broken = LinkBrokenError("by the test")
                    stack.engine._wake.set()
                elif act == 2:
                    for follower in both:
                        follower.call.cancel()
                elif act == 3:
                    for request_id in list(stack.engine.core.requests)[:2]:
                        with contextlib.suppress(RpcFailedError):
                            await stack.client.retract(request_id)
                await asyncio.gather(*runs)
                await stack.until(agree)
            assert direct.pages.sequence == through.pages.sequence == log.last_sequence
            assert min(follower.ends.count(Code.CANCELLED) for follower in both) > 1


async def test_messages_say_what_the_definition_says(stack_of: StackOf) -> None:
    """Initial metadata comes before anything happens, the state is one message here, and a reset clears what was stored."""
    async with stack_of(chunk_size=32) as stack:
        call = stack.client.stub.SubscribePageEvents(generation_pb2.SubscribePageEventsRequest())
        await call.initial_metadata()
        first = await call.read()
        state = generation_pb2.PageStatePart(index=0, count=1, num_pages=0, sequence=first.sequence)
        assert first.state == state
        assert [event.WhichOneof("kind") for event in first.events] == ["cleared"]
        again = stack.client.stub.SubscribePageEvents(generation_pb2.SubscribePageEventsRequest(after=first.sequence))
        await again.initial_metadata()

        await stack.run(list(range(12)), 1, cache_namespace="tenant")
        stored = await call.read()
        assert (stored.sequence, stored.HasField("state")) == (first.sequence + 1, False)
        pages = generation_pb2.PagesStored(
            hashes=struct.pack("<3Q", *hashes_of(range(12), 4, "tenant")),
            tokens=struct.pack("<12i", *range(12)),
            page_size=4,
            cache_namespace="tenant",
        )
        assert [event.stored for event in stored.events] == [pages]
        await stack.client.reset_prefix_cache()
        cleared = await call.read()
        assert (cleared.sequence, [event.WhichOneof("kind") for event in cleared.events]) == (stored.sequence + 1, ["cleared"])
        assert [await again.read(), await again.read()] == [stored, cleared]
        call.cancel()
        again.cancel()


async def test_statuses(stack_of: StackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not kept: OUT_OF_RANGE; not read in time: DATA_LOSS; too many readers: RESOURCE_EXHAUSTED; the end: UNAVAILABLE."""
    async with stack_of(grace=0.0) as stack:

        async def status(after: int | None = None) -> grpc.StatusCode:
            return (await stack.refused(anext(stack.client.page_events(after)))).code

        batches = stack.client.page_events()
        first = await anext(batches)
        assert await status(first.sequence + 1) is Code.OUT_OF_RANGE
        assert await status(5) is Code.OUT_OF_RANGE
        monkeypatch.setattr(page_event_log, "MAX_FOLLOWERS", 1)
        assert await status() is Code.RESOURCE_EXHAUSTED
        (follower,) = stack.engine.page_events._followers
        follower._sequence -= 1
        stack.engine.page_events._tell()
        assert (await stack.refused(anext(batches))).code is Code.DATA_LOSS
        await stack.until(lambda: not stack.engine.page_events._followers)
        batches = stack.client.page_events()
        await anext(batches)
        await stack.engine.drain(0.0)
        assert (await stack.refused(anext(batches))).code is Code.UNAVAILABLE
        assert await status() is Code.UNAVAILABLE


async def test_servers_that_do_not_tell(stack_of: StackOf) -> None:
    """With --no-page-events calls end with PERMISSION_DENIED, and the tree takes no notes."""
    async with stack_of(page_events=False) as stack:
        error = await stack.refused(anext(stack.client.page_events()))
        assert error.code is Code.PERMISSION_DENIED
        assert "--page-events" in error.details
        assert not stack.engine.page_events.is_recording


async def test_client_that_closes_its_connection(stack_of: StackOf) -> None:
    """Who reads over a connection that is closed meanwhile is told so, and is not taken for cancelled."""
    async with stack_of() as stack:
        client = Client(stack.client.target)
        batches = client.page_events()
        await anext(batches)
        reading = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        await client.close()
        assert (await stack.refused(reading)).code is Code.UNAVAILABLE


async def test_front_end_that_loses_its_scheduler_ends_the_stream(stack_of: StackOf) -> None:
    """Readers behind a front end get UNAVAILABLE when the scheduler's session with it is gone."""
    async with stack_of() as stack, front_of(stack.client.target) as front:
        batches = front.page_events()
        await anext(batches)
        await stack.engine.drain(0.0)
        assert (await stack.refused(anext(batches))).code is Code.UNAVAILABLE


async def test_front_end_that_drains_ends_its_streams(stack_of: StackOf) -> None:
    """They go on while a request runs, and end with UNAVAILABLE when the last one is over; the scheduler notices."""
    async with stack_of() as stack:
        settings = load_frontend_settings(scheduler=stack.client.target, listen="127.0.0.1:0")
        link = SchedulerLink(settings.scheduler, settings.security(), max_unread=1000)
        servicer = FrontendServicer(link)
        front = PublicServer(settings, stack.engine.metrics, HealthBoard())
        front.add_servicer(servicer)
        running = asyncio.create_task(link.run())
        await link.tried.wait()
        await front.server.start()
        async with Client(front.address) as client:
            batches, pieces = client.page_events(), client.generate([1, 2, 3, 4, 5], max_tokens=60)
            await anext(batches)
            await stack.first_token(pieces)
            servicer.draining = True
            await stack.client.reset_prefix_cache(force=True)
            assert (await anext(batches)).events
            await stack.rest_of(pieces)
            with pytest.raises(RpcFailedError) as caught:
                _ = [batch async for batch in batches]
            assert caught.value.code is Code.UNAVAILABLE
        await stack.until(lambda: not stack.engine.page_events._followers)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await front.server.stop(0)
