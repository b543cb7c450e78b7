"""What the runtime is asked to do in one step and what it answers: plain numpy columns.

Column for column these are the messages of `proto/pagemirror/v1/forward.proto`, whose comments are the reference.
`runtime_service.wire` converts; nothing else in the runtime knows a message class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
UInt64Array = npt.NDArray[np.uint64]

NO_TOKEN = -1
"""Entry of `StepResult.tokens` for a row that sampled nothing."""


NO_ROWS: Int32Array = np.empty(0, dtype=np.int32)
NO_DIGESTS: UInt64Array = np.empty(0, dtype=np.uint64)


class RowStatus(IntEnum):
    """How one row fared in a step; the numbers are those of the wire."""

    OK = 0
    NON_FINITE = 1
    CLAMPED = 2


class RefusalCode(IntEnum):
    """Why an op was not executed; the numbers are those of the wire, `runtime.proto` explains each."""

    SKIPPED = 1
    STEP_FAILED = 2
    OUT_OF_MEMORY = 3
    UNKNOWN_SESSION = 4
    STEP_OUT_OF_ORDER = 5
    MALFORMED = 6
    ROW_OUT_OF_RANGE = 7
    ROW_REPEATED = 8
    STALE_GENERATION = 9
    LEASE_NOT_STARTED = 10
    LENGTH_MISMATCH = 11
    GAP = 12
    NOT_CONTIGUOUS = 13
    ROW_TOO_SHORT = 14
    NEVER_SAMPLED = 15
    PAGE_OUT_OF_RANGE = 16
    PAGE_REPEATED = 17
    TOKEN_OUT_OF_RANGE = 18
    BAD_SAMPLING = 19


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen; the defaults are greedy. Ranges are those of `SamplingParams` in forward.proto."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    num_logprobs: int | None = None  # None: no log probabilities

    @property
    def has_penalty(self) -> bool:
        """Whether the tokens so far matter."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class LeaseStart:
    """What must be known of a request before the first op of a lease."""

    req_pool_index: int
    request_id: str
    sampling: SamplingParams = GREEDY
    stop_ids: tuple[int, ...] = ()
    prompt_len: int = 0
    traceparent: str = ""
    history: bytes = b""  # packed little-endian int32: tokens [0, num_computed) where a penalty is on


@dataclass(slots=True)
class ForwardOp:
    """One step, R rows: extend rows `[0, num_extend_rows)`, then decode rows."""

    session_no: int
    step: int
    req_pool_indices: Int32Array  # [R]
    row_generations: Int32Array  # [R]
    row_lens: Int32Array  # [R], pages
    begins: Int32Array  # [R], pages
    sizes: Int32Array  # [R], pages
    full_refresh: BoolArray  # [R]
    occupied_pages: Int32Array  # concatenated: row_len entries where full_refresh, else size entries
    num_computed: Int32Array  # [R], tokens
    num_extend_rows: int
    input_lens: Int32Array  # [R], tokens
    input_ids: Int32Array  # concatenated over the extend rows
    sample: BoolArray  # [R]
    released_rows: Int32Array
    lease_starts: list[LeaseStart] = field(default_factory=list)
    # Verification: what each row's digest must be after the op, [R] or empty; then other rows, and theirs.
    row_digests: UInt64Array = field(default_factory=lambda: NO_DIGESTS)
    verify_rows: Int32Array = field(default_factory=lambda: NO_ROWS)
    verify_digests: UInt64Array = field(default_factory=lambda: NO_DIGESTS)

    @property
    def num_rows(self) -> int:
        return len(self.req_pool_indices)

    @property
    def num_digests(self) -> int:
        """Entries of the result's `digests`."""
        return len(self.row_digests) + len(self.verify_rows)


class PageColumns(Protocol):
    """The columns of an op that a mirror reads; a `PageUpdate` has them, too."""

    req_pool_indices: Int32Array
    row_lens: Int32Array
    begins: Int32Array
    sizes: Int32Array
    full_refresh: BoolArray
    occupied_pages: Int32Array
    released_rows: Int32Array


@dataclass(slots=True)
class StepResult:
    """The answer to one op: one entry per row of that op, in its order."""

    session_no: int
    step: int
    tokens: Int32Array  # [R], NO_TOKEN where the row sampled nothing
    row_status: npt.NDArray[np.uint8]  # [R], RowStatus
    logprobs: Float32Array | None = None  # [R], not-a-number where the row did not ask; None: no row asked
    top_tokens: Int32Array | None = None  # [R, K], NO_TOKEN beyond what a row asked for
    top_logprobs: Float32Array | None = None  # [R, K], not-a-number beyond what a row asked for
    digests: UInt64Array = field(
        default_factory=lambda: NO_DIGESTS
    )  # the mirror's, for `row_digests` and then for `verify_rows` of the op
    apply_us: int = 0  # from beginning with the op to having it applied, microseconds
    step_us: int = 0  # to having this result
