"""Whole or not at all: what a call has changed so far, and how to take it back.

`Journal.run(change)` calls `change`; if that raises, everything it has changed is as it was before, whatever it raised and
wherever. Two kinds of memory serve that. Small state is copied when `run` begins: a part says by `watch` how. Large state (the
stack of free pages, the tree, entries of rows) is not copied: each method that is about to overwrite some of it hands `note` a
call that puts the old values back. These calls restore values rather than undo steps, so it does not matter whether the change
that follows was made, half made or not made. What follows from other state is not remembered but derived anew.

Outside of `run`, nothing is noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

K = TypeVar("K")
P = ParamSpec("P")
T = TypeVar("T")
Restore = Callable[[], object]


class Saved(Protocol):
    """Something that can say what it is now."""

    def saved(self) -> Restore:
        """Puts that back, whatever has become of it."""


class Journal:
    """Remembers what one call after another changes. Calls do not nest: a part of a change is a part of it."""

    def __init__(self) -> None:
        self.is_open = False
        self._snapshots: list[Callable[[], Restore]] = []
        self._undo: list[Restore] = []
        self._kept: set[Saved] = set()

    def watch(self, snapshot: Callable[[], Restore]) -> None:
        """From now on call `snapshot` before each change; what it returns is called if the change fails.

        That is after all noted calls, in the order in which parts were added: a later one may derive its state from what
        earlier ones have restored.
        """
        self._snapshots.append(snapshot)

    def note(self, restore: Restore) -> None:
        """Something is about to be overwritten; `restore` puts it back."""
        if self.is_open:
            self._undo.append(restore)

    def keep(self, thing: Saved) -> None:
        """`thing` is about to be changed. What it is the first time in a change is noted: that is what is put back last."""
        if self.is_open and thing not in (kept := self._kept):
            self._undo.append(thing.saved())
            kept.add(thing)

    def put(self, mapping: dict[K, T], key: K, value: T | None) -> None:
        """`mapping[key] = value`, to be taken back with the change; None removes the key."""
        old = mapping.get(key)
        if old is not value:
            if self.is_open:
                self._undo.append(lambda: _put(mapping, key, old))
            _put(mapping, key, value)

    def run(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `change` returns. If it raises, nothing has changed; the exception passes through."""
        restores = [snapshot() for snapshot in self._snapshots]
        self.is_open = True
        try:
            result = change(*args, **kwargs)
        except BaseException:
            self.is_open = False
            for restore in (*reversed(self._undo), *restores):
                restore()
            self._forget()
            raise
        self.is_open = False
        self._forget()
        return result

    def _forget(self) -> None:
        if self._undo:
            self._undo.clear()
            self._kept.clear()


def _put(mapping: dict[K, T], key: K, value: T | None) -> None:
    if value is None:
        mapping.pop(key, None)
    else:
        mapping[key] = value
