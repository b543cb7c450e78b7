"""Page events over ZeroMQ, over real sockets: a subscriber of the public format has exactly the cached pages."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio

from page_followers import BusFollower, hashes_of, tree_hashes
from runtime_service import app as runtime_app
from runtime_service.execution import ExecutionThread
from runtime_service.servicer import RuntimeServicer
from runtime_service.settings import RuntimeSettings
from scheduler_driver import DEFAULTS, Driver
from scheduler_service import app, page_event_log, page_events
from scheduler_service.channels import SERVER_OPTIONS, bind
from scheduler_service.client import Client
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import RequestError
from scheduler_service.errors import DrainingError, StartError
from scheduler_service.page_event_log import PageEventLog
from scheduler_service.settings import SettingsError, load_settings
from scheduler_service.zmq_events import ZmqPublisher

LIMIT_S = 30.0
TOPIC = "kv@10.0.0.7:50051@model"
END = b"\xff" * 8


class Subscriber:
    """SUB and DEALER sockets, and what they have told."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, replay_endpoint: str) -> None:
        self.pages = BusFollower()
        self.num_replays = 0
        self.sub, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.sub.connect(endpoint)
        self.replay.connect(replay_endpoint)

    async def catch_up(self) -> None:
        """Ask for everything from the next number on."""
        self.num_replays += 1
        first = self.pages.sequence + 1 if self.pages.sequence else 0
        for number, payload in await self.ask(first.to_bytes(8, "big")):
            self.pages.apply(number, payload)

    async def ask(self, *frames: bytes) -> list[tuple[int, Any]]:
        """The answer to a replay request, without the end."""
        await self.replay.send_multipart([b"", *frames])
        found = []
        while True:
            async with asyncio.timeout(LIMIT_S):
                empty, number, payload = await self.replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)))

    async def read(self, last: int) -> None:
        """Read what is published up to batch `last`, asking for what was missed."""
        while self.pages.sequence < last:
            if not await self.sub.poll(0 if self.pages.sequence == 0 else 50):
                await self.catch_up()
                continue
            topic, number, payload = await self.sub.recv_multipart()
            assert topic.decode() == TOPIC
            sequence = int.from_bytes(number, "big")
            if sequence > self.pages.sequence + 1:
                await self.catch_up()
            elif sequence == self.pages.sequence + 1:
                self.pages.apply(sequence, msgpack.unpackb(payload))


@contextlib.asynccontextmanager
async def publishing(log: PageEventLog, endpoint: str, replay: str) -> AsyncIterator[Subscriber]:
    """A publisher of this log, and a subscriber."""
    publisher = ZmqPublisher(endpoint, replay)
    publisher.start(log, TOPIC)
    context = zmq.asyncio.Context()
    try:
        assert publisher.replay_endpoint is not None
        yield Subscriber(context, publisher.endpoint, publisher.replay_endpoint)
    finally:
        context.destroy(linger=0)
        await publisher.close()


@pytest.fixture
def driver() -> Driver:
    """A scheduler with few pages of two tokens."""
    return Driver(SchedulerConfig(**DEFAULTS | {"page_size": 2, "num_pages": 24, "max_rows": 4, "overlap_depth": 1}))


@pytest.fixture
def log(driver: Driver) -> Iterator[PageEventLog]:
    """Its page events."""
    log = PageEventLog(now=lambda: 5.0)
    log.attach(driver.scheduler.placement.cache, 24, 2)
    yield log
    log.end(DrainingError())


