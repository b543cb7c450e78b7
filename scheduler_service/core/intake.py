"""From a StepResult to tokens of requests, and to requests that end by them.

A result is read by the op it answers: rows may have changed hands since. Rows whose request still holds them cost a fixed
number of numpy calls and one loop that appends the tokens; rows that failed, or were left meanwhile, are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import UnexpectedResultError
from scheduler_service.core.ops import BoolArray, ForwardOp, Int32Array, RowStatus, StepResult
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.states import State


@dataclass(slots=True)
class Outputs:
    """What happened to requests since it was last asked: accepted tokens as parallel lists, and requests that ended."""

    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)

    @property
    def columns(self) -> tuple[list[Request], list[int]]:
        return self.requests, self.tokens


class ResultIntake:
    """Hands tokens to requests.

    Args:
        finish: called with (request, reason, detail); must end the request at once.
    """

    def __init__(
        self, config: SchedulerConfig, placement: Placement, finish: Callable[[Request, FinishReason, str], None]
    ) -> None:
        self.outputs = Outputs()
        self._config = config
        self._placement = placement
        self._finish = finish

    def take_outputs(self) -> Outputs:
        """Everything accepted and ended since the last call."""
        outputs, self.outputs = self.outputs, Outputs()
        return outputs

    def check(self, op: ForwardOp, result: StepResult) -> BoolArray:
        """Rows whose token counts, [R].

        Raises:
            UnexpectedResultError: one of them has no token of the vocabulary, or the columns do not fit the op.
        """
        if result.row_status is not None and len(result.row_status) != op.num_rows:
            raise UnexpectedResultError(f"step {op.step} returned {len(result.row_status)} statuses for {op.num_rows} rows")
        wanted = op.sample
        if result.row_status is not None and result.row_status.any():
            wanted = wanted & (result.row_status == RowStatus.OK)
        bad = wanted & ((result.tokens < 0) | (result.tokens >= self._config.vocab_size))
        if bad.any():
            raise UnexpectedResultError(f"step {op.step} returned {result.tokens[bad][:8].tolist()}, which are no tokens")
        return wanted

    def take(self, op: ForwardOp, result: StepResult, wanted: BoolArray) -> None:
        """Accept what `check` has found good; end requests that have their last token, and those whose row failed."""
        rows, indices, tokens = self._placement.rows, op.req_pool_indices, result.tokens
        alive = rows.live_generation[indices] == op.row_generations
        rows.num_outstanding[indices[alive]] -= 1
        if alive.all() and wanted.all():
            ends = self._accept(indices, tokens, op.requests)
        else:
            good = alive & wanted
            ends = self._accept(indices[good], tokens[good], [op.requests[i] for i in np.flatnonzero(good).tolist()])
            self._accept_late(op, result, alive, wanted)
            self._end_failed(op, result)
        for request, stopped in ends:
            self._end(request, stopped)

    def _accept(self, indices: Int32Array, tokens: Int32Array, requests: list[Request]) -> list[tuple[Request, bool]]:
        """Append one token each to requests that still hold the row they ran in.

        Returns those that end, each with whether a stop token ended it.
        """
        rows = self._placement.rows
        values: list[int] = tokens.tolist()
        for request, token in zip(requests, values, strict=True):
            request.tokens.append(token)
        rows.num_known[indices] += 1
        stopped = (rows.stop_ids[indices] == tokens[:, None]).any(axis=1)
        ended = stopped | (rows.num_known[indices] >= rows.limit_len[indices])
        self.outputs.requests += requests
        self.outputs.tokens += values
        return [(requests[position], bool(stopped[position])) for position in np.flatnonzero(ended).tolist()]

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
