"""Page events: which full pages the prefix cache holds, told to others as they come and go.

A page is known outside by a hash of 64 bits of its tokens and of all that comes before them, so that it means the same in every
process and after every restart:

    hash of a page  = blake2b(hash of the page before it, 8 bytes, then its tokens, int32 each; digest of 8 bytes)
    in place of the hash before a first page: blake2b("pagemirror", a zero byte, the namespace in UTF-8; digest of 8 bytes)

Integers are little-endian. The tree holds one page for a prefix within a namespace, and namespaces never share, so a hash names
one page, and the page is gone when its hash is removed. Hashes serve those who route requests; the tree compares tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from scheduler_service.core.ops import Int32Array, UInt64Array
from scheduler_service.core.page_records import Cleared, Evicted, Record, Stored

MAX_BATCH_BYTES = 512 * 1024
"""Of tokens and hashes in one batch; a page more where it alone is larger."""

EVENT_BYTES = 256
"""An event counts as so many bytes beside its tokens and hashes."""


@dataclass(frozen=True, slots=True, eq=False)
class PagesStored:
    """Pages that follow one another have come into the cache; the cache holds what comes before them.

    Attributes:
        hashes: uint64 [n], n ≥ 1
        parent: hash of the page before the first of them; None where they begin a sequence.
        tokens: int32 [n * page_size]; not to be changed.
        namespace: the requests' `cache_namespace`.
    """

    hashes: UInt64Array
    parent: int | None
    tokens: Int32Array
    page_size: int
    namespace: str = ""

    @property
    def num_bytes(self) -> int:
        return int(self.hashes.nbytes + self.tokens.nbytes) + EVENT_BYTES

    def split(self, num_pages: int) -> tuple[PagesStored, PagesStored]:
        """The same in two events, `num_pages` pages in the first."""
        cut = num_pages * self.page_size
        return (
            replace(self, hashes=self.hashes[:num_pages], tokens=self.tokens[:cut]),
            replace(self, hashes=self.hashes[num_pages:], tokens=self.tokens[cut:], parent=int(self.hashes[num_pages - 1])),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PagesRemoved:
    """These pages have left the cache. `hashes`: uint64 [n], n ≥ 1."""

    hashes: UInt64Array

    @property
    def num_bytes(self) -> int:
        return int(self.hashes.nbytes) + EVENT_BYTES

    def split(self, num_pages: int) -> tuple[PagesRemoved, PagesRemoved]:
        """The same in two events, `num_pages` pages in the first."""
        return PagesRemoved(self.hashes[:num_pages]), PagesRemoved(self.hashes[num_pages:])


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """The cache is empty."""

    num_bytes: int = EVENT_BYTES


PageEvent: TypeAlias = PagesStored | PagesRemoved | PagesCleared


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Which part of the present state a batch is: `index` of `count`, counted from 0; the state has `num_pages` pages."""

    index: int
    count: int
    num_pages: int


@dataclass(frozen=True, slots=True, eq=False)
class PageBatch:
    """What happened between two looks at the cache, in its order, or a part of the present state.

    Attributes:
        sequence: one more than that of the batch before. In all parts of a state: that of the last batch that is in the state.
        timestamp: seconds since 1970, when the batch was made.
        snapshot: None: a batch of events. A state begins with PagesCleared, and then stores everything.
    """

    sequence: int
    timestamp: float
    events: tuple[PageEvent, ...]
    snapshot: SnapshotPart | None = None

    @property
    def num_bytes(self) -> int:
        return EVENT_BYTES + sum(event.num_bytes for event in self.events)

    @property
    def stamp(self) -> int:
        """For receivers that expect consecutive numbers: parts of a state count up to the state's sequence."""
        part = self.snapshot
        return self.sequence if part is None else self.sequence - (part.count - 1 - part.index)


def first_hash(namespace: str) -> int:
    """What the first page of a sequence in this namespace has in place of the hash of a page before it."""
    digest = hashlib.blake2b(b"pagemirror\0" + namespace.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def chain_hashes(before: int, tokens: Int32Array, page_size: int) -> UInt64Array:
    """Hashes of the pages with these `tokens`, int32 [n * page_size], which follow the page of hash `before`; uint64 [n]."""
    data, width = tokens.astype("<i4", copy=False).tobytes(), 4 * page_size
    blake2b, last, digests = hashlib.blake2b, before.to_bytes(8, "little"), []
    for start in range(0, len(data), width):
        last = blake2b(last + data[start : start + width], digest_size=8).digest()
        digests.append(last)
    return np.frombuffer(b"".join(digests), dtype="<u8")


def batches_of(events: Iterable[PageEvent]) -> Iterator[tuple[PageEvent, ...]]:
    """The same events in portions of at most MAX_BATCH_BYTES, large events cut between pages. Nothing for no events."""
    portion: list[PageEvent] = []
    size = 0
    for piece in (piece for event in events for piece in _pieces(event)):
        if portion and size + piece.num_bytes > MAX_BATCH_BYTES:
            yield tuple(portion)
            portion, size = [], 0
        portion.append(piece)
        size += piece.num_bytes
    if portion:
        yield tuple(portion)


def _pieces(event: PageEvent) -> Iterator[PageEvent]:
    if isinstance(event, PagesCleared):
        yield event
        return
    per_page = (event.num_bytes - EVENT_BYTES) // len(event.hashes)
    most = max(1, (MAX_BATCH_BYTES - EVENT_BYTES) // per_page)
    while len(event.hashes) > most:
        head, event = event.split(most)
        yield head
    yield event


class PageHashes:
    """The hash of every page of the tree: turns records into events, in their order."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._hashes = np.zeros(num_pages + 1, dtype=np.uint64)
        self._namespaces: dict[int, str] = {}  # of pages outside of the common one

    def follow(self, record: Record) -> PageEvent:
        """The event that this record comes to."""
        if isinstance(record, Stored):
            namespace = self._namespace(record)
            before = first_hash(namespace) if record.parent == 0 else int(self._hashes[record.parent])
            self._hashes[record.pages] = chain_hashes(before, record.tokens, self._page_size)
            if namespace:
                self._namespaces |= dict.fromkeys(record.pages.tolist(), namespace)
            return self.describe(record)
        if isinstance(record, Evicted):
            if self._namespaces:
                for page in record.pages.tolist():
                    self._namespaces.pop(page, None)
            return PagesRemoved(self._hashes[record.pages])
        assert isinstance(record, Cleared)
        self._namespaces.clear()
        return PagesCleared()

    def describe(self, record: Stored) -> PagesStored:
        """A record that was followed, or one of the same pages divided otherwise, as an event."""
        parent = None if record.parent == 0 else int(self._hashes[record.parent])
        return PagesStored(self._hashes[record.pages], parent, record.tokens, self._page_size, self._namespace(record))

    def _namespace(self, record: Stored) -> str:
        return record.namespace if record.parent == 0 else self._namespaces.get(record.parent, "")