async def test_random_traffic(driver: Driver, log: PageEventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evictions, retractions, resets, lost runtimes, pauses longer than what is kept: the subscriber keeps up."""
    monkeypatch.setattr(page_events, "MAX_BATCH_BYTES", 800)
    monkeypatch.setattr(page_event_log, "MAX_HISTORY_BYTES", 8000)
    draw = random.Random(11)
    scheduler = driver.scheduler
    async with publishing(log, f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay") as subscriber:
        for number in range(800):
            act = draw.random()
            if act < 0.3 and len(scheduler.requests) < 6:
                prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
                with contextlib.suppress(RequestError):
                    driver.submit(f"{number}", prompt, draw.randrange(1, 8), cache_namespace=draw.choice(["", "tenant"]))
            elif act < 0.35 and scheduler.rows():
                driver.retract(draw.choice(list(scheduler.rows().values()))[0].request_id)
            elif act < 0.37:
                scheduler.reset_prefix_cache(force=True)
            elif act < 0.39:
                driver.restart()
            else:
                driver.step()
            log.drain()
            if draw.random() < 0.1:
                await subscriber.read(log.last_sequence)
                assert subscriber.pages.hashes == tree_hashes(scheduler.placement.cache)
        assert subscriber.pages.num_cleared > 15
        assert subscriber.num_replays > 3


async def test_messages_are_of_the_public_form(driver: Driver, log: PageEventLog) -> None:
    """Topic, number and payload; maps with a type; the salt of a namespace with its first page; -1 ends a replay."""
    async with publishing(log, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as subscriber:
        cache = driver.scheduler.placement.cache
        await subscriber.catch_up()
        cache.insert_prefix(cache.root("tenant"), np.arange(4, dtype=np.int32), np.array([1, 2], dtype=np.int32))
        log.drain()
        cache.evict(1)
        log.drain()
        hashes = hashes_of([0, 1, 2, 3], 2, "tenant")
        stored = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": [0, 1, 2, 3],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["tenant"], None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        removed = {"type": "BlockRemoved", "block_hashes": hashes[1:], "medium": "GPU", "group_idx": 0}
        last = log.last_sequence
        told = [(last - 1, [5.0, [stored], 0]), (last, [5.0, [removed], 0])]
        assert await subscriber.ask((last - 1).to_bytes(8, "big")) == told
        assert await subscriber.ask(last.to_bytes(8, "big")) == told[1:]
        assert await subscriber.ask((last + 1).to_bytes(8, "big")) == []
        stored |= {"block_hashes": hashes[:1], "token_ids": [0, 1], "extra_keys": [["tenant"]]}
        assert await subscriber.ask(bytes(8)) == [(last, [5.0, [{"type": "AllBlocksCleared"}, stored], 0])]
        await subscriber.replay.send_multipart([b"", b"not a number"])
        assert await subscriber.ask((last + 1).to_bytes(8, "big")) == []


async def test_scheduler_publishes(tmp_path: Path) -> None:
    """`--kv-events-endpoint`: what requests leave in the cache is published under the scheduler's id and the model's name."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    endpoints = [f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"]
    context = zmq.asyncio.Context()
    async with asyncio.timeout(LIMIT_S), contextlib.AsyncExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        thread = ExecutionThread()
        stack.callback(thread.stop)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = RuntimeServicer(thread)
        servicer.register(server)
        runtime = bind(server, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.callback(servicer.shut_down)
        shape = RuntimeSettings(model="fingerprint", page_size=4, num_pages=24, max_rows=4, max_pages_per_row=16)
        servicer.set_ready(*await thread.call(functools.partial(runtime_app.load, shape)))
        settings = load_settings(
            runtime=runtime,
            listen="127.0.0.1:0",
            kv_events_endpoint=endpoints[0],
            kv_events_replay_endpoint=endpoints[1],
            kv_events_id="replica-0",
        )
        serving = asyncio.create_task(app.serve(settings, ready.set_result))
        async with Client((await ready).split()[3]) as client:
            subscriber = Subscriber(context, *endpoints)
            topics = set()
            while not topics:  # until the subscription has arrived
                _ = [piece async for piece in client.generate(list(range(9)), max_tokens=1)]
                await client.reset_prefix_cache()
                if await subscriber.sub.poll(50):
                    topics.add((await subscriber.sub.recv_multipart())[0])
            _ = [piece async for piece in client.generate(list(range(9)), max_tokens=1)]
            await subscriber.catch_up()
        assert topics == {b"kv@replica-0@fingerprint"}
        assert subscriber.pages.hashes == set(hashes_of(list(range(9)), 4))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_endpoint_in_use_is_told() -> None:
    """Two publishers cannot have one endpoint, and the second leaves nothing open."""
    publisher = ZmqPublisher("tcp://127.0.0.1:0")
    try:
        with pytest.raises(StartError, match="cannot publish on tcp://127"):
            ZmqPublisher(publisher.endpoint)
    finally:
        await publisher.close()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kv_events_endpoint": "tcp://0.0.0.0:5557"}, "say --insecure"),
        ({"kv_events_endpoint": "tcp://*:5557"}, "say --insecure"),
        ({"kv_events_endpoint": "127.0.0.1:5557"}, "must be tcp://HOST:PORT or ipc://PATH"),
        ({"kv_events_endpoint": "ipc://"}, "needs a path"),
        ({"kv_events_replay_endpoint": "tcp://127.0.0.1:5558"}, "need --kv-events-endpoint"),
        ({"kv_events_id": "a"}, "need --kv-events-endpoint"),
    ],
)
def test_settings_that_are_refused(given: dict[str, str], text: str) -> None:
    """An address that others can reach wants --insecure, and what is no endpoint is named."""
    with pytest.raises(SettingsError, match=text.replace("*", r"\*")):
        load_settings(runtime="127.0.0.1:1", **given)
    if "insecure" in text:
        load_settings(runtime="127.0.0.1:1", insecure=True, **given)
