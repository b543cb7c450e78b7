"""Clients of `bench_streaming.py`: so many requests at a time, by each way that leads to a scheduler.

    python benchmarks/_stream_clients.py STREAMS TOKENS SCHEDULER [FRONT_END]

answers each JSON request of a line, {"kind": ..., "name": ...}, when all tokens have come: how many, and when that was. It runs
at low priority, because elsewhere clients would not share cores with what they call.
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
    """So many requests of so many tokens; every method returns the tokens that came."""

    def __init__(self, num_streams: int, num_tokens: int) -> None:
        self.num_streams, self.num_tokens = num_streams, num_tokens

    async def generate(self, clients: list[Client], name: str) -> int:
        """A call of Generate each, spread over the clients."""
        calls = (self._call(clients[n % len(clients)], self._request(name, n)) for n in range(self.num_streams))
        return sum(await asyncio.gather(*calls))

    async def session(self, client: Client, name: str) -> int:
        """All over one session."""
        session = await Session.open(client.stub)
        total = sum(await asyncio.gather(*(self._member(session, self._request(name, n)) for n in range(self.num_streams))))
        await session.drain()
        await session.close()
        return total

    def _request(self, name: str, n: int) -> generation_pb2.GenerateRequest:
        prompt = int32_to_bytes([n % 900 + 1, 2, 3])
        return generation_pb2.GenerateRequest(
            request_id=f"{name}-{n}", prompt=prompt, max_tokens=self.num_tokens, prefix_cache=False
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
    """Read one session to its end, and count its tokens without looking whose they are."""
    call = client.stub.Session()
    await call.write(generation_pb2.SessionRequest(hello=generation_pb2.SessionHello()))
    count = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        count += len(message.tokens) // 4
    return count


async def main(num_streams: int, num_tokens: int, target: str, front: str = "") -> None:
    requests = Requests(num_streams, num_tokens)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(target))
        kinds: dict[str, Callable[[str], Awaitable[int]]] = {
            "Generate": lambda name: requests.generate([client], name),
            "Session": lambda name: requests.session(client, name),
            "raw Session": lambda name: read_session(client),
        }
        if front:
            clients = [await stack.enter_async_context(Client(front)) for _ in range(FRONT_CONNECTIONS)]
            kinds["front end"] = lambda name: requests.generate(clients, name)
        print("ready on nothing", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            count = await kinds[asked["kind"]](asked["name"])
            print(json.dumps({"tokens": count, "ended": time.perf_counter()}), flush=True)


if __name__ == "__main__":
    os.nice(NICENESS)
    event_loop.run(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
