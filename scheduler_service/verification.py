"""Verification: does the runtime's mirror hold the rows that the core believes it holds?

The core states digests in its ops (`core.digests`), the runtime answers with those of its device's memory, and here the two are
compared, before anything of the result is believed. A difference ends the session like any other trouble; a second one within
the window says that the memory, or the program beside it, cannot be trusted, and clients are told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog

from scheduler_service.core.config import Verify
from scheduler_service.core.ops import ForwardOp, Int32Array, StepResult
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.errors import DataLossError, RuntimeLinkError
from scheduler_service.metrics import Metrics
from scheduler_service.wire_facts import MirrorRows

log = structlog.get_logger("pagemirror.verification")

READ_LIMIT_S = 2.0
"""Longest wait for the mirror's row, which is wanted for the log alone."""


class RowReader(Protocol):
    """What is needed of the link to the runtime."""

    @property
    def broken(self) -> RuntimeLinkError | None:
        """Why it can no longer be used; None while it can."""

    async def read_rows(self, rows: list[int], timeout_s: float) -> MirrorRows:
        """These rows of the mirror. Raises RuntimeLinkError."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A row whose digest differs; the first of `num_rows` in its step."""

    session_no: int
    step: int
    row: int
    request_id: str  # empty: the row was left meanwhile, or never had one
    expected: int
    found: int
    num_rows: int
    pages: Int32Array | None  # the core's row now; None: it is another request's, or nobody's

    def __str__(self) -> str:
        who = f"row {self.row} of request {self.request_id!r}" if self.request_id else f"row {self.row}"
        also = f" (and {self.num_rows - 1} more rows)" if self.num_rows > 1 else ""
        digests = f"expected {self.expected:016x}, found {self.found:016x}"
        return f"step {self.step} of session {self.session_no}: the digest of {who} differs: {digests}{also}"


class Verifier:
    """Compares the digests of each result, and decides what a difference means.

    Args:
        core: whose ops are in flight.
        metrics: counts comparisons and differences.
        window_s: a difference so soon after the one before it is data loss; 0: none is.

    Attributes:
        pending: the difference that was found last, until `settle`.
    """

    def __init__(self, core: Scheduler, metrics: Metrics, window_s: float) -> None:
        self.pending: Mismatch | None = None
        self._core = core
        self._is_on = core.config.verify is not Verify.OFF
        self._metrics = metrics
        self._window_s = window_s
        self._last_at: float | None = None

    def check(self, result: StepResult) -> str:
        """The trouble as text, if the result of the oldest op in flight has other digests than it should, or none."""
        if not self._is_on:
            return ""
        in_flight = self._core.ops_in_flight()
        op = in_flight[0] if in_flight else None
        if op is None or op.row_digests is None or (result.session_no, result.step) != (op.session_no, op.step):
            return ""  # nothing was asked, or it is no answer, which is for the core to say
        rows, expected = op.req_pool_indices, op.row_digests
        if op.verify_rows is not None and op.verify_digests is not None:
            rows, expected = np.concatenate((rows, op.verify_rows)), np.concatenate((expected, op.verify_digests))
        found = result.digests
        num_found = 0 if found is None else len(found)
        if found is None or num_found != len(expected):
            if not len(expected) and not num_found:
                return ""
            return f"step {op.step} was answered with {num_found} digests, {len(expected)} were asked for"
        self._metrics.digests.inc(num_found)
        differs = np.flatnonzero(found != expected)
        if not len(differs):
            return ""
        i = int(differs[0])
        self.pending = self._mismatch(op, i, int(rows[i]), (int(expected[i]), int(found[i])), len(differs))
        self._metrics.digest_mismatches.inc()
        return str(self.pending)

    def _mismatch(self, op: ForwardOp, i: int, row: int, digests: tuple[int, int], num_rows: int) -> Mismatch:
        holder, pages = self._core.rows().get(row, (None, None))
        request = op.requests[i] if i < op.num_rows else holder
        return Mismatch(
            session_no=op.session_no,
            step=op.step,
            row=row,
            request_id="" if request is None else request.request_id,
            expected=digests[0],
            found=digests[1],
            num_rows=num_rows,
            pages=pages if request is holder else None,
        )

    async def settle(self, link: RowReader, on_data_loss: Callable[[DataLossError], None]) -> None:
        """Log what was found, with the first page that differs where the mirror can still be read.

        When it is the second difference within the window `on_data_loss` is called, before anything is waited for, with the
        error for every request that is live now. Without a difference pending nothing happens.
        """
        mismatch, self.pending = self.pending, None
        if mismatch is None:
            return
        now, last_at = asyncio.get_running_loop().time(), self._last_at
        self._last_at = now
        is_loss = last_at is not None and now - last_at < self._window_s
        if is_loss:
            on_data_loss(DataLossError(self._window_s))
        log.error(
            "digest_mismatch",
            request_id=mismatch.request_id,
            row=mismatch.row,
            session_no=mismatch.session_no,
            step=mismatch.step,
            expected=f"{mismatch.expected:016x}",
            found=f"{mismatch.found:016x}",
            num_rows=mismatch.num_rows,
            first_difference=await _first_difference(mismatch, link),
            data_loss=is_loss,
        )


async def _first_difference(mismatch: Mismatch, link: RowReader) -> str:
    """Where core and mirror differ now, in words. Later ops are applied by now, and may have mended the row."""
    if mismatch.pages is None:
        return "the request has left the row"
    if link.broken is not None:
        return "the mirror cannot be read"
    try:
        async with asyncio.timeout(READ_LIMIT_S):
            mirror = await link.read_rows([mismatch.row], READ_LIMIT_S)
    except (RuntimeLinkError, TimeoutError) as error:
        return f"the mirror could not be read: {str(error) or 'it took too long'}"
    theirs = mirror.pages.get(mismatch.row, mismatch.pages[:0])
    length = min(len(theirs), len(mismatch.pages))
    differs = np.flatnonzero(theirs[:length] != mismatch.pages[:length])
    if not len(differs):
        return f"none in the first {length} pages any more"
    page = int(differs[0])
    return f"logical page {page} is {theirs[page]}, should be {mismatch.pages[page]}"
