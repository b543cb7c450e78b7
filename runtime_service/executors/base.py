"""The one interface between the runtime's protocol half and a model.

An executor is called in the runtime's execution thread only, with one `ForwardBatch` at a time, after the batch's page rows
were applied to the mirror. It writes KV, attends and samples, and decides nothing about pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import Int32Array, LeaseStart


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


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much KV a model's creator made room for: stated by the settings, or derived from the memory that is there."""

    num_pages: int  # usable pages; ids 1 ... num_pages, page 0 is reserved
    max_pages_per_row: int  # width of the mirror


@dataclass(slots=True)
class ExecutionResult:
    """What a model makes of one batch of R rows."""

    tokens: Int32Array  # [R], NO_TOKEN where the row sampled nothing
    row_status: npt.NDArray[np.uint8]  # [R], RowStatus


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

    def execute(self, batch: ForwardBatch) -> ExecutionResult:
        """Compute one step. Any exception makes it a failed step: the session is reset, nothing of it is delivered."""

    def reset(self) -> None:
        """Forget all rows. KV memory need not be cleared: a new session never reads what it did not write."""
