"""What the scheduler core hands out and takes back: one ForwardOp a step, one StepResult for it, both plain numpy columns.

Column for column these are the messages of `proto/pagemirror/v1/forward.proto`, whose comments are the reference. The core
knows no message class; `scheduler_service.wire` converts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scheduler_service.core.request import Request
    from scheduler_service.core.steady import SteadyRows

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
UInt64Array = npt.NDArray[np.uint64]

NO_TOKEN = -1
"""Entry of `StepResult.tokens` for a row that sampled nothing."""


class Cause(StrEnum):
    """Which transition put a row into an op."""

    FIRST_CHUNK = "first_chunk"
    CONTINUATION = "continuation"
    PREFILL_DONE_TO_DECODE = "prefill_done_to_decode"
    DECODE = "decode"
    RESUME = "resume"


class RowStatus(IntEnum):
    """How one row fared in a step; the numbers are those of the wire."""

    OK = 0
    NON_FINITE = 1
    CLAMPED = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen; the defaults are greedy.

    `temperature` in [0, 100], 0 is greedy; `top_k` at least 1 or None for all; `top_p` in (0, 1]; `min_p` in [0, 1]; `seed`
    unsigned 64-bit; `min_new_tokens` counts output tokens before which stop ids are not sampled; `repetition_penalty` in
    (0, 100], 1 is none; `presence_penalty` and `frequency_penalty` in [-2, 2]; `logit_bias` at most 1,024 pairs of a token id
    and what is added to its logit, in [-100, 100]; `num_logprobs` in [0, 20], None for no log probabilities.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None

    @property
    def has_penalty(self) -> bool:
        """Whether the tokens so far matter."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


GREEDY = SamplingParams()


@dataclass(slots=True)
class LeaseStart:
    """What the runtime must know of a request before the first op of a lease."""

    req_pool_index: int
    request_id: str
    sampling: SamplingParams = GREEDY
    stop_ids: tuple[int, ...] = ()
    prompt_len: int = 0
    traceparent: str = ""
    history: bytes = b""  # packed little-endian int32: tokens [0, num_computed) where a penalty is on


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one sampled token, and the most probable tokens with theirs, most probable first."""

    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class ForwardOp:
    """One step, R rows: extend rows `[0, num_extend_rows)`, then decode rows.

    `requests` and `causes` stay on this side of the wire: a result is looked up through the op it answers, never through the
    present row table.
    """

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
    requests: list[Request] = field(default_factory=list)  # [R]
    extend_causes: list[Cause] = field(default_factory=list)  # [num_extend_rows]
    first_decodes: BoolArray | None = None  # [R - num_extend_rows], rows that came from PrefillDone; None: no row did
    num_logprobs: Int32Array | None = None  # [R], -1 where the request wants none; None: nobody wants any
    # What makes a result quick to take in; the defaults leave it to be found out.
    steady: SteadyRows | None = None  # the rows as a whole, if they run as in the step before
    num_ended: int = -1  # leases that had ended when the op was planned
    may_end: bool = True  # whether a row may have its last token by this op, without a stop token
    # Verification, see `digests`; None: this op asks for none.
    row_digests: UInt64Array | None = None  # [R], of the op's own rows
    verify_rows: Int32Array | None = None  # [V], other rows that are to be compared
    verify_digests: UInt64Array | None = None  # [V]

    @property
    def num_rows(self) -> int:
        return len(self.req_pool_indices)

    @property
    def causes(self) -> list[Cause]:
        """Which transition put each row here, [R]."""
        if self.first_decodes is None:
            return self.extend_causes + [Cause.DECODE] * (self.num_rows - self.num_extend_rows)
        decodes = [Cause.PREFILL_DONE_TO_DECODE if first else Cause.DECODE for first in self.first_decodes]
        return self.extend_causes + decodes


@dataclass(slots=True)
class StepResult:
    """The runtime's answer to one op: one entry per row of that op, in its order."""

    session_no: int
    step: int
    tokens: Int32Array  # [R], NO_TOKEN where the row sampled nothing
    row_status: npt.NDArray[np.uint8] | None = None  # [R] RowStatus; None: all OK
    logprobs: Float32Array | None = None  # [R], not-a-number where the row did not ask; None: no row asked
    top_tokens: Int32Array | None = None  # [R, K], NO_TOKEN beyond what a row asked for
    top_logprobs: Float32Array | None = None  # [R, K], not-a-number beyond what a row asked for
    digests: UInt64Array | None = None  # [R + V], of the op's rows, then of its verify_rows; None: the op asked for none
    apply_us: int = 0  # what the runtime took to check and apply the op, microseconds
    step_us: int = 0  # and for all of the step; 0: it does not measure
