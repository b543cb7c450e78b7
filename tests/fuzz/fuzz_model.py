"""What a runtime must answer and hold, in plain Python, from the words of runtime.proto and forward.proto alone.

Nothing of the runtime is imported. For each message `RuntimeModel.take` says which answers are right and, where the message is
to be carried out, does so: page rows, leases, the tokens in every KV cell, and the tokens that the fingerprint model returns.
A message that is wrong in several ways may be refused for any of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import fuzz_rules
from fuzz_columns import ints, longs, row_digest

from pagemirror.v1 import forward_pb2, runtime_pb2

FINGERPRINT_VOCABULARY = 997

UNKNOWN = None
"""A token that the protocol's words do not determine."""


@dataclass
class Shape:
    """What a runtime states in its hello."""

    page_size: int
    num_pages: int
    max_rows: int
    width: int
    vocab_size: int
    greedy_only: bool

    @classmethod
    def of(cls, info: runtime_pb2.RuntimeInfo) -> Shape:
        greedy = info.architecture == "fingerprint"
        return cls(info.page_size, info.num_pages, info.max_rows, info.max_pages_per_row, info.vocab_size, greedy)


@dataclass
class Lease:
    """One tenancy of a row."""

    generation: int
    pages: list[int]
    end: int  # of its last step, in tokens
    asked: bool  # for a token
    last: int | None = UNKNOWN  # sampled token
    num_logprobs: int | None = None

    def valid_len(self, width: int) -> int:
        return min(len(self.pages), width)


@dataclass
class Expected:
    """The right answers to one message."""

    refusals: frozenset[str] = frozenset()
    status: str = ""  # with which the stream ends
    reset_done: int = 0
    result: Result | None = None


@dataclass
class Result:
    """A step that was executed."""

    step: int
    tokens: list[int | None]
    statuses: list[int]
    digests: list[int]
    num_logprobs: list[int | None] = field(default_factory=list)
    logprobs_unsaid: bool = False


