"""The page rows of all requests that hold one, as parallel arrays with one entry per row number.

Row numbers are 1 ... max_rows; row 0 is the runtime's padding sink. A *lease* is one stay of a request in a row: every first
chunk and every resume begins one. All writes to entries below `sent_len` go through `repoint`, which marks the row dirty, and a
dirty row is sent in full under every refresh policy: no sequence of transitions can leave the runtime with a stale entry.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from scheduler_service.core.errors import PageAccountingError
from scheduler_service.core.journal import Journal, Restore
from scheduler_service.core.ops import BoolArray, Int32Array


class Phase(IntEnum):
    """State of a row's request, as a number for array comparisons."""

    EMPTY = 0
    PREFILLING = 1
    PREFILL_DONE = 2
    DECODING = 3


# Lines of the numbers that `RowTable.look_up` returns.
(
    NUM_PAGES,
    NUM_TREE,
    SENT_LEN,
    GENERATION,
    LIVE_GENERATION,
    LIMIT_LEN,
    NUM_COMPUTED,
    NUM_OUTSTANDING,
    NUM_KNOWN,
    NUM_LOGPROBS,
) = range(10)

# Lines of the flags.
PHASE, DIRTY, UNSENT = range(3)


class RowTable:
    """Struct of arrays, each with max_rows + 1 entries.

    Args:
        max_rows: row numbers in use at most.
        max_pages_per_row: width of a row in pages.
        page_size: tokens in a page.
        keep_sent: keep a copy of what was sent, for the `diff` policy and for audits.
        journal: hears what is about to be overwritten; None: nothing is ever taken back.
    """

    def __init__(
        self,
        max_rows: int,
        max_pages_per_row: int,
        page_size: int,
        *,
        keep_sent: bool = False,
        journal: Journal | None = None,
    ) -> None:
        self._journal = journal or Journal()
        self._journal.watch(self._snapshot)
        size = max_rows + 1
        self.max_rows = max_rows
        self.max_pages_per_row = max_pages_per_row
        self.page_size = page_size
        self.pages: Int32Array = np.zeros((size, max_pages_per_row), dtype=np.int32)
        self.sent_pages: Int32Array | None = np.zeros_like(self.pages) if keep_sent else None
        # The columns below are lines of two blocks, and both are one piece of memory, copied in one go.
        self._columns = np.zeros((10 * 4 + 3) * size, dtype=np.uint8)
        numbers = self._numbers = self._columns[: 10 * 4 * size].view(np.int32).reshape(10, size)
        flags = self._flags = self._columns[10 * 4 * size :].reshape(3, size)
        self.num_pages: Int32Array = numbers[NUM_PAGES]
        self.num_tree: Int32Array = numbers[NUM_TREE]  # leading entries that the prefix tree owns
        self.sent_len: Int32Array = numbers[SENT_LEN]  # pages sent in this lease
        self.generation: Int32Array = numbers[GENERATION]  # leases of the row number so far
        self.live_generation: Int32Array = numbers[LIVE_GENERATION]  # generation while leased, else 0
        self.limit_len: Int32Array = numbers[LIMIT_LEN]  # the request ends when it knows so many
        self.num_computed: Int32Array = numbers[NUM_COMPUTED]  # tokens computed by ops planned so far
        self.num_outstanding: Int32Array = numbers[NUM_OUTSTANDING]  # ops of this lease in flight
        self.num_known: Int32Array = numbers[NUM_KNOWN]  # tokens whose ids are known
        self.num_logprobs: Int32Array = numbers[NUM_LOGPROBS]  # -1: the request wants none
        # What a plain step and its result advance lies side by side.
        self.planned: Int32Array = numbers[NUM_COMPUTED : NUM_OUTSTANDING + 1]
        self.answered: Int32Array = numbers[NUM_OUTSTANDING : NUM_KNOWN + 1]
        self.num_logprobs[:] = -1
        self._numbers_of_free = numbers[:, 0].copy()
        self.phase: npt.NDArray[np.uint8] = flags[PHASE]
        self.dirty: BoolArray = flags[DIRTY].view(np.bool_)  # an entry below sent_len was repointed
        self.unsent: BoolArray = flags[UNSENT].view(np.bool_)  # no op of this lease was planned yet
        self.stop_ids: Int32Array = np.full((size, 1), -1, dtype=np.int32)  # padded with -1
        self.ones: Int32Array = np.ones(size, dtype=np.int32)  # to be copied, which is quicker than making some anew
        self.yes: BoolArray = np.ones(size, dtype=np.bool_)
        self.num_asking = 0  # rows whose request wants log probabilities
        self.version = 0
        """Another one after each change but those of `planned` and `answered` in plain decode steps; never set back."""
        self.num_ended = 0
        """Leases ended so far; never set back."""
        self._free = list(range(max_rows, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_rows(self) -> list[int]:
        """Row numbers not in use, the next one granted last; for audits."""
        return list(self._free)

    def begin_lease(self, preferred: int = 0) -> int:
        """Grant a row number and begin a lease of it; `preferred` is granted if it is free.

        Raises:
            PageAccountingError: no row is free; nothing was changed.
        """
        if not self._free:
            raise PageAccountingError("a row was wanted, none is free")
        self.version += 1
        if preferred and preferred in self._free:
            self._note_leases(0)
            self._free.remove(preferred)
            row = preferred
        else:
            self._note_leases(len(self._free) - 1)
            row = self._free.pop()
        self.generation[row] = self.live_generation[row] = self.generation.item(row) + 1
        self.unsent[row] = True
        return row

    def end_lease(self, row: int) -> None:
        """Give a row number back and clear its entries."""
        generation = self.live_generation[row]
        if not generation:
            raise PageAccountingError(f"row {row} is given back, but is free already")
        self._note_leases(len(self._free))
        num_pages = int(self.num_pages[row])
        self._note_entries(row, 0, num_pages)
        self._note_stop_ids(row)
        self.version += 1
        self.num_ended += 1
        if self.num_logprobs[row] >= 0:
            self.num_asking -= 1
        self.pages[row, :num_pages] = 0
        self._numbers[:, row] = self._numbers_of_free
        self.generation[row] = generation
        self._flags[:, row] = 0
        self.stop_ids[row] = -1
        self._free.append(row)

    def set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        """Ids that end the row's request."""
        if not stop_ids:
            return  # all its entries are -1
        self._note_stop_ids(row)
        self.version += 1
        if len(stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.num_pages), len(stop_ids)), -1, dtype=np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row, : len(stop_ids)] = stop_ids

    def ask_logprobs(self, row: int, count: int) -> None:
        """The row's request wants the log probability of each token, and those of the `count` most probable ones."""
        self.version += 1
        self.num_logprobs[row] = count
        self.num_asking += 1

    def row_pages(self, row: int) -> Int32Array:
        """The row's page ids; a view, valid until the row changes."""
        return self.pages[row, : self.num_pages[row]]

    def append(self, row: int, pages: Int32Array) -> None:
        """Grow one row by `pages`."""
        if not len(pages):
            return
        start = int(self.num_pages[row])
        stop = start + len(pages)
        if stop > self.max_pages_per_row:
            raise PageAccountingError(f"row {row} would have {stop} pages, but is {self.max_pages_per_row} wide")
        self.version += 1
        self.pages[row, start:stop] = pages
        self.num_pages[row] = stop

    def append_one_each(self, rows: npt.NDArray[np.integer], pages: Int32Array) -> None:
        """Grow each of `rows` by one page, vectorised; rows are distinct and not full."""
        places = self.num_pages.take(rows)
        self.version += 1
        self.pages[rows, places] = pages
        self.num_pages[rows] = places + 1

    def repoint(self, row: int, start: int, pages: Int32Array) -> None:
        """Write existing entries [start, start + len(pages)): the one way to change what may have been sent already."""
        stop = start + len(pages)
        if stop > self.num_pages[row]:
            raise PageAccountingError(f"row {row}: entries [{start}, {stop}) are repointed, it has {self.num_pages[row]}")
        self._note_entries(row, start, stop)
        self.version += 1
        entries = self.pages[row, start:stop]
        sent = int(self.sent_len[row]) - start
        if sent > 0 and np.count_nonzero(entries[:sent] != pages[:sent]):
            self.dirty[row] = True
        entries[:] = pages

    def changed_since_sent(self, row: int) -> bool:
        """Whether an entry below the sent length differs from what was sent; needs `keep_sent`."""
        assert self.sent_pages is not None
        length = min(int(self.sent_len[row]), int(self.num_pages[row]))
        return bool((self.pages[row, :length] != self.sent_pages[row, :length]).any())

    def gather(self, rows: npt.NDArray[np.integer], starts: Int32Array) -> Int32Array:
        """Entries [start, num_pages) of each row, concatenated in the order of `rows`, int32."""
        if len(rows) == 1:
            row = rows[0]
            return self.pages[row, starts[0] : self.num_pages[row]].copy()
        counts = self.num_pages.take(rows) - starts
        ends = counts.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        if total == 0:
            return np.empty(0, dtype=np.int32)
        # Places in the table read as one line.
        offsets = rows * np.intp(self.max_pages_per_row) + starts - (ends - counts)
        entries: Int32Array = self.pages.ravel().take(offsets.repeat(counts) + np.arange(total))
        return entries

    def look_up(self, rows: npt.NDArray[np.intp]) -> tuple[Int32Array, npt.NDArray[np.uint8]]:
        """Numbers [10, R] and flags [3, R] of R rows, copies; what their lines are is said above."""
        return self._numbers.take(rows, axis=1), self._flags.take(rows, axis=1)

    def numbers_of(self, row: int) -> list[int]:
        """The numbers of one row, in the order of the lines."""
        numbers: list[int] = self._numbers[:, row].tolist()
        return numbers

    def mark_sent(self, rows: npt.NDArray[np.integer], starts: Int32Array) -> None:
        """Note that entries [start, num_pages) of each row are in an op."""
        if self.sent_pages is not None:
            for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
                self._note_entries(row, start, int(self.num_pages[row]), self.sent_pages)
                self.sent_pages[row, start : self.num_pages[row]] = self.pages[row, start : self.num_pages[row]]
        self.sent_len[rows] = self.num_pages.take(rows)
        self.dirty[rows] = False
        self.unsent[rows] = False

    def advance(self, rows: npt.NDArray[np.intp], num_computed: Int32Array, num_outstanding: Int32Array) -> None:
        """An op with `rows` is planned, after which so much of each is computed, and so many results are awaited."""
        self.version += 1
        self.num_computed[rows] = num_computed
        self.num_outstanding[rows] = num_outstanding

    def advance_one(self, row: int, start: int, num_computed: int, num_outstanding: int) -> None:
        """`mark_sent` and `advance` of one row."""
        num_pages = int(self.num_pages[row])
        if self.sent_pages is not None:
            self._note_entries(row, start, num_pages, self.sent_pages)
            self.sent_pages[row, start:num_pages] = self.pages[row, start:num_pages]
        self.version += 1
        self.sent_len[row] = num_pages
        self.dirty[row] = self.unsent[row] = False
        self.num_computed[row] = num_computed
        self.num_outstanding[row] = num_outstanding

    def reset(self) -> None:
        """End every lease; generations go on counting."""
        for row in np.flatnonzero(self.live_generation).tolist():
            self.end_lease(row)
        self._free = list(range(self.max_rows, 0, -1))

    def _snapshot(self) -> Restore:
        columns, num_asking = self._columns.copy(), self.num_asking

        def restore() -> None:
            self.version += 1
            # Behind what the rows had, something may have been appended.
            numbers = columns[: self._numbers.nbytes].view(np.int32).reshape(self._numbers.shape)
            touched = (numbers[LIVE_GENERATION] != 0) | (numbers[GENERATION] != self.generation)
            for row in touched.nonzero()[0].tolist():
                self.pages[row, numbers[NUM_PAGES, row] :] = 0
            self._columns[:] = columns
            self.num_asking = num_asking

        return restore

    def _note_leases(self, start: int) -> None:
        """Free rows from place `start` on are about to change."""
        if self._journal.is_open:
            free = self._free[start:]
            self._journal.note(lambda: self._free.__setitem__(slice(start, None), free))

    def _note_stop_ids(self, row: int) -> None:
        if self._journal.is_open:
            table, old = self.stop_ids, self.stop_ids[row].copy()

            def restore() -> None:
                self.stop_ids = table
                table[row] = old

            self._journal.note(restore)

    def _note_entries(self, row: int, start: int, stop: int, table: Int32Array | None = None) -> None:
        if self._journal.is_open:
            entries = (self.pages if table is None else table)[row, start:stop]
            old = entries.copy()
            self._journal.note(lambda: entries.__setitem__(slice(None), old))
