"""Result columns on their way to the host, against a device that copies as late as it is allowed to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from runtime_service.executors.base import DeviceResult, ExecutionResult
from runtime_service.output_ring import OutputEvent, OutputLostError, OutputRing


class LateEvent:
    """An event of a stream that is far behind: the copy before it runs when somebody waits for it."""

    def __init__(self, pending: list[Callable[[], object]]) -> None:
        self._pending = pending
        self._copies: list[Callable[[], object]] = []
        self.num_synchronized = 0
        self.error: Exception | None = None

    def record(self) -> None:
        self._copies = [*self._pending]
        self._pending.clear()

    def query(self) -> bool:
        return not self._copies

    def synchronize(self) -> None:
        self.num_synchronized += 1
        if self.error is not None:
            raise self.error
        for copy in self._copies:
            copy()
        self._copies = []


class LateRing(OutputRing):
    """A ring whose copies to the host run only when the ring waits for them."""

    def __init__(self, depth: int, capacity: int = 64) -> None:
        self.pending: list[Callable[[], object]] = []
        self.num_buffers = 0
        super().__init__(torch.device("cpu"), depth, capacity)

    def _new_host_buffer(self, capacity: int) -> torch.Tensor:
        self.num_buffers += 1
        return torch.full((capacity,), 0xEE, dtype=torch.uint8)

    def _new_event(self) -> OutputEvent:
        return LateEvent(self.pending)

    def _copy_to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.pending.append(lambda: host.copy_(device))

    def event(self, slot: int) -> LateEvent:
        event = self._slots[slot].event
        assert isinstance(event, LateEvent)
        return event


def test_columns_come_back_exactly() -> None:
    """Several columns of all dtypes and shapes, empty ones included, arrive in order, bit for bit."""
    ring = LateRing(2)
    columns = [
        torch.tensor([3, -1, 2**40]),
        torch.tensor([[1.5, float("nan")], [-0.0, 2.0], [0.0, 1e-40]]),
        torch.tensor([True, False, True]),
        torch.empty((3, 0), dtype=torch.int32),
        torch.tensor([250], dtype=torch.uint8),
        torch.tensor([-7, 8], dtype=torch.int32),
    ]
    arrays = ring.start(columns).wait()
    for array, column in zip(arrays, columns, strict=True):
        assert array.dtype == column.numpy().dtype
        np.testing.assert_array_equal(array, column.numpy())


def test_what_the_next_step_writes_does_not_reach_the_result() -> None:
    """Tensors given to the ring may be overwritten at once: the copy is from a buffer of the step's own."""
    ring = LateRing(3)
    static = torch.zeros(4, dtype=torch.int64)
    outputs = []
    for step in range(3):
        static.fill_(step)
        outputs.append(ring.start([static]))
    static.fill_(-5)
    assert [output.wait()[0].tolist() for output in outputs] == [[step] * 4 for step in range(3)]


def test_ring_is_used_again_after_reading() -> None:
    """With each step read before its buffer's turn comes, any number of steps goes through the ring, and reading waits once."""
    ring = LateRing(3)
    outputs = []
    for step in range(20):
        outputs.append(ring.start([torch.tensor([step])]))
        if step >= 2:
            assert outputs[step - 2].wait()[0].tolist() == [step - 2]
    first = outputs[0].wait()[0]
    assert first.tolist() == [0], "read before, and not a view of the buffer"
    assert outputs[19].wait() is outputs[19].wait()
    assert ring.num_buffers == 3


def test_result_left_behind_is_lost_not_mixed_up() -> None:
    """A step that a reset left unread loses its buffer: its copy is waited for first, and asking for it is an error."""
    ring = LateRing(2)
    left = ring.start([torch.tensor([1])])
    ring.start([torch.tensor([2])])
    event = ring.event(0)
    later = ring.start([torch.tensor([3])])
    assert event.num_synchronized == 1
    assert left.ready()
    with pytest.raises(OutputLostError):
        left.wait()
    assert later.wait()[0].tolist() == [3]


def test_buffers_grow() -> None:
    """A step larger than its buffer gets a larger one; the others stay."""
    ring = LateRing(2, capacity=16)
    small, large = ring.start([torch.tensor([1])]), ring.start([torch.arange(1000)])
    assert ring.num_buffers == 3
    assert small.wait()[0].tolist() == [1]
    assert large.wait()[0].tolist() == list(range(1000))


def test_readiness_and_failure_are_the_events() -> None:
    """Nothing is ready before its copy has run; what the device failed with is raised where the result is read."""
    ring = LateRing(2)
    output = ring.start([torch.tensor([1])])
    assert not output.ready()
    ring.event(0).synchronize()
    assert output.ready()
    failing = ring.start([torch.tensor([1])])
    ring.event(1).error = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        failing.wait()


def test_device_result_is_made_once() -> None:
    """The result is made from the copied columns when it is first asked for, and stays the same object."""
    ring = LateRing(2)
    tokens = torch.tensor([5, -1])
    calls = []

    def finish(columns: list[np.ndarray]) -> ExecutionResult:
        calls.append(len(columns))
        return ExecutionResult(columns[0].astype(np.int32), np.zeros(2, np.uint8))

    pending = DeviceResult(tokens, ring.start([tokens]), finish)
    assert not pending.ready()
    assert pending.device_tokens is tokens
    result = pending.wait()
    assert pending.wait() is result
    assert pending.ready()
    assert (result.tokens.tolist(), calls) == ([5, -1], [1])


def test_finished_result_is_a_pending_result() -> None:
    """A result that is there has nothing to wait for and feeds its tokens from the host."""
    result = ExecutionResult(np.array([1], np.int32), np.zeros(1, np.uint8))
    assert result.ready()
    assert result.wait() is result
    assert result.device_tokens is None


@pytest.mark.gpu
def test_on_a_device() -> None:
    """The copy is asynchronous, pinned, and read after its event, with the source overwritten right behind it."""
    device = torch.device("cuda")
    ring = OutputRing(device, depth=4)
    static = torch.zeros(256, dtype=torch.int64, device=device)
    outputs = []
    for step in range(4):
        torch.cuda._sleep(20_000_000)
        static.fill_(step)
        outputs.append(ring.start([static]))
    static.fill_(-1)
    assert not outputs[3].ready()
    assert [output.wait()[0].tolist() for output in outputs] == [[step] * 256 for step in range(4)]
