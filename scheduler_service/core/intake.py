"""From a StepResult to tokens of requests, and to requests that end by them.

A result is read by the op it answers: rows may have changed hands since. Rows whose request still holds them cost a fixed
number of numpy calls, and one loop that appends the tokens where they are not the rows of the step before; rows that failed, or
were left meanwhile, are looked at one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import UnexpectedResultError
from scheduler_service.core.late_tokens import LateTokens
from scheduler_service.core.ops import BoolArray, ForwardOp, Int32Array, RowStatus, StepResult, TokenLogprobs
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.states import State
from scheduler_service.core.steady import SteadyRows

_UINT32 = np.dtype(np.uint32)


@dataclass(slots=True)
class Outputs:
    """What happened to requests since it was last asked: accepted tokens as parallel lists, and requests that ended.

    `logprobs` is parallel to `tokens`, with None where the request wants none; it is None when no request does.
    """

    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] | None = None

    @property
    def columns(self) -> tuple[list[Request], list[int]]:
        return self.requests, self.tokens

    def add_logprobs(self, logprobs: list[TokenLogprobs | None]) -> None:
        """Of the tokens added last."""
        if self.logprobs is None:
            self.logprobs = []
        self.fill_logprobs(len(self.tokens) - len(logprobs))
        self.logprobs += logprobs

    def fill_logprobs(self, length: int) -> None:
        """Bring `logprobs`, if there are any, to this length: the tokens without an entry so far have none."""
        if self.logprobs is not None:
            self.logprobs += [None] * (length - len(self.logprobs))


class ResultIntake:
    """Hands tokens to requests.

    Args:
        finish: called with (request, reason, detail); must end the request at once.
    """

    def __init__(
        self, config: SchedulerConfig, placement: Placement, finish: Callable[[Request, FinishReason, str], None]
    ) -> None:
        self.outputs = Outputs()
        self.late = LateTokens()
        self._config = config
        self._placement = placement
        self._finish = finish

    def take_outputs(self) -> Outputs:
        """Everything accepted and ended since the last call."""
        outputs, self.outputs = self.outputs, Outputs()
        outputs.fill_logprobs(len(outputs.tokens))
        return outputs

    def check(self, op: ForwardOp | None, result: StepResult) -> tuple[ForwardOp, BoolArray]:
        """`op`, the oldest in flight, and which of its rows have a token that counts, [R].

        Raises:
            UnexpectedResultError: the result does not answer `op`, a token is none of the vocabulary, or a column does not fit.
        """
        if op is None or (result.session_no, result.step) != (op.session_no, op.step) or len(result.tokens) != op.num_rows:
            awaited = f"step {op.step} of session {op.session_no} with {op.num_rows} rows" if op else "nothing"
            raise UnexpectedResultError(
                f"a result for step {result.step} of session {result.session_no} with {len(result.tokens)} rows came, "
                f"{awaited} is awaited"
            )
        if result.row_status is not None and len(result.row_status) != op.num_rows:
            raise UnexpectedResultError(f"step {op.step} returned {len(result.row_status)} statuses for {op.num_rows} rows")
        wanted = op.sample
        if result.row_status is not None and result.row_status.any():
            wanted = wanted & (result.row_status == RowStatus.OK)
        # A negative number is a large one here; if the largest is in the vocabulary, all are.
        if op.num_rows and np.maximum.reduce(result.tokens.view(_UINT32)) >= self._config.vocab_size:
            bad = wanted & ((result.tokens < 0) | (result.tokens >= self._config.vocab_size))
            if bad.any():
                raise UnexpectedResultError(f"step {op.step} returned {result.tokens[bad][:8].tolist()}, which are no tokens")
        if op.num_logprobs is not None:
            _check_logprobs(op, result, wanted)
        return op, wanted

    def take(self, op: ForwardOp, result: StepResult, wanted: BoolArray) -> None:
        """Accept what `check` has found good; end requests that have their last token, and those whose row failed."""
        rows = self._placement.rows
        if op.steady is not None and op.num_ended == rows.num_ended and wanted is op.sample:
            ends = self._accept_all(op, op.steady, result.tokens)
            if op.num_logprobs is not None:
                self.outputs.add_logprobs(_logprobs(op, result, range(op.num_rows)))
        else:
            ends = self._accept_some(op, result, wanted)
        for request, stopped in ends:
            self._end(request, stopped)

    def _accept_all(self, op: ForwardOp, steady: SteadyRows, tokens: Int32Array) -> list[tuple[Request, bool]]:
        """As `_accept`, with one token for each row of `op`."""
        values: list[int] = tokens.tolist()
        self.late.add(op.requests, tokens)
        steady.answer()
        self.outputs.requests += op.requests
        self.outputs.tokens += values
        stop_ids = steady.stop_ids
        if not op.may_end and (stop_ids is None or not np.count_nonzero(stop_ids == tokens[:, None])):
            return []
        return self._ends(op.req_pool_indices.astype(np.intp), tokens, op.requests)

    def _accept_some(self, op: ForwardOp, result: StepResult, wanted: BoolArray) -> list[tuple[Request, bool]]:
        """Accept the tokens that count of requests that still hold the row they ran in; look at the other rows one by one.

        Returns those of the former that end, each with whether a stop token ended it.
        """
        rows, indices, tokens = self._placement.rows, op.req_pool_indices.astype(np.intp), result.tokens
        alive = rows.live_generation.take(indices) == op.row_generations
        if np.count_nonzero(alive & wanted) == op.num_rows:
            rows.num_outstanding[indices] -= 1
            ends = self._accept(indices, tokens, op.requests)
            if op.num_logprobs is not None:
                self.outputs.add_logprobs(_logprobs(op, result, range(op.num_rows)))
            return ends
        rows.num_outstanding[indices[alive]] -= 1
        good = alive & wanted
        positions = good.nonzero()[0]
        ends = self._accept(indices[positions], tokens[positions], [op.requests[i] for i in positions.tolist()])
        if op.num_logprobs is not None:
            self.outputs.add_logprobs(_logprobs(op, result, positions.tolist()))
        self._accept_late(op, result, alive, wanted)
        self._end_failed(op, result)
        return ends

    def _accept(self, indices: npt.NDArray[np.intp], tokens: Int32Array, requests: list[Request]) -> list[tuple[Request, bool]]:
        """Append one token each to requests that still hold the row they ran in; returns what `_ends` does."""
        values: list[int] = tokens.tolist()
        self.late.hand_out()
        any(map(array.append, [request.stored for request in requests], values))  # which all return None
        self._placement.rows.num_known[indices] += 1
        self.outputs.requests += requests
        self.outputs.tokens += values
        return self._ends(indices, tokens, requests)

    def _ends(self, indices: npt.NDArray[np.intp], tokens: Int32Array, requests: list[Request]) -> list[tuple[Request, bool]]:
        """Those that have just had their last token, each with whether a stop token ended it."""
        rows = self._placement.rows
        if rows.stop_ids.shape[1] == 1:
            stopped = rows.stop_ids.ravel().take(indices) == tokens
        else:
            stopped = (rows.stop_ids.take(indices, axis=0) == tokens[:, None]).any(axis=1)
        ended = stopped | (rows.num_known.take(indices) >= rows.limit_len.take(indices))
        return [(requests[position], bool(stopped[position])) for position in ended.nonzero()[0].tolist()]

    def _accept_late(self, op: ForwardOp, result: StepResult, alive: BoolArray, wanted: BoolArray) -> None:
        """A retracted request takes the tokens of its outstanding steps, and may end by them; one that is over takes none."""
        for position in np.flatnonzero(~alive).tolist():
            request = op.requests[position]
            if request.state is State.FINISHED:
                continue
            request.num_outstanding -= 1
            if wanted[position]:
                token = int(result.tokens[position])
                request.tokens.append(token)
                self.outputs.requests.append(request)
                self.outputs.tokens.append(token)
                if op.num_logprobs is not None:
                    self.outputs.add_logprobs(_logprobs(op, result, [position]))
                stopped = token in request.stop_ids
                if stopped or len(request.tokens) >= request.limit_len:
                    self._end(request, stopped)

    def _end_failed(self, op: ForwardOp, result: StepResult) -> None:
        if result.row_status is None:
            return
        for position in np.flatnonzero(result.row_status).tolist():
            request = op.requests[position]
            if request.state is State.FINISHED:
                continue
            if result.row_status[position] == RowStatus.CLAMPED:
                width = self._config.max_pages_per_row
                self._finish(request, FinishReason.LENGTH, f"its row reached the mirror's width of {width} pages")
            else:
                self._finish(request, FinishReason.FAILED, "the model's logits for this request were not finite")

    def _end(self, request: Request, stopped: bool) -> None:
        self._finish(request, FinishReason.STOP if stopped else request.limit_reason, "")


def _check_logprobs(op: ForwardOp, result: StepResult, wanted: BoolArray) -> None:
    """Raises UnexpectedResultError unless each row that wants log probabilities has as many as it wants."""
    assert op.num_logprobs is not None
    if not (asking := wanted & (op.num_logprobs >= 0)).any():
        return
    if result.logprobs is None or len(result.logprobs) != op.num_rows:
        found = "no" if result.logprobs is None else str(len(result.logprobs))
        raise UnexpectedResultError(f"step {op.step} returned {found} log probabilities for {op.num_rows} rows")
    if np.isnan(result.logprobs[asking]).any():
        raise UnexpectedResultError(f"step {op.step} returned no log probability for a row that wants one")
    most = int(op.num_logprobs[asking].max())
    if most == 0:
        return
    top = result.top_tokens
    if top is None or result.top_logprobs is None or top.shape != result.top_logprobs.shape or len(top) != op.num_rows:
        raise UnexpectedResultError(f"step {op.step} returned no top tokens that fit {op.num_rows} rows")
    if top.shape[1] < most:
        raise UnexpectedResultError(f"step {op.step} returned {top.shape[1]} top tokens a row, {most} are wanted")


def _logprobs(op: ForwardOp, result: StepResult, positions: Sequence[int]) -> list[TokenLogprobs | None]:
    """Of the rows at these positions of the op, which `check` found to have what they want; None for rows that want none."""
    assert op.num_logprobs is not None
    found: list[TokenLogprobs | None] = []
    for position in positions:
        count = int(op.num_logprobs[position])
        if count < 0 or result.logprobs is None:
            found.append(None)
            continue
        top_tokens: list[int] = []
        top_logprobs: list[float] = []
        if count and result.top_tokens is not None and result.top_logprobs is not None:
            top_tokens = result.top_tokens[position, :count].tolist()
            top_logprobs = result.top_logprobs[position, :count].tolist()
        found.append(TokenLogprobs(float(result.logprobs[position]), top_tokens, top_logprobs))
    return found
