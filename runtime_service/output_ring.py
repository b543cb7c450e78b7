"""Device results on their way to the host, several steps at a time.

A step's result columns are first copied into a buffer of the step's own on the device, then, with one asynchronous copy, into a
pinned buffer on the host, and an event is recorded behind that. So the copy reads neither the feedback array, nor the static
output of a captured graph, nor anything else that the next step writes, and the host waits for the event of the step that it
wants to read instead of for the whole stream.

The buffers form a ring. It has one more than the steps that may be started and not waited for, so that a buffer is never in
use when its turn comes, unless a reset left its step behind; then the step's event is waited for and its result is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.errors import RuntimeServiceError

NDArray = npt.NDArray[Any]

_ALIGNMENT = 16
_NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


class OutputLostError(RuntimeServiceError):
    """A result was asked for after its buffer had been taken by a later step."""


class OutputEvent(Protocol):
    """What the ring needs of `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark the point in the current stream behind the copy."""

    def query(self) -> bool:
        """Whether the stream has passed that point; raises what the work before it failed with."""

    def synchronize(self) -> None:
        """Wait until the stream has passed that point; raises likewise."""


@dataclass(slots=True)
class _Slot:
    device: torch.Tensor  # uint8 [capacity]
    host: torch.Tensor  # uint8 [capacity], pinned
    event: OutputEvent
    tenant: PendingOutput | None = None


@dataclass(frozen=True, slots=True)
class _Column:
    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: type[np.generic]


class PendingOutput:
    """The columns of one step, in the order in which they were given to `OutputRing.start`."""

    def __init__(self, slot: _Slot, columns: list[_Column]) -> None:
        self._slot: _Slot | None = slot
        self._columns = columns
        self._arrays: list[NDArray] | None = None

    def ready(self) -> bool:
        """Whether `wait()` would return, or raise, at once."""
        return self._slot is None or self._slot.event.query()

    def wait(self) -> list[NDArray]:
        """The columns on the host; copies that stay what they are. Frees the buffer. Raises OutputLostError."""
        if self._arrays is None:
            slot, self._slot = self._slot, None
            if slot is None:
                raise OutputLostError("the buffer of this step's result was taken by a later step")
            slot.tenant = None
            slot.event.synchronize()
            copied: npt.NDArray[np.uint8] = slot.host.numpy()
            self._arrays = [
                copied[column.begin : column.end].copy().view(column.dtype).reshape(column.shape) for column in self._columns
            ]
        return self._arrays

    def give_up(self) -> None:
        """The buffer is needed: wait until nothing writes to it any more."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.event.synchronize()


class OutputRing:
    """`depth` pairs of a device buffer and a pinned host buffer, each growing to the largest step it has carried."""

    def __init__(self, device: torch.device, depth: int, capacity: int = 4096) -> None:
        self._device = device
        self._slots = [self._new_slot(capacity) for _ in range(depth)]
        self._next = 0

    def _new_slot(self, capacity: int) -> _Slot:
        device = torch.empty(capacity, dtype=torch.uint8, device=self._device)
        return _Slot(device, self._new_host_buffer(capacity), self._new_event())

    def _new_host_buffer(self, capacity: int) -> torch.Tensor:
        return torch.empty(capacity, dtype=torch.uint8, pin_memory=True)

    def _new_event(self) -> OutputEvent:
        event: OutputEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def _copy_to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        host.copy_(device, non_blocking=True)

    def start(self, columns: Sequence[torch.Tensor]) -> PendingOutput:
        """Queue the copies of these tensors behind the work of the current stream.

        Args:
            columns: on the device, of int64, int32, float32, uint8 or bool. They may be overwritten by work queued later.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.tenant is not None:
            tenant, slot.tenant = slot.tenant, None
            tenant.give_up()
        layout, end = [], 0
        for column in columns:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + column.nbytes
            layout.append(_Column(begin, end, tuple(column.shape), _NUMPY_DTYPES[column.dtype]))
        if slot.host.numel() < end:
            capacity = max(end, 2 * slot.host.numel())
            slot.device = torch.empty(capacity, dtype=torch.uint8, device=self._device)
            slot.host = self._new_host_buffer(capacity)
        for column, place in zip(columns, layout, strict=True):
            slot.device[place.begin : place.end].view(column.dtype).view(column.shape).copy_(column)
        self._copy_to_host(slot.host[:end], slot.device[:end])
        slot.event.record()
        pending = PendingOutput(slot, layout)
        slot.tenant = pending
        return pending
