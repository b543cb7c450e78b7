"""The one interface between the runtime's protocol half and a model.

An executor is called in the runtime's execution thread only, with one `ForwardBatch` at a time, after the batch's page rows
were applied to the mirror. It writes KV, attends and samples, and decides nothing about pages.

On a GPU `execute` only queues the step on the compute stream and returns a `PendingResult`, so that the next step can be queued
before this one's tokens are on the host. On a CPU the step is over when `execute` returns, and its `ExecutionResult` is a
pending result that has nothing left to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import Float32Array, Int32Array, LeaseStart
from runtime_service.output_ring import NDArray, PendingOutput


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a model that the scheduler must know."""

    name: str
    architecture: str
    vocab_size: int
    max_context: int  # tokens; 0: no limit
    default_stop_ids: tuple[int, ...]
    tokenizer_path: Path | None
    device: str
    dtype: str
    greedy_only: bool = False  # it has no logits, so sampling parameters that need them are refused
    # Its steps, those of few rows at least, take less time than it takes to hand them to another thread and never wait for
    # anything. They may run in the event loop.
    short_steps: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much KV a model's creator made room for: stated by the settings, or derived from the memory that is there."""

    num_pages: int  # usable pages; ids 1 ... num_pages, page 0 is reserved
    max_pages_per_row: int  # width of the mirror


class PendingResult(Protocol):
    """A step that was started. Whatever it needs of per-row host state was copied when it was started."""

    @property
    def device_tokens(self) -> torch.Tensor | None:
        """Sampled tokens for the next step's decode rows, int64 [R] on the device, -1 where the row sampled nothing.

        They are read by later work on the compute stream, without waiting. None: the tokens of `wait()` are already there.
        """

    def ready(self) -> bool:
        """Whether `wait()` would return at once."""

    def wait(self) -> ExecutionResult:
        """The result, once the device has reached it; raises what the step failed with. The same object every time."""


@dataclass(slots=True)
class ExecutionResult:
    """What a model makes of one batch of R rows. As a `PendingResult` it is one that is over."""

    tokens: Int32Array  # [R], NO_TOKEN where the row sampled nothing
    row_status: npt.NDArray[np.uint8]  # [R], RowStatus
    # Log probabilities, in the shapes of `StepResult`; None where no row asked.
    logprobs: Float32Array | None = None
    top_tokens: Int32Array | None = None
    top_logprobs: Float32Array | None = None

    @property
    def device_tokens(self) -> torch.Tensor | None:
        return None

    def ready(self) -> bool:
        """True."""
        return True

    def wait(self) -> ExecutionResult:
        """This result."""
        return self


class DeviceResult:
    """A `PendingResult` whose columns are on their way to the host.

    Args:
        device_tokens: int64 [R], -1 where the row sampled nothing; belongs to this step alone.
        output: the copies that were started, `device_tokens` usually among them.
        finish: makes the result from the copied columns; called once. It must use nothing that a later step may change.
    """

    def __init__(
        self, device_tokens: torch.Tensor, output: PendingOutput, finish: Callable[[list[NDArray]], ExecutionResult]
    ) -> None:
        self._device_tokens = device_tokens
        self._output = output
        self._finish = finish
        self._result: ExecutionResult | None = None

    @property
    def device_tokens(self) -> torch.Tensor | None:
        return self._device_tokens

    def ready(self) -> bool:
        """See `PendingResult`."""
        return self._result is not None or self._output.ready()

    def wait(self) -> ExecutionResult:
        """See `PendingResult`."""
        if self._result is None:
            self._result = self._finish(self._output.wait())
        return self._result


class ModelExecutor(Protocol):
    """A model behind the mirror."""

    @property
    def info(self) -> ModelInfo: ...

    def warm_up(self) -> None:
        """Compile and allocate whatever the first step would otherwise pay for; called once before the runtime's hello."""

    def start_leases(self, leases: list[LeaseStart]) -> None:
        """Take note of the requests that begin a lease in the next batch; raises nothing, parameters were checked."""

    def release_rows(self, rows: Int32Array) -> None:
        """Forget the state of these row numbers."""

    def execute(self, batch: ForwardBatch) -> PendingResult:
        """Start one step. Any exception, here or in `wait()`, makes it a failed step: the session is reset.

        Steps may be started before earlier ones were waited for, at most `MAX_OVERLAP_DEPTH + 1` of them.
        """

    def reset(self) -> None:
        """Forget all rows. KV memory need not be cleared: a new session never reads what it did not write."""