class RuntimeModel:
    """A runtime with one scheduler's stream."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.cells: dict[int, int | None] = {}
        """Token in each KV cell that was written while we watched; cells outlive sessions."""
        self.session_no = 0
        self.last_step = 0
        self.leases: dict[int, Lease] = {}
        self.seen: dict[int, int] = {}
        """Highest generation of each row number since the session began."""
        self.broken = False
        self.stored: deque[Result] = deque(maxlen=3)

    def open(self, session_no: int, overlap_depth: int | None = None) -> None:
        """A hello was answered, or a reset."""
        self.session_no, self.last_step, self.broken = session_no, 0, False
        self.leases, self.seen = {}, {}
        self.stored = deque(maxlen=self.stored.maxlen if overlap_depth is None else overlap_depth + 1)

    def close(self) -> None:
        """The stream is over."""
        self.open(0)

    def take(self, message: runtime_pb2.ExecuteRequest | None) -> Expected:
        """One message after the hello; None for bytes that cannot be read."""
        kind = message.WhichOneof("message") if message is not None else None
        if message is None or kind in {None, "hello"}:
            self.close()
            return Expected(status="INVALID_ARGUMENT")
        if kind == "reset":
            return self._reset(message.reset.session_no)
        return self._op(message.op)

    def rows(self, numbers: list[int] | None = None) -> list[tuple[int, int, int, int, list[int]]]:
        """What ReadRows must say: row number, generation, length, valid length and pages of each."""
        found = []
        for row in sorted(self.leases) if numbers is None else numbers:
            lease = self.leases.get(row)
            if lease is None:
                found.append((row, 0, 0, 0, []))
            else:
                valid = lease.valid_len(self.shape.width)
                found.append((row, lease.generation, len(lease.pages), valid, lease.pages[:valid]))
        return found

    # -- details

    def _reset(self, session_no: int) -> Expected:
        if session_no <= self.session_no:
            self.close()
            return Expected(status="FAILED_PRECONDITION")
        self.open(session_no)
        return Expected(reset_done=session_no)

    def _op(self, op: forward_pb2.ForwardOp) -> Expected:
        if self.broken:
            return Expected(refusals=frozenset({"SKIPPED"}))
        unreadable = fuzz_rules.unreadable(op)
        if op.session_no != self.session_no:
            return self._refused(unreadable | {"UNKNOWN_SESSION"})
        if op.step != self.last_step + 1:
            for result in self.stored:
                if result.step == op.step:
                    if unreadable:
                        return self._refused(unreadable)
                    return Expected(result=result)
            return self._refused(unreadable | {"STEP_OUT_OF_ORDER"})
        content = fuzz_rules.content(op, self.shape, self.leases, self.seen) if fuzz_rules.has_columns(op) else set()
        faults = unreadable | content
        if faults:
            return self._refused(faults)
        return Expected(result=self._apply(op))

    def _refused(self, codes: set[str]) -> Expected:
        self.broken = True
        return Expected(refusals=frozenset(codes))

    def _apply(self, op: forward_pb2.ForwardOp) -> Result:
        for row in ints(op.released_rows) or ():
            self.leases.pop(row, None)
        rows = ints(op.req_pool_indices) or []
        generations, row_lens, begins = ints(op.row_generations), ints(op.row_lens), ints(op.begins)
        computed, input_lens, pages = ints(op.num_computed), ints(op.input_lens), ints(op.occupied_pages)
        at = 0
        for i, row in enumerate(rows):
            lease = self.leases.get(row)
            if lease is None or lease.generation != generations[i]:
                lease = self.leases[row] = Lease(generations[i], [], 0, asked=False)
            count = row_lens[i] if op.full_refresh[i] else row_lens[i] - begins[i]
            kept = [] if op.full_refresh[i] else lease.pages[: begins[i]]
            lease.pages = kept + pages[at : at + count]
            lease.end = computed[i] + input_lens[i]
            lease.asked |= bool(op.sample[i])
            self.seen[row] = max(self.seen.get(row, 0), generations[i])
            at += count
        for start in op.lease_starts:
            if start.sampling.HasField("num_logprobs"):
                self.leases[start.req_pool_index].num_logprobs = start.sampling.num_logprobs
        self.last_step = op.step
        result = self._compute(op, rows, computed, input_lens)
        self.stored.append(result)
        return result

    def _digest(self, row: int) -> int:
        lease = self.leases[row]
        return row_digest(lease.pages[: self.shape.width], len(lease.pages))

    def _compute(self, op: forward_pb2.ForwardOp, rows: list[int], computed: list[int], input_lens: list[int]) -> Result:
        asked = longs(op.row_digests) or []
        digests = [self._digest(row) for row in rows] if asked else []
        masked = [asked[i] != digests[i] for i in range(len(asked))] or [False] * len(rows)
        input_ids = ints(op.input_ids) or []
        size, room = self.shape.page_size, self.shape.width * self.shape.page_size
        written: dict[int, int | None] = {}
        at = 0
        for i, row in enumerate(rows):
            lease = self.leases[row]
            if i < op.num_extend_rows:
                tokens: list[int | None] = input_ids[at : at + input_lens[i]]
                at += input_lens[i]
            else:
                tokens = [lease.last]
            if masked[i]:
                continue
            for position, token in enumerate(tokens[: max(0, room - computed[i])], start=computed[i]):
                cell = lease.pages[position // size] * size + position % size
                # Two rows that write one cell: which of them is last is nobody's promise.
                written[cell] = token if written.get(cell, token) == token else UNKNOWN
        self.cells.update(written)
        result = Result(op.step, [], [], digests)
        for i, row in enumerate(rows):
            lease = self.leases[row]
            clamped = lease.end > room
            result.statuses.append(2 if clamped and not masked[i] else 0)
            sampled = bool(op.sample[i]) and not clamped
            # Only a row that samples has log probabilities; whether a masked one has is not said.
            result.num_logprobs.append(lease.num_logprobs if sampled else None)
            result.logprobs_unsaid |= masked[i]
            if sampled and not masked[i]:
                lease.last = self._sampled(lease)
            result.tokens.append(lease.last if sampled and not masked[i] else -1)
        for row in ints(op.verify_rows) or ():
            result.digests.append(self._digest(row))
        return result

    def _sampled(self, lease: Lease) -> int | None:
        """The fingerprint of the tokens that the row's pages hold."""
        if not self.shape.greedy_only:
            return UNKNOWN
        size, total = self.shape.page_size, 0
        for i in range(lease.end):
            token = self.cells.get(lease.pages[i // size] * size + i % size)
            if token is None:
                return UNKNOWN
            total += (i + 1) * (token + 1)
        return total % FINGERPRINT_VOCABULARY
