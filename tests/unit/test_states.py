"""The state machine: one table, and nothing beside it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from scheduler_service.core.errors import IllegalTransitionError
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.states import TRANSITIONS, Event, RowEffect, State, transition_of

_ALL = list(itertools.product(State, Event))
_LEGAL = [(key, target) for key, entry in TRANSITIONS.items() for target in entry.targets]
_ILLEGAL = [
    (state, event, target)
    for (state, event), target in itertools.product(_ALL, State)
    if (state, event) not in TRANSITIONS or target not in TRANSITIONS[state, event].targets
]
_HOLDERS = {State.PREFILLING, State.PREFILL_DONE, State.DECODING}


def _request(state: State) -> Request:
    prompt = np.array([1, 2, 3], dtype=np.int32)
    request = Request("r", prompt, max_tokens=2, limit_len=5, limit_reason=FinishReason.LENGTH, arrival=1)
    request.state = state
    return request


def _fields(request: Request) -> dict[str, object]:
    return {name: getattr(request, name) for name in Request.__slots__}


@pytest.mark.parametrize(("state", "event", "target"), _ILLEGAL)
def test_illegal_event_raises_and_changes_nothing(state: State, event: Event, target: State) -> None:
    """Every (state, event, target) that the table does not have raises, names itself, and leaves the request as it was."""
    request = _request(state)
    before = _fields(request)
    with pytest.raises(IllegalTransitionError) as caught:
        request.move(event, target)
    assert _fields(request) == before
    assert (caught.value.request_id, caught.value.state) == ("r", state)
    assert str(event) in str(caught.value)


@pytest.mark.parametrize(("key", "target"), _LEGAL)
def test_legal_event_moves_to_its_target(key: tuple[State, Event], target: State) -> None:
    """Every entry of the table leads to each of its targets and changes the state alone."""
    request = _request(key[0])
    before = _fields(request)
    request.move(key[1], target)
    assert _fields(request) == before | {"state": target}


@pytest.mark.parametrize(("state", "event"), [key for key in _ALL if key not in TRANSITIONS])
def test_absent_entry_raises(state: State, event: Event) -> None:
    """A look-up of an absent entry raises a typed error, not a KeyError."""
    with pytest.raises(IllegalTransitionError, match=f"no transition for {event} in state {state}"):
        transition_of("r", state, event)


def test_full_refresh_is_exactly_the_design_table() -> None:
    """First chunk, continuation, first decode and resume set the bit; a decode after a decode does not; leaving has no op."""
    assert {key for key, entry in TRANSITIONS.items() if entry.full_refresh} == {
        (State.SUBMITTED, Event.SCHEDULE_PREFILL_FIRST_CHUNK),
        (State.PREFILLING, Event.SCHEDULE_PREFILL),
        (State.PREFILL_DONE, Event.SCHEDULE_DECODE),
        (State.RETRACTED, Event.SCHEDULE_DECODE_FROM_RETRACTED),
    }
    assert not TRANSITIONS[State.DECODING, Event.SCHEDULE_DECODE].full_refresh


def test_targets_of_scheduling() -> None:
    """A chunk ends the prompt or does not, a resume decodes or prefills on, a decode decodes."""
    targets = {
        key: set(entry.targets)
        for key, entry in TRANSITIONS.items()
        if key[1] not in (Event.RETRACT, Event.RESET, Event.FINISH)
    }
    assert targets == {
        (State.SUBMITTED, Event.SCHEDULE_PREFILL_FIRST_CHUNK): {State.PREFILLING, State.PREFILL_DONE},
        (State.PREFILLING, Event.SCHEDULE_PREFILL): {State.PREFILLING, State.PREFILL_DONE},
        (State.PREFILL_DONE, Event.SCHEDULE_DECODE): {State.DECODING},
        (State.DECODING, Event.SCHEDULE_DECODE): {State.DECODING},
        (State.RETRACTED, Event.SCHEDULE_DECODE_FROM_RETRACTED): {State.DECODING, State.PREFILLING},
    }


@pytest.mark.parametrize("event", [Event.RETRACT, Event.RESET])
def test_only_row_holders_can_be_retracted(event: Event) -> None:
    """Who holds no row cannot lose one."""
    assert {state for state in State if (state, event) in TRANSITIONS} == _HOLDERS
    assert all(TRANSITIONS[state, event].targets == (State.RETRACTED,) for state in _HOLDERS)


def test_every_live_state_can_finish_and_finished_is_the_end() -> None:
    """A request can end from every state but the last, which has no way out."""
    assert {state for state in State if (state, Event.FINISH) in TRANSITIONS} == set(State) - {State.FINISHED}
    assert not [key for key in TRANSITIONS if key[0] is State.FINISHED]


def test_row_effects_fit_the_states() -> None:
    """Entering rebuilds, a growing prompt republishes, leaving releases, a reset drops, and no row means no effect."""
    for (state, event), entry in TRANSITIONS.items():
        if event is Event.RESET:
            expected = RowEffect.DROP
        elif event in (Event.RETRACT, Event.FINISH):
            expected = RowEffect.RELEASE if state in _HOLDERS else RowEffect.NONE
        elif state in (State.SUBMITTED, State.RETRACTED):
            expected = RowEffect.REBUILD
        elif state is State.DECODING:
            expected = RowEffect.APPEND
        else:
            expected = RowEffect.REPUBLISH
        assert entry.row_effect is expected, (state, event)
        assert entry.full_refresh == (expected in (RowEffect.REBUILD, RowEffect.REPUBLISH))


def test_holders() -> None:
    """Exactly the three states between admission and the end hold a row."""
    assert {state for state in State if state.holds_row} == _HOLDERS
