"""Live requests, where they wait, and how they leave their rows: retracted, over, or with the runtime lost."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_service.core.journal import Restore
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.states import Event, State
from scheduler_service.core.waiting import RetractedList, WaitingQueue


class Lives:
    """Every live request by id, and both queues.

    Args:
        note_finished: called with each request that has ended.
    """

    def __init__(self, placement: Placement, note_finished: Callable[[Request], object]) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.retracted = RetractedList()
        self.plan_no = 0
        """Of the plan that is being made, or was made last."""
        self.num_retractions = 0
        """Rows taken away so far, from requests that are over as well."""
        self._placement = placement
        self._note_finished = note_finished
        placement.journal.watch(self._snapshot)

    def begin(self, request: Request) -> None:
        """Take in a submitted request, whose id is that of no live one; if that fails, nothing has changed."""
        try:
            self.requests[request.request_id] = request
            self.waiting.push(request)
        except BaseException:
            self.requests.pop(request.request_id, None)
            self.waiting.refill(self.requests.values())
            raise

    def finish(self, request: Request, reason: FinishReason, detail: str = "") -> None:
        """End a live request; what it has computed is published, unless it failed."""
        placement, before = self._placement, request.state
        placement.keep(request)
        request.move(Event.FINISH, State.FINISHED)
        request.finish_reason, request.finish_detail = reason, detail
        if before is State.SUBMITTED:
            self.waiting.note_gone()
        elif before is State.RETRACTED:
            self.retracted.remove(request)
        else:
            # What a look-ahead step writes for nothing lies beyond the pages before the last token.
            publish = 0 if reason is FinishReason.FAILED else placement.publishable_pages(request.row)
            if reason is not FinishReason.ABORT:
                publish = min(publish, (len(request.tokens) - 1) // placement.page_size)
            placement.leave(request.row, publish)
        placement.journal.put(self.requests, request.request_id, None)
        self._note_finished(request)

    def retract(self, row: int, in_plan: int | None = None) -> None:
        """Take the row from its request, which resumes in a later plan than `in_plan` (None: than the present one)."""
        placement = self._placement
        request: Request = placement.request_of_row[row]
        placement.keep(request)
        request.move(Event.RETRACT, State.RETRACTED)
        request.num_retractions += 1
        self.num_retractions += 1
        request.retracted_in_plan = self.plan_no if in_plan is None else in_plan
        placement.leave(row, placement.publishable_pages(row))
        self.retracted.add(request)

    def empty_cache(self, *, retract_first: bool) -> int:
        """Empty the tree, of which nothing is locked once all holders are retracted; returns how many pages that freed."""
        for row in self._placement.holder_rows().tolist() if retract_first else ():
            self.retract(row, in_plan=self.plan_no + 1)
        return self._placement.reset_cache()

    def lose_rows(self) -> None:
        """The memory behind the pages is gone: retract every holder without publishing and empty tree and pool."""
        for request in self.retracted.requests():
            request.num_outstanding = 0
        for request in self._placement.drop_all():
            request.move(Event.RESET, State.RETRACTED)
            request.num_outstanding = 0
            request.retracted_in_plan = self.plan_no + 1
            self.retracted.add(request)

    def _snapshot(self) -> Restore:
        plan_no, num_retractions = self.plan_no, self.num_retractions

        def restore() -> None:
            self.plan_no, self.num_retractions = plan_no, num_retractions
            self.waiting.refill(self.requests.values())
            self.retracted.refill(self.requests.values())

        return restore
