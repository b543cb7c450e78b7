"""One or several runtimes that receive the same ops, as one.

`RuntimeGroup` holds a link to each rank and offers what a single link does. An op is serialised once and the same bytes go to
every rank. A step is complete when every rank has answered it, and answered alike; then rank 0's result is handed on. A refusal
by any rank, and an answer that differs, is handed on instead of a result, with the rank in its text. All ranks begin a session
together: those whose stream still works by a reset on it, the others by a new stream.

The ranks are numbered by what the runtimes state. Runtimes that state a world of one are replicas, numbered as they are listed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import structlog
from typing_extensions import override

from scheduler_service.agreement import ExpectedShape, order_of_ranks
from scheduler_service.core.ops import ForwardOp, RowStatus, StepResult, UInt64Array
from scheduler_service.errors import LinkBrokenError, RuntimeLinkError, RuntimeMismatchError
from scheduler_service.runtime_client import Answer, LinkLimits, RuntimeLink, encode, open_link
from scheduler_service.wire import StepRefusal
from scheduler_service.wire_facts import MirrorRows, RuntimeFacts

log = structlog.get_logger("pagemirror.runtime_group")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Runtimes that received the same op answered it differently; `rows` are those of which they say other things."""

    session_no: int
    step: int
    rows: tuple[int, ...]
    detail: str

    @override
    def __str__(self) -> str:
        return f"step {self.step} of session {self.session_no}: the ranks disagree about {self.detail}"


