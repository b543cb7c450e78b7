"""Mutated calls against a live GenerationService: each ends with a status that fits; clean requests beside them are exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fuzz_generation import MadClients

GROWTH_MIB = 64
WARM_UP = 500


async def test_mutated_calls(scheduler: Any, num_ops: int, seed: int, report: Callable[[Counter[str]], None]) -> None:
    """Nothing that clients send makes INTERNAL or UNKNOWN, disturbs another client, or keeps a page."""
    async with MadClients(scheduler.address, seed) as mad:
        await mad.fuzz(WARM_UP)
        await mad.until_idle()
        before = scheduler.usage()
        await mad.fuzz(max(num_ops - WARM_UP, 0))
        info = await mad.until_idle()
        after = scheduler.usage()
    report(mad.counts)
    scheduler.assert_unharmed()
    assert info.free_pages + info.cached_pages == info.num_pages
    assert mad.counts["clean requests"] > 0
    assert mad.counts["mutated"] >= num_ops
    assert after["fds"] <= before["fds"] + 1
    assert after["threads"] <= before["threads"] + 2  # gRPC's own come and go
    assert after["mib"] <= before["mib"] + GROWTH_MIB
