"""Host buffers from which per-step arrays go to the device, one copy a step.

On a GPU a step's host arrays are packed into one pinned buffer and copied asynchronously. The copy reads the buffer when the
stream gets to it, which may be several steps later, so a buffer must not be written again before its copy has run: there is
a small ring of them, and each is taken again only after the event that follows its copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

NDArray = npt.NDArray[Any]


class CopyEvent(Protocol):
    """What the ring needs of `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark the point in the current stream behind the copy."""

    def synchronize(self) -> None:
        """Wait until the stream has passed that point."""


@dataclass(slots=True)
class _Slot:
    host: torch.Tensor
    event: CopyEvent
    in_use: bool = False


class StagingRing:
    """A ring of `depth` host buffers of one dtype, each growing to the largest step it has carried.

    Use `begin(n)`, fill the array it returns, then `upload()`. On the CPU nothing is copied: `begin` gives new memory each time
    and `upload` returns the tensor over it, so that arrays of an earlier step stay what they were. With `kept_on_host` False
    nobody needs them once the next step begins, and there is one buffer on the CPU, too: new memory costs a page fault for
    every 4 KiB.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, capacity: int = 4096, depth: int = 4, *, kept_on_host: bool = True
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._host_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._kept_on_host = kept_on_host
        self._host_buffer: NDArray = np.empty(0, self._host_dtype)
        self._current: torch.Tensor | None = None
        self._slots: list[_Slot] = []
        self._next = 0
        if self._is_asynchronous:
            self._slots = [_Slot(self._new_host_buffer(capacity), self._new_event()) for _ in range(depth)]

    @property
    def _is_asynchronous(self) -> bool:
        return self._device.type != "cpu"

    def _new_host_buffer(self, capacity: int) -> torch.Tensor:
        return torch.empty(capacity, dtype=self._dtype, pin_memory=True)

    def _new_event(self) -> CopyEvent:
        event: CopyEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def _copy(self, host: torch.Tensor) -> torch.Tensor:
        # A new device tensor each time: it belongs to the caller, and the allocator orders its memory by stream.
        return host.to(self._device, non_blocking=True)

    def begin(self, num_entries: int) -> NDArray:
        """Return an uninitialised host array of that length, once no earlier copy can still read its memory."""
        if not self._slots:
            if self._kept_on_host:
                array = np.empty(num_entries, self._host_dtype)
            else:
                if len(self._host_buffer) < num_entries:
                    self._host_buffer = np.empty(max(num_entries, 2 * len(self._host_buffer)), self._host_dtype)
                array = self._host_buffer[:num_entries]
            self._current = torch.from_numpy(array)  # half of what the other way round costs
            return array
        slot = self._slots[self._next]
        if slot.in_use:
            slot.event.synchronize()
            slot.in_use = False
        if slot.host.numel() < num_entries:
            slot.host = self._new_host_buffer(max(num_entries, 2 * slot.host.numel()))
        self._current = slot.host[:num_entries]
        staged: NDArray = self._current.numpy()
        return staged

    def upload(self) -> torch.Tensor:
        """Start the copy of the array last begun and return its tensor on the device, valid for later work on the stream."""
        if self._current is None:
            raise RuntimeError("upload() without begin()")
        host, self._current = self._current, None
        if not self._slots:
            return host
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        device_tensor = self._copy(host)
        slot.event.record()
        slot.in_use = True
        return device_tensor
