"""Verification with several ranks: the mirror of one of them is damaged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import structlog


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("overlap_depth", [0, 2])
async def test_damage_in_one_rank_is_found(
    rank: int, overlap_depth: int, make_runtime: Callable[..., Any], listening: Any, engine_on: Any, clients: Any
) -> None:
    """The damaged rank's row is named and read, all ranks begin a new session, and every output is right."""
    ranks = [make_runtime() for _ in range(2)]
    runner = ranks[rank].runner
    launch, damaged = runner.launch, []

    def damage(op: Any) -> Any:
        if not damaged and op.num_rows and op.num_extend_rows == 0 and not op.full_refresh.any() and op.begins.min() >= 2:
            row = int(op.req_pool_indices[-1])
            damaged.append((row, op.session_no, op.step, int(runner.mirror.table[row, 0])))
            runner.mirror.table[row, 0] ^= 64
        return launch(op)

    runner.launch = damage
    with structlog.testing.capture_logs() as logs:
        async with contextlib.AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(listening(runtime)) for runtime in ranks]
            options = {"verify": "every", "overlap_depth": overlap_depth}
            engine = await stack.enter_async_context(engine_on(",".join(addresses), **options))
            assert await clients.run_all(engine) == clients.expected
            value = engine.metrics.registry.get_sample_value
            assert value("pagemirror_digest_mismatches_total") == 1
            assert value("pagemirror_resets_total", {"cause": "digest"}) == 1
    assert [runtime.sessions for runtime in ranks] == [[1, 2]] * 2
    (row, session_no, step, page) = damaged[0]
    (entry,) = [entry for entry in logs if entry["event"] == "digest_mismatch"]
    assert (entry["row"], entry["session_no"], entry["step"]) == (row, session_no, step)
    assert entry["first_difference"] == f"logical page 0 is {page ^ 64}, should be {page}"
    assert {entry["rank"] for entry in logs if entry["event"] == "digests_differ"} == {rank}
