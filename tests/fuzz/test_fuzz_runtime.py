"""Mutated ops against live runtimes: each is refused with a code that fits, or does exactly what it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
from fuzz_runtime import OPTIONS, MadScheduler
from grpc import aio

from pagemirror.v1 import runtime_pb2, runtime_pb2_grpc

SHARES = {"pages of 4": 0.45, "pages of 1": 0.4, "sampling": 0.15}
BATCH = 250
GROWTH_MIB = 64
"""Memory that allocators may keep; a leak of a kilobyte an op would be more in a long run."""
OUR_FAULTS = {"REFUSAL_CODE_UNSPECIFIED", "REFUSAL_CODE_STEP_FAILED", "REFUSAL_CODE_OUT_OF_MEMORY"}
HELLO_LIMIT_S = 60.0


async def attack(served: Any, num_ops: int, seed: int) -> Counter[str]:
    """Batches of mutated ops, and after each a clean session whose every token must be right."""
    async with MadScheduler(served.address, seed) as mad:
        await mad.reference(mad.sequences[0])
        await mad.fuzz(min(BATCH, num_ops))
        await mad.reference(mad.sequences[0])
        before = served.usage()
        number = 0
        while mad.num_mutated < num_ops:
            await mad.fuzz(min(BATCH, num_ops - mad.num_mutated))
            number += 1
            await mad.reference(mad.sequences[number % len(mad.sequences)])
        await mad.reference(mad.sequences[0])
        await mad.close()
        after = served.usage()
    served.assert_unharmed()
    assert after["fds"] <= before["fds"] + 1
    assert after["threads"] <= before["threads"] + 2  # gRPC's own come and go
    assert after["mib"] <= before["mib"] + GROWTH_MIB
    return mad.counts


async def silent_stream(address: str) -> grpc.StatusCode:
    """With what a stream ends that says nothing."""
    async with aio.insecure_channel(address, options=OPTIONS) as channel:
        call = runtime_pb2_grpc.RuntimeServiceStub(channel).Execute()
        return await asyncio.wait_for(call.code(), HELLO_LIMIT_S)


async def test_mutated_ops(runtimes: dict[str, Any], num_ops: int, seed: int, report: Callable[[Counter[str]], None]) -> None:
    """No mutated op changes what it may not change, and each code that blames the scheduler has been seen."""
    silent = [asyncio.ensure_future(silent_stream(served.address)) for served in runtimes.values()]
    attacks = [
        asyncio.ensure_future(attack(runtimes[name], round(num_ops * share), seed + number))
        for number, (name, share) in enumerate(SHARES.items())
    ]
    try:
        counts = sum(await asyncio.gather(*attacks), Counter())
        assert await asyncio.gather(*silent) == [grpc.StatusCode.INVALID_ARGUMENT] * len(silent)
    finally:
        for task in (*attacks, *silent):
            task.cancel()
            with contextlib.suppress(BaseException):
                await task
    report(counts)
    assert counts["mutated"] >= num_ops
    seen = {name.removeprefix("refused: ") for name in counts if name.startswith("refused: ")}
    assert seen == set(runtime_pb2.RefusalCode.keys()) - OUR_FAULTS
