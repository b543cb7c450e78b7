"""Changes that are taken back whole."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.core.journal import Journal


def _raise(error: BaseException) -> None:
    raise error


def test_what_was_noted_is_put_back_last_first() -> None:
    """Notes of a failed change run in reverse, then the snapshots in the order in which they were added."""
    journal, calls = Journal(), []
    for name in ("first", "second"):
        journal.watch(lambda name=name: lambda: calls.append(name))

    def change() -> None:
        journal.note(lambda: calls.append("note 1"))
        journal.note(lambda: calls.append("note 2"))
        raise KeyError("x")

    with pytest.raises(KeyError):
        journal.run(change)
    assert calls == ["note 2", "note 1", "first", "second"]


def test_a_change_that_succeeds_forgets_its_notes() -> None:
    """Its result is returned, and a later failure takes back its own notes only."""
    journal, calls = Journal(), []

    def change(number: int, *, add: int) -> int:
        journal.note(lambda: calls.append(number))
        return number + add

    assert journal.run(change, 1, add=2) == 3
    with pytest.raises(ZeroDivisionError):
        journal.run(lambda: (journal.note(lambda: calls.append(7)), 1 // 0))
    assert calls == [7]
    assert not journal.is_open


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ValueError("x")])
def test_whatever_is_raised_passes_through(error: BaseException) -> None:
    """Not only errors of ours: an interrupt takes everything back as well."""
    journal, mapping = Journal(), {"a": 1, "b": 2}

    def change() -> None:
        journal.put(mapping, "a", 5)
        journal.put(mapping, "a", 6)
        journal.put(mapping, "b", None)
        journal.put(mapping, "c", 3)
        assert mapping == {"a": 6, "c": 3}
        _raise(error)

    with pytest.raises(type(error)):
        journal.run(change)
    assert mapping == {"a": 1, "b": 2}


def test_nothing_is_noted_outside_of_a_change() -> None:
    """Calls outside `run` are final, and `put` works there as an assignment does."""
    journal, calls = Journal(), []
    mapping: dict[str, Any] = {}
    journal.note(lambda: calls.append("outside"))
    journal.put(mapping, "a", 1)
    journal.put(mapping, "b", None)
    with pytest.raises(ValueError, match="x"):
        journal.run(_raise, ValueError("x"))
    assert (calls, mapping) == ([], {"a": 1})
