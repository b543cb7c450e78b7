"""Clients of `bench_streaming.py`: so many requests at a time, by each way that leads to a scheduler.

    python benchmarks/_stream_clients.py STREAMS SCHEDULER [FRONT_END]

answers each JSON request of a line, {"kind": ..., "name": ..., "tokens": ...}, when all tokens have come: how many, and when
that was. It runs at low priority, because elsewhere clients would not share cores with what they call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable

import grpc

from pagemirror.v1 import generation_pb2
from scheduler_service import event_loop
from scheduler_service.client import Client
from scheduler_service.columns import int32_to_bytes
from scheduler_service.session_client import Session

NICENESS = 10
FRONT_CONNECTIONS = 16  # which the kernel spreads over the workers


class Requests:
    """So many requests of so many tokens; every method returns the tokens that came.

    Args:
        name: what their ids begin with.
    """

    def __init__(self, num_streams: int, num_tokens: int, name: str) -> None:
        self._num_streams, self._num_tokens, self._name = num_streams, num_tokens, name

    async def generate(self, *clients: Client) -> int:
        """A call of Generate each, spread over the clients."""
        calls = (self._call(clients[n % len(clients)], self._request(n)) for n in range(self._num_streams))
        return sum(await asyncio.gather(*calls))

    async def session(self, client: Client) -> int:
        """All over one session."""
        session = await Session.open(client.stub)
        total = sum(await asyncio.gather(*(self._member(session, self._request(n)) for n in range(self._num_streams))))
        await session.drain()
        await session.close()
        return total

    def _request(self, n: int) -> generation_pb2.GenerateRequest:
        prompt = int32_to_bytes([n % 900 + 1, 2, 3])
        return generation_pb2.GenerateRequest(
            request_id=f"{self._name}-{n}", prompt=prompt, max_tokens=self._num_tokens, prefix_cache=False
        )

    @staticmethod
    async def _call(client: Client, request: generation_pb2.GenerateRequest) -> int:
        return sum([len(message.tokens) // 4 async for message in client.stub.Generate(request)])

    @staticmethod
    async def _member(session: Session, request: generation_pb2.GenerateRequest) -> int:
        output = await session.submit(request)
        count = 0
        while True:
            piece = await output.take()
            count += len(piece.tokens)
            if piece.finished is not None:
                return count


async def read_session(client: Client) -> int:
    """Read one session of `_stream_pump.py` to its end, and count its tokens without looking whose they are.

    Nothing is said first: a short stream may be over before a hello is out, which would then fail.
    """
    call = client.stub.Session()
    count = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        count += len(message.tokens) // 4
    return count


async def main(num_streams: int, target: str, front: str = "") -> None:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(target))
        clients = [await stack.enter_async_context(Client(front)) for _ in range(FRONT_CONNECTIONS if front else 0)]
        kinds: dict[str, Callable[[Requests], Awaitable[int]]] = {
            "Generate": lambda requests: requests.generate(client),
            "front end": lambda requests: requests.generate(*clients),
            "Session": lambda requests: requests.session(client),
            "raw Session": lambda requests: read_session(client),
        }
        print("ready on nothing", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            count = await kinds[asked["kind"]](Requests(num_streams, asked["tokens"], asked["name"]))
            print(json.dumps({"tokens": count, "ended": time.perf_counter()}), flush=True)


if __name__ == "__main__":
    os.nice(NICENESS)
    event_loop.run(main(int(sys.argv[1]), *sys.argv[2:]))
