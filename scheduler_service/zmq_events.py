"""Page events over ZeroMQ, in the form that vLLM has made common, for consumers that follow engines that way.

A PUB socket sends three frames a batch: the topic, the batch's number (8 bytes, big-endian), and msgpack of
`[time, [event, …], 0]`, where an event is a map with its kind under "type". A ROUTER socket answers a request of 8 bytes, the
first number wanted, by (number, payload) messages and at last (-1, nothing). Numbers that are not kept any more, 0 above all,
are answered by the present state: a batch that begins with AllBlocksCleared, and everything stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import structlog
import zmq
import zmq.asyncio

from scheduler_service.errors import EventsMissedError, ServiceError, StartError
from scheduler_service.page_event_log import PageEventLog
from scheduler_service.page_events import PageBatch, PageEvent, PagesRemoved, PagesStored

log = structlog.get_logger("pagemirror.zmq")

MAX_UNSENT = 1000
"""Batches that wait for one subscriber; further ones are dropped for it, and it sees the gap in the numbers."""

REPLAY_TIMEOUT_S = 10.0
"""For which a message of a replay may wait to be taken; the replay is given up then, and the next one served."""

_END = (-1).to_bytes(8, "big", signed=True)
_MAX_REQUEST_BYTES = 256


class ZmqPublisher:
    """Both sockets. They are bound at once; nothing is sent before `start`. Must be made inside a running event loop.

    Raises:
        StartError: an endpoint cannot be had.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        self._topic = b""
        self._log: PageEventLog
        try:
            self._pub = self._bound(zmq.PUB, endpoint)
            self._router = None if replay_endpoint is None else self._bound(zmq.ROUTER, replay_endpoint)
        except StartError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _address(self._pub)
        self.replay_endpoint = None if self._router is None else _address(self._router)

    def start(self, events: PageEventLog, topic: str) -> None:
        """Publish this log's batches under this topic, the present state first."""
        self._log, self._topic = events, topic.encode("utf-8", "replace")
        self._tasks.append(asyncio.create_task(self._publish(), name="zmq-publish"))
        if self._router is not None:
            self._tasks.append(asyncio.create_task(self._answer(self._router), name="zmq-replay"))
        log.info("publishing_page_events", endpoint=self.endpoint, replay=self.replay_endpoint, topic=topic)

    async def close(self) -> None:
        """Stop, and give the endpoints back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def _bound(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)  # of what others send
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone, or reads nothing, is noticed
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise StartError(f"cannot publish on {endpoint}: {error.strerror or error}") from error
        return socket

    async def _publish(self) -> None:
        while True:
            follower = self._log.follow()
            try:
                while True:
                    batch = await follower.take()
                    await self._pub.send_multipart([self._topic, _number(batch.stamp), payload_of([batch])])
            except EventsMissedError:
                log.warning("page_events_missed")
            except ServiceError as error:
                log.debug("page_events_end", reason=str(error))
                return
            finally:
                follower.close()

    async def _answer(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) < 2 or len(frames[-1]) != 8:
                log.debug("bad_replay_request", frames=len(frames))
                continue
            to, first = frames[:-1], int.from_bytes(frames[-1], "big")
            try:
                for number, payload in self._replay(first):
                    await asyncio.wait_for(router.send_multipart([*to, _number(number), payload]), REPLAY_TIMEOUT_S)
                await asyncio.wait_for(router.send_multipart([*to, _END, b""]), REPLAY_TIMEOUT_S)
            except (zmq.ZMQError, TimeoutError) as error:
                log.debug("replay_given_up", reason=repr(error))

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Numbers and payloads from `first` on."""
        events = self._log
        kept = events.since(first - 1)
        last = events.last_sequence
        if first <= last - len(kept) and events.is_recording:
            state = events.state()
            # As few as there are numbers between, since a receiver may pass over what it has seen the number of.
            size = -(-len(state) // min(len(state), last - first + 1))
            groups = [state[start : start + size] for start in range(0, len(state), size)]
            for index, group in enumerate(groups):
                yield last - (len(groups) - 1 - index), payload_of(group)
            return
        for batch in kept:
            yield batch.sequence, payload_of([batch])


def payload_of(batches: Sequence[PageBatch]) -> bytes:
    """Batches as one message, with the time of the first."""
    data: bytes = msgpack.packb([batches[0].timestamp, [_event(event) for batch in batches for event in batch.events], 0])
    return data


def _event(event: PageEvent) -> dict[str, Any]:
    if isinstance(event, PagesStored):
        keys: list[list[str] | None] = [None] * len(event.hashes)
        if event.namespace and event.parent is None:
            keys[0] = [event.namespace]
        return {
            "type": "BlockStored",
            "block_hashes": event.hashes.tolist(),
            "parent_block_hash": event.parent,
            "token_ids": event.tokens.tolist(),
            "block_size": event.page_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    if isinstance(event, PagesRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.hashes.tolist(), "medium": "GPU", "group_idx": 0}
    return {"type": "AllBlocksCleared"}


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def _address(socket: zmq.asyncio.Socket) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
