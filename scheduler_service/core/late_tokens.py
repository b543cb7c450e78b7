"""Tokens of rows that decode step after step, kept as columns until somebody asks for them.

A step gives each of its rows one token, and to append each to an array of its own costs more than all the rest that becomes of
a result. So as long as the rows stay the same, a step's tokens are written down in one go, a line of a block, and the requests
get theirs together: when `Request.tokens` of any of them is read, when the rows change, or after `NUM_STEPS` steps.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from scheduler_service.core.ops import Int32Array

if TYPE_CHECKING:
    from scheduler_service.core.request import Request

NUM_STEPS = 32
"""Steps after which requests get their tokens at the latest."""

_NO_LINES: Int32Array = np.empty((0, 0), dtype=np.int32)


class LateTokens:
    """Tokens of the last `count` steps, which their requests do not have yet; one for all requests of a scheduler."""

    __slots__ = ("_lines", "_requests", "count")

    def __init__(self) -> None:
        self.count = 0
        self._requests: list[Request] = []
        self._lines = _NO_LINES  # [NUM_STEPS, R], of which `count` count

    def add(self, requests: list[Request], tokens: Int32Array) -> None:
        """One token for each of `requests`; the same list must hold the same requests each time."""
        if requests is not self._requests:
            self.hand_out()
            self._requests, self._lines = requests, np.empty((NUM_STEPS, len(requests)), dtype=np.int32)
        self._lines[self.count] = tokens
        self.count += 1
        if self.count == NUM_STEPS:
            self.hand_out()

    def hand_out(self) -> None:
        """Append to each request what it has got; if that fails, no request has it."""
        if not self.count:
            return
        stored = [request.stored for request in self._requests]
        lengths = list(map(len, stored))
        lines = self._lines[: self.count]
        try:
            # The calls all return None.
            if self.count == 1:
                any(map(array.append, stored, lines[0].tolist()))
            else:
                any(map(array.frombytes, stored, lines.T.copy().view(np.uint8)))
            self.count = 0
        except BaseException:
            for tokens, length in zip(stored, lengths, strict=True):
                del tokens[length:]
            raise
        self._requests, self._lines = [], _NO_LINES


NEVER_LATE = LateTokens()
"""Of requests without a scheduler: it gets no tokens."""
