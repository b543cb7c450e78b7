"""The scheduler's rows beside the mirror's, at one step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from scheduler_service.core.ops import Int32Array
from scheduler_service.core.request import Request
from scheduler_service.core.states import State
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.errors import LinkBrokenError, ProtocolError, RuntimeLinkError
from scheduler_service.wire_facts import MirrorRows


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Where one request stood at one moment; counts are tokens."""

    request_id: str
    state: State
    row: int
    prompt_len: int
    num_output: int
    cached_tokens: int
    num_retractions: int
    num_computed: int
    priority: int


@dataclass(frozen=True, slots=True)
class RowPair:
    """One row from both sides; of several ranks the mirror of `rank`: the first one that differs, or 0 when none does."""

    request: RequestSnapshot
    scheduler_pages: Int32Array
    mirror_pages: Int32Array
    equal: bool
    rank: int = 0


@dataclass(frozen=True, slots=True)
class RowReport:
    """All rows in use at one step."""

    session_no: int
    step: int
    rows: list[RowPair]


def snapshot(engine: EngineLoop, request: Request) -> RequestSnapshot:
    """Where the request stands now."""
    return RequestSnapshot(
        request_id=request.request_id,
        state=request.state,
        row=request.row if request.state.holds_row else 0,
        prompt_len=request.prompt_len,
        num_output=request.num_output,
        cached_tokens=request.cached_tokens,
        num_retractions=request.num_retractions,
        num_computed=engine.num_computed(request),
        priority=request.priority,
    )


async def report_rows(engine: EngineLoop, timeout_s: float) -> RowReport:
    """Stop planning, let what is in flight end, read the mirror, compare, and go on.

    Raises:
        RuntimeLinkError: no runtime answered within `timeout_s`.
    """
    engine.pause()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                await engine.wait_quiet()
                report = await _read_quiet(engine, timeout_s)
                if report is not None:
                    return report
    except TimeoutError:
        raise LinkBrokenError(f"the runtime did not come to rest within {timeout_s:g} s") from None
    finally:
        engine.resume()


async def _read_quiet(engine: EngineLoop, timeout_s: float) -> RowReport | None:
    """The report of this very moment; None when the session was lost meanwhile."""
    session_no, step = engine.connection.session_no, engine.last_step
    # Copies: clients may end or retract requests while the mirror is read.
    ours = {row: (snapshot(engine, request), pages.copy()) for row, (request, pages) in engine.core.rows().items()}
    try:
        mirrors = await engine.link.read_rows_of_all(list(ours), timeout_s)
    except RuntimeLinkError:
        if engine.connection.session_no != session_no or engine.link.broken:
            return None
        raise
    if engine.connection.session_no != session_no:
        return None
    for mirror in mirrors:
        if (mirror.session_no, mirror.last_step) != (session_no, step):
            raise ProtocolError(
                f"the mirror is at step {mirror.last_step} of session {mirror.session_no},"
                f" the scheduler at step {step} of session {session_no}"
            )
    width = engine.facts.max_pages_per_row
    pairs = [_pair(row, request, pages, mirrors, width) for row, (request, pages) in sorted(ours.items())]
    return RowReport(session_no, step, pairs)


def _pair(row: int, request: RequestSnapshot, pages: Int32Array, mirrors: list[MirrorRows], width: int) -> RowPair:
    nothing = np.empty(0, dtype=np.int32)
    for rank, mirror in enumerate(mirrors):
        theirs = mirror.pages.get(row, nothing)
        if not np.array_equal(pages[:width], theirs) or mirror.row_lens.get(row) != len(pages):
            return RowPair(request, pages, theirs, equal=False, rank=rank)
    return RowPair(request, pages, mirrors[0].pages.get(row, nothing), equal=True)
