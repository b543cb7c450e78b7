"""SubscribeKvEvents of both services: a subscriber has exactly the cached pages, and goes on after an end."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest

from page_followers import GatewayFollower, hashes_of, tree_hashes
from scheduler_service import page_event_log, page_events

GatewayOf = Callable[..., AbstractAsyncContextManager[Any]]


def subscribe(gateway: Any, start: int = 0) -> Any:
    return gateway.stub.SubscribeKvEvents(gateway.api.common.SubscribeKvEventsRequest(start_sequence_number=start))


async def test_subscriber_follows_the_cache(gateway: GatewayOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests, evictions and resets, a state of several chunks, and streams that are cut and gone on from."""
    monkeypatch.setattr(page_events, "MAX_BATCH_BYTES", 1200)
    draw = random.Random(5)
    async with gateway(num_pages=32) as served:
        cache, log = served.engine.core.placement.cache, served.engine.page_events
        follower, call, num_chunks = GatewayFollower(), subscribe(served), 0
        await call.initial_metadata()
        for number in range(40):
            await served.run([draw.randrange(2) for _ in range(draw.randrange(1, 60))], 4)
            if draw.random() < 0.1:
                served.engine.reset_prefix_cache(force=True)
            if draw.random() < 0.2:
                call.cancel()
                if number % 2:
                    follower = GatewayFollower()
                call = subscribe(served, follower.sequence)
            while follower.sequence != log.last_sequence:
                message = await call.read()
                num_chunks += message.HasField("snapshot")
                follower.apply(message)
            assert follower.hashes == tree_hashes(cache)
        assert num_chunks > 5
        call.cancel()


async def test_block_is_one_of_the_prompt(gateway: GatewayOf) -> None:
    """Tokens, sizes and parents are a prompt's; hashes are signed, and tiers the device's."""
    async with gateway(chunk_size=32) as served:
        call = subscribe(served)
        first = await call.read()
        assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
        assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 0)
        await served.run(list(range(12)), 1)
        message = await call.read()
        (event,) = message.events
        blocks = event.stored.blocks
        assert message.sequence_number == first.sequence_number + 1
        assert [block.block_hash % 2**64 for block in blocks] == hashes_of(range(12), 4)
        assert [list(block.token_ids) for block in blocks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert {(block.block_size, block.cache_level) for block in blocks} == {(4, 0)}
        assert event.stored.tier == served.api.common.KV_CACHE_TIER_DEVICE
        assert not event.stored.HasField("parent_block_hash")
        call.cancel()


async def test_what_cannot_be_gone_on_from(gateway: GatewayOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """OUT_OF_RANGE for a number that is not kept, DATA_LOSS for a reader too far behind: smg asks for the state then."""
    async with gateway() as served:
        call = subscribe(served, 17)
        await call.initial_metadata()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE

        call = subscribe(served)
        await call.read()
        (follower,) = served.engine.page_events._followers
        follower._sequence -= 1
        served.engine.page_events._tell()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        monkeypatch.setattr(page_event_log, "MAX_FOLLOWERS", 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await subscribe(served).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
