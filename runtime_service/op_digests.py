"""Verification: digests of mirror rows, compared on the device with what the scheduler expects, then sent back with the result.

An op may state the digest that each of its rows must have once it is applied. A row that differs is *masked* in this step: the
model sees row 0, the padding sink, in its place, so that it reads and writes the dummy page only, gets no token, and feeds none
back. Which rows these are is known on the device before the KV writes, and on the host only with the result: nothing waits.
What follows from a difference is the scheduler's affair, which compares the digests itself.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from runtime_service.kernels.row_digest import row_digest
from runtime_service.ops import BoolArray, ForwardOp, UInt64Array
from runtime_service.output_ring import OutputRing, PendingOutput
from runtime_service.req_to_page import ReqToPage
from runtime_service.staging import StagingRing

RING_DEPTH = 4
"""Steps whose digests may be on their way to the host: `MAX_OVERLAP_DEPTH + 2` of the session."""


class DigestOutputs(Protocol):
    """What is needed of `OutputRing`."""

    def start(self, columns: list[torch.Tensor]) -> PendingOutput:
        """Queue the copies of these tensors to the host."""


class PendingDigests:
    """Digests of one op: on the device at once, on the host when `wait` returns."""

    def __init__(self, op: ForwardOp, found: torch.Tensor, masked: torch.Tensor | None, output: PendingOutput | None) -> None:
        self.masked = masked
        """bool [R] on the device, the op's rows that differ; None: none does, or the op states no digests of its rows."""
        self._op = op
        self._output = output
        self._found: UInt64Array | None = None if output else found.numpy().view(np.uint64)

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._output is None or self._output.ready()

    def wait(self) -> tuple[UInt64Array, BoolArray]:
        """Digests [R + V] of the op's rows and its `verify_rows`, and which of the op's rows were masked, [R]."""
        if self._output is not None:
            self._found = self._output.wait()[0].view(np.uint64)
            self._output = None
        found, expected = self._found, self._op.row_digests
        assert found is not None
        if not len(expected):
            return found, np.zeros(self._op.num_rows, dtype=np.bool_)
        return found, found[: len(expected)] != expected


class RowDigests:
    """Computes what the ops of one runner ask for."""

    def __init__(self, mirror: ReqToPage) -> None:
        device = mirror.table.device
        self._mirror = mirror
        self._staging = StagingRing(device, torch.int64)
        self._outputs: DigestOutputs | None = None if device.type == "cpu" else OutputRing(device, RING_DEPTH)

    def start(self, op: ForwardOp) -> PendingDigests | None:
        """Queue the digests of an op that was just applied to the mirror; None: it asks for none."""
        num_own, num_digests = len(op.row_digests), op.num_digests
        if not num_digests:
            return None
        mirror = self._mirror
        numbers = np.concatenate((op.req_pool_indices[:num_own], op.verify_rows))
        packed = self._staging.begin(3 * num_digests + num_own)
        np.concatenate(
            (numbers, mirror.row_lens[numbers], mirror.valid_lens[numbers], op.row_digests.view(np.int64)), out=packed
        )
        rows, row_lens, valid_lens, expected = torch.split(self._staging.upload(), [num_digests] * 3 + [num_own])
        found = row_digest(mirror.table, rows, row_lens, valid_lens)
        masked = found[:num_own] != expected if num_own else None
        if self._outputs is not None:
            return PendingDigests(op, found, masked, self._outputs.start([found]))
        # On the host it costs nothing to know already that no row differs, and saves the model from looking.
        return PendingDigests(op, found, masked if masked is not None and masked.any() else None, None)
