"""Mutated sessions against a live GenerationService: each stream and each request ends with a status that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fuzz_session import MadSessions

GROWTH_MIB = 64
WARM_UP = 200


async def test_mutated_sessions(scheduler: Any, num_ops: int, seed: int, report: Callable[[Counter[str]], None]) -> None:
    """Nothing that a front end sends makes INTERNAL or UNKNOWN, disturbs another session, or keeps a page."""
    async with MadSessions(scheduler.address, seed) as mad:
        await mad.fuzz_sessions(WARM_UP)
        await mad.until_idle()
        before = scheduler.usage()
        await mad.fuzz_sessions(max(num_ops // 2, WARM_UP))
        info = await mad.until_idle()
        after = scheduler.usage()
    report(mad.counts)
    scheduler.assert_unharmed()
    assert info.free_pages + info.cached_pages == info.num_pages
    assert mad.counts["clean requests"] > 0
    assert mad.counts["Session: OK"] > 0
    assert mad.counts["Session: INVALID_ARGUMENT"] > 0
    assert mad.counts["request: OK"] > 0
    assert after["fds"] <= before["fds"] + 1
    assert after["threads"] <= before["threads"] + 2  # gRPC's own come and go
    assert after["mib"] <= before["mib"] + GROWTH_MIB
