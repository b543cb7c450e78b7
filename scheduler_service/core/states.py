"""The life of a request as one table.

A request is in exactly one state. It moves only by an event, and only where `TRANSITIONS` has an entry for (state, event); an
absent entry raises and changes nothing. Each entry says what becomes of the request's page row and whether the op that carries
the transition must rewrite the runtime's mirror of that row from logical page 0 (`full_refresh`).

Rules behind the table:

- A row is *rebuilt* when a request is admitted: a fresh match decides its first pages.
- A row is *republished* when prompt pages enter the prefix tree: where the tree has a page of the same tokens already, the row
  repoints to it, so an entry that was sent earlier changes.
- A plain decode step only appends. Pages generated while decoding are published when the request leaves its row, never between
  two decode steps: that would flip entries without a transition that says so.
- A request that leaves its row (retracted or finished) publishes what is computed and releases the rest. A reset publishes
  nothing, since the memory behind the pages is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scheduler_service.core.errors import IllegalTransitionError


class State(StrEnum):
    """Where a request is in its life."""

    SUBMITTED = "submitted"
    PREFILLING = "prefilling"
    PREFILL_DONE = "prefill_done"
    DECODING = "decoding"
    RETRACTED = "retracted"
    FINISHED = "finished"

    @property
    def holds_row(self) -> bool:
        return self in _ROW_HOLDERS


_ROW_HOLDERS = frozenset({State.PREFILLING, State.PREFILL_DONE, State.DECODING})


class Event(StrEnum):
    """What moves a request."""

    SCHEDULE_PREFILL_FIRST_CHUNK = "SchedulePrefillFirstChunk"
    SCHEDULE_PREFILL = "SchedulePrefill"
    SCHEDULE_DECODE = "ScheduleDecode"
    SCHEDULE_DECODE_FROM_RETRACTED = "ScheduleDecodeFromRetracted"
    RETRACT = "Retract"
    RESET = "Reset"
    FINISH = "Finish"


class RowEffect(StrEnum):
    """What a transition does to the request's page row."""

    REBUILD = "rebuild"
    """Prefix adopted from a fresh match, the rest granted."""
    REPUBLISH = "republish"
    """Computed pages published, duplicates adopted, tail granted."""
    APPEND = "append"
    """Tail granted, nothing else."""
    RELEASE = "release"
    """Computed pages published, the rest freed, the row given back."""
    DROP = "drop"
    """The row given back without publishing."""
    NONE = "none"
    """The request has no row."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One entry: the states it may lead to, what it does to the row, and the bit under the `transition` policy."""

    targets: tuple[State, ...]
    row_effect: RowEffect
    full_refresh: bool = False


_CHUNK_TARGETS = (State.PREFILLING, State.PREFILL_DONE)

TRANSITIONS: dict[tuple[State, Event], Transition] = {
    (State.SUBMITTED, Event.SCHEDULE_PREFILL_FIRST_CHUNK): Transition(_CHUNK_TARGETS, RowEffect.REBUILD, full_refresh=True),
    (State.PREFILLING, Event.SCHEDULE_PREFILL): Transition(_CHUNK_TARGETS, RowEffect.REPUBLISH, full_refresh=True),
    (State.PREFILL_DONE, Event.SCHEDULE_DECODE): Transition((State.DECODING,), RowEffect.REPUBLISH, full_refresh=True),
    (State.DECODING, Event.SCHEDULE_DECODE): Transition((State.DECODING,), RowEffect.APPEND),
    (State.RETRACTED, Event.SCHEDULE_DECODE_FROM_RETRACTED): Transition(
        (State.DECODING, State.PREFILLING), RowEffect.REBUILD, full_refresh=True
    ),
    (State.PREFILLING, Event.RETRACT): Transition((State.RETRACTED,), RowEffect.RELEASE),
    (State.PREFILL_DONE, Event.RETRACT): Transition((State.RETRACTED,), RowEffect.RELEASE),
    (State.DECODING, Event.RETRACT): Transition((State.RETRACTED,), RowEffect.RELEASE),
    (State.PREFILLING, Event.RESET): Transition((State.RETRACTED,), RowEffect.DROP),
    (State.PREFILL_DONE, Event.RESET): Transition((State.RETRACTED,), RowEffect.DROP),
    (State.DECODING, Event.RESET): Transition((State.RETRACTED,), RowEffect.DROP),
    (State.SUBMITTED, Event.FINISH): Transition((State.FINISHED,), RowEffect.NONE),
    (State.RETRACTED, Event.FINISH): Transition((State.FINISHED,), RowEffect.NONE),
    (State.PREFILLING, Event.FINISH): Transition((State.FINISHED,), RowEffect.RELEASE),
    (State.PREFILL_DONE, Event.FINISH): Transition((State.FINISHED,), RowEffect.RELEASE),
    (State.DECODING, Event.FINISH): Transition((State.FINISHED,), RowEffect.RELEASE),
}


def transition_of(request_id: str, state: State, event: Event) -> Transition:
    """The entry for (state, event).

    Raises:
        IllegalTransitionError: the table has none.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(request_id, state, event) from None