class RuntimeGroup:
    """The links to all ranks.

    Args:
        targets: where the runtimes listen, at least one.
        wake: called for each answer of a step that every rank has answered, for a refusal, and when a link breaks.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        scheduler_epoch: int,
        overlap_depth: int,
        limits: LinkLimits,
        wake: Callable[[], None],
    ) -> None:
        self.answers: deque[Answer | Disagreement] = deque()
        """Answers to ops of the present session, in the order of the ops; the owner takes them from the left."""
        self.broken: RuntimeLinkError | None = None
        """Why the session cannot go on, if a link broke; it takes a new session to mend it."""
        self._targets = list(targets)  # by rank, once a session has begun
        self._links: list[RuntimeLink | None] = [None] * len(targets)
        self._facts: list[RuntimeFacts | None] = [None] * len(targets)
        self._scheduler_epoch = scheduler_epoch
        self._overlap_depth = overlap_depth
        self._limits = limits
        self._wake = wake
        self._in_flight: deque[ForwardOp] = deque()
        self._is_lost = False  # something other than a result was handed on: the rest of the session is of no interest
        self._odd_rank = 0  # whose digests were wrong, if any were

    @property
    def num_ranks(self) -> int:
        """How many runtimes there are."""
        return len(self._targets)

    @property
    def targets(self) -> tuple[str, ...]:
        """Where they listen, by rank."""
        return tuple(self._targets)

    @property
    def num_in_flight(self) -> int:
        """Ops of the present session that were sent and not answered by every rank."""
        return len(self._in_flight)

    async def begin(self, session_no: int, expected: ExpectedShape) -> RuntimeFacts:
        """Begin session `session_no` on every rank; returns the facts of rank 0 when nothing of an older session runs anywhere.

        Raises:
            RuntimeMismatchError: a configured value disagrees, or the runtimes are not one world.
            RuntimeLinkError: a rank could not be reached or did not answer within its limits. The others have begun the
                session and wait for the next one.
        """
        self.answers.clear()
        self._in_flight.clear()
        await self._each([self._begin_on(rank, session_no, expected) for rank in range(self.num_ranks)])
        facts = [stated for stated in self._facts if stated is not None]
        try:
            order = order_of_ranks(self._targets, facts)
        except RuntimeMismatchError:
            await self.close()  # what is there next time may fit
            raise
        self._targets = [self._targets[position] for position in order]
        self._links = [self._links[position] for position in order]
        self._facts = [facts[position] for position in order]
        self._is_lost, self._odd_rank, self.broken = False, 0, None
        self._look()
        return facts[order[0]]

    def send(self, op: ForwardOp) -> int:
        """Send one op to every rank; the bytes that it takes. Nothing is sent on a broken link: the owner begins a new session
        then.
        """
        encoded = encode(op)
        self._in_flight.append(op)
        for link in self._links:
            if link is not None:
                link.send(op, encoded)
        return len(encoded)

    async def read_rows(self, rows: list[int], timeout_s: float) -> MirrorRows:
        """Rows of the mirror of rank 0, or of the rank whose digests were wrong: see `RuntimeLink.read_rows`."""
        return await self._link(self._odd_rank).read_rows(rows, timeout_s)

    async def read_rows_of_all(self, rows: list[int], timeout_s: float) -> list[MirrorRows]:
        """The same rows of every rank's mirror, by rank. Raises RuntimeLinkError."""
        return await self._each([self._link(rank).read_rows(rows, timeout_s) for rank in range(self.num_ranks)])

    async def close(self) -> None:
        """End every stream. Harmless when repeated."""
        links = [link for link in self._links if link is not None]
        self._links = [None] * self.num_ranks
        if links:
            self.broken = self.broken or LinkBrokenError("closed")
        await asyncio.gather(*(link.close() for link in links))

    # -- details

    def _link(self, rank: int) -> RuntimeLink:
        link = self._links[rank]
        if link is None:
            raise LinkBrokenError(f"{self._name(rank)} is not connected")
        return link

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._targets[rank]})" if self.num_ranks > 1 else self._targets[rank]

    async def _begin_on(self, rank: int, session_no: int, expected: ExpectedShape) -> None:
        link = self._links[rank]
        if link is not None and link.broken is None:
            await link.reset(session_no)
            return
        if link is not None:
            self._links[rank] = None
            await link.close()
        try:
            self._links[rank], self._facts[rank] = await open_link(
                self._targets[rank],
                scheduler_epoch=self._scheduler_epoch,
                session_no=session_no,
                overlap_depth=self._overlap_depth,
                expected=expected,
                limits=self._limits,
                wake=self._look,
            )
        except RuntimeMismatchError as error:
            if self.num_ranks == 1 or error.why:
                raise
            raise RuntimeMismatchError(error.key, error.configured, error.actual, f"at {self._targets[rank]}") from error

    @staticmethod
    async def _each(work: Sequence[Coroutine[object, object, T]]) -> list[T]:
        """All of it at once; when all is over, what the first one failed with."""
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        done: list[T] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            done.append(outcome)
        return done

    def _look(self) -> None:
        """A link has an answer, or is broken: hand on what is complete."""
        for rank, link in enumerate(self._links):
            if link is not None and link.broken is not None and self.broken is None:
                self.broken = link.broken if self.num_ranks == 1 else LinkBrokenError(f"rank {rank}: {link.broken}")
        while not self._is_lost and self._in_flight and (answer := self._next_answer()) is not None:
            self._in_flight.popleft()
            self._is_lost = isinstance(answer, Disagreement) or isinstance(answer.outcome, StepRefusal)
            self.answers.append(answer)
        if self.answers or self.broken is not None:
            self._wake()

    def _next_answer(self) -> Answer | Disagreement | None:
        """The answer to the oldest op, if every rank has answered it or one has refused it. It is taken from every link."""
        queues = [link.answers for link in self._links if link is not None]
        refusing = [rank for rank, queue in enumerate(queues) if queue and isinstance(queue[0].outcome, StepRefusal)]
        if not refusing and not all(queues):
            return None
        answers = [queue.popleft() if queue else None for queue in queues]
        if len(answers) == 1:
            return answers[0]
        if refusing:
            answer = answers[refusing[0]]
            assert answer is not None
            assert isinstance(answer.outcome, StepRefusal)
            detail = f"{self._name(refusing[0])}: {answer.outcome.detail}"
            return Answer(replace(answer.outcome, detail=detail), answer.seconds)
        results = [answer.outcome for answer in answers if answer is not None and isinstance(answer.outcome, StepResult)]
        result = self._compare(self._in_flight[0], results)
        if isinstance(result, Disagreement):
            return result
        return Answer(result, max(answer.seconds for answer in answers if answer is not None))

    def _compare(self, op: ForwardOp, results: list[StepResult]) -> StepResult | Disagreement:
        """Rank 0's result, if those of the others are like it; log probabilities aside, which are rank 0's."""
        expected = _expected_digests(op)
        if expected is not None and len(expected):
            # A rank whose mirror is wrong has computed something else, too: that is said as what it is.
            for rank, result in enumerate(results):
                if result.digests is None or not np.array_equal(result.digests, expected):
                    log.error("digests_differ", rank=rank, target=self._targets[rank], step=op.step)
                    self._odd_rank = rank
                    return result
        first = results[0]
        for rank, result in enumerate(results[1:], start=1):
            statuses = _status(first)
            differs = ((first.tokens != result.tokens) & (statuses == RowStatus.OK)) | (statuses != _status(result))
            if differs.any():
                i = int(differs.argmax())
                found = [
                    f"{self._name(which)} says token {one.tokens[i]}, status {_status(one)[i]}"
                    for which, one in ((0, first), (rank, result))
                ]
                where = f"row {op.req_pool_indices[i]} of request {op.requests[i].request_id!r}"
                rows = tuple(op.req_pool_indices[differs].tolist())
                return Disagreement(op.session_no, op.step, rows, f"{where}: {', '.join(found)}")
        return first


def _status(result: StepResult) -> npt.NDArray[np.uint8]:
    """Status of each row; what an absent column means filled in."""
    return np.full(len(result.tokens), RowStatus.OK, np.uint8) if result.row_status is None else result.row_status


def _expected_digests(op: ForwardOp) -> UInt64Array | None:
    """Digests that every rank must answer with; None: the op asks for none."""
    if op.row_digests is None:
        return None
    return op.row_digests if op.verify_digests is None else np.concatenate((op.row_digests, op.verify_digests))
