"""What the loop concludes from a step that failed, before it starts a new session.

Whom the failure counts for (`core.suspects` says what follows), and whether steps must become smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import structlog

from scheduler_service.core.scheduler import Scheduler
from scheduler_service.wire import RefusalCode, StepRefusal

log = structlog.get_logger("pagemirror.engine")

_OF_THE_STREAM = frozenset({RefusalCode.SKIPPED, RefusalCode.UNKNOWN_SESSION, RefusalCode.STEP_OUT_OF_ORDER})
"""Refusals that are about the order of messages; no request of the op is to blame."""

_MAX_OF_THE_STREAM = 8
"""So many of them without a token in between are believed; from then on they count like any failed step, so that it ends."""


class Failures:
    """Failed steps of one scheduler.

    Args:
        on_suspect_ended: called when a request was ended because steps with it fail.
    """

    def __init__(self, core: Scheduler, on_suspect_ended: Callable[[], None]) -> None:
        self._core = core
        self._on_suspect_ended = on_suspect_ended
        self._num_of_the_stream = 0

    def note_tokens(self) -> None:
        """Somebody gained a token."""
        self._num_of_the_stream = 0

    def note_refusal(self, refusal: StepRefusal) -> None:
        """The oldest op in flight was refused, or failed in a runtime that lives on."""
        if refusal.code is RefusalCode.OUT_OF_MEMORY and self._halve_token_budget():
            return
        if refusal.code in _OF_THE_STREAM:
            self._num_of_the_stream += 1
            if self._num_of_the_stream <= _MAX_OF_THE_STREAM:
                return
        self.note_failure((refusal.row,) if refusal.row else ())

    def note_failure(self, rows: Collection[int] = (), *, crashed: bool = False) -> None:
        """The oldest op in flight failed, if `rows` are given because of them; `crashed`: the stream broke.

        Without an op in flight nobody can be the cause.
        """
        ops = self._core.ops_in_flight()
        if not ops:
            return
        for request in self._core.note_failure(ops[0], rows, crashed=crashed):
            log.error("suspect_ended", request_id=request.request_id, session_no=ops[0].session_no, step=ops[0].step)
            self._on_suspect_ended()

    def _halve_token_budget(self) -> bool:
        """A step needed more memory than the runtime has: plan smaller ones, down to a page, for as long as this process lives.

        It never grows back: what did not fit once would not fit again, and each attempt costs every running request a prefill.
        False: it is at its least already.
        """
        core = self._core
        before = core.token_budget
        after = max(before // 2, min(before, core.config.page_size))
        core.set_token_budget(after)
        say = "token_budget_halved" if after < before else "token_budget_at_its_least"
        log.warning(say, reason="the runtime ran out of memory in a step", before=before, after=after)
        return after < before
