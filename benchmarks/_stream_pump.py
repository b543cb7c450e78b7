"""A server that streams tokens as fast as they are taken, with no engine behind it: what the stream itself costs.

    python benchmarks/_stream_pump.py STREAMS STEPS

prints its address and serves until its stdin ends. `Session` writes STEPS steps of STREAMS tokens through the outbox and the
writer of the product, a step as soon as the one before was taken; each `Generate` writes STEPS messages of one token.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import grpc
from typing_extensions import override

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service import event_loop, session_servicer
from scheduler_service.channels import bind, server_options
from scheduler_service.columns import int32_to_bytes
from scheduler_service.core.intake import Outputs
from scheduler_service.core.request import FinishReason
from scheduler_service.metrics import Metrics
from scheduler_service.session_outbox import Outbox
from scheduler_service.subscription import Subscribers


class Pump(generation_pb2_grpc.GenerationServiceServicer):
    """Streams; what it is asked does not matter."""

    def __init__(self, num_streams: int, num_steps: int) -> None:
        self._num_streams, self._num_steps = num_streams, num_steps

    @override
    async def Generate(self, request: Any, context: Any) -> None:
        """One token a message."""
        token = int32_to_bytes([5])
        for _ in range(self._num_steps):
            await context.write(generation_pb2.GenerateResponse(tokens=token))

    @override
    async def Session(self, requests: Any, context: Any) -> None:
        """One step a message."""
        subscribers = Subscribers(Metrics())
        outbox = Outbox(self._num_streams, 2**31, subscribers.note_overflow)
        members = [self._request(n) for n in range(self._num_streams)]
        for n, request in enumerate(members):
            subscribers.follow(outbox.member(n + 1, request, None))
        pumping = asyncio.create_task(self._pump(subscribers, outbox, members))
        await session_servicer._write(outbox, context)
        await pumping

    async def _pump(self, subscribers: Subscribers, outbox: Outbox, requests: list[Any]) -> None:
        tokens = list(range(1000, 1000 + self._num_streams))
        for _ in range(self._num_steps):
            while outbox.changed.is_set():  # noqa: ASYNC110  (there is an event for "something to take", none for "taken")
                await asyncio.sleep(0)
            subscribers.deliver(Outputs(requests=requests, tokens=tokens))
        subscribers.deliver(Outputs(finished=requests))
        outbox.close()

    @staticmethod
    def _request(n: int) -> Any:
        account = {
            "prompt_len": 1,
            "num_output": 1,
            "cached_tokens": 0,
            "num_retractions": 0,
            "finish_reason": FinishReason.LENGTH,
        }
        return SimpleNamespace(request_id=f"r{n}", sampling=SimpleNamespace(num_logprobs=None), finish_detail="", **account)


async def main(num_streams: int, num_steps: int) -> None:
    server = grpc.aio.server(options=server_options(max_streams=4096))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Pump(num_streams, num_steps), server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    print(f"ready on {address}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    event_loop.run(main(int(sys.argv[1]), int(sys.argv[2])))
