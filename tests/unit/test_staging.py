"""The staging ring against a device that copies as late as it is allowed to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runtime_service.staging import CopyEvent, StagingRing


class LateEvent:
    """An event of a stream that is far behind: the copy before it runs when somebody waits for it."""

    def __init__(self, pending: list[Callable[[], object]]) -> None:
        self._pending = pending
        self._copies: list[Callable[[], object]] = []

    def record(self) -> None:
        self._copies = [*self._pending]
        self._pending.clear()

    def synchronize(self) -> None:
        for copy in self._copies:
            copy()
        self._copies = []


class LateRing(StagingRing):
    """A ring whose host buffers are read only when the ring waits for them, and which counts its buffers."""

    def __init__(self, capacity: int, depth: int) -> None:
        self.pending: list[Callable[[], object]] = []
        self.num_buffers = 0
        super().__init__(torch.device("cpu"), torch.int32, capacity, depth)

    @property
    def _is_asynchronous(self) -> bool:
        return True

    def _new_host_buffer(self, capacity: int) -> torch.Tensor:
        self.num_buffers += 1
        return torch.empty(capacity, dtype=torch.int32)

    def _new_event(self) -> CopyEvent:
        return LateEvent(self.pending)

    def _copy(self, host: torch.Tensor) -> torch.Tensor:
        on_device = torch.full_like(host, -1)
        self.pending.append(lambda: on_device.copy_(host))
        return on_device

    def finish(self) -> None:
        for slot in self._slots:
            slot.event.synchronize()


def test_a_larger_step_grows_one_buffer() -> None:
    """A step above the capacity is staged whole, and later steps of that size need no new buffer."""
    ring = LateRing(capacity=4, depth=1)
    for size in (3, 9, 8, 9):
        ring.begin(size)[:] = size
        tensor = ring.upload()
        ring.finish()
        assert tensor.tolist() == [size] * size
    assert ring.num_buffers == 2


def test_a_step_given_up_between_begin_and_upload_leaves_no_trace() -> None:
    """A begin without upload is replaced by the next one."""
    ring = LateRing(capacity=4, depth=2)
    ring.begin(4)[:] = 1
    ring.begin(2)[:] = 2
    tensor = ring.upload()
    ring.finish()
    assert tensor.tolist() == [2, 2]


def test_on_the_cpu_earlier_steps_keep_their_arrays() -> None:
    """Without copies every step has memory of its own."""
    ring = StagingRing(torch.device("cpu"), torch.int64, capacity=2, depth=1)
    tensors = []
    for value in (1, 2, 3):
        ring.begin(2)[:] = value
        tensors.append(ring.upload())
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [2, 2], [3, 3]]


def test_upload_without_begin_is_an_error() -> None:
    """There is nothing to copy before the first begin, nor twice."""
    ring = StagingRing(torch.device("cpu"), torch.int32)
    with pytest.raises(RuntimeError, match="without begin"):
        ring.upload()
    ring.begin(1)
    ring.upload()
    with pytest.raises(RuntimeError, match="without begin"):
        ring.upload()
