"""What the prefix tree is made of, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_service.core.journal import Restore
from scheduler_service.core.ops import Int32Array
from scheduler_service.core.page_records import Stored

NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)


class Node:
    """A run of tokens and the pages that hold its KV; `depth` is the number of pages from the root to the node's end."""

    __slots__ = ("children", "depth", "last_use", "locks", "namespace", "pages", "parent", "queued", "serial", "tokens")

    def __init__(
        self, parent: Node | None, tokens: Int32Array, pages: Int32Array, depth: int, serial: int, namespace: str = ""
    ) -> None:
        self.parent = parent
        self.tokens = tokens  # [len(pages) * page_size]
        self.pages = pages  # [n]
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_use = 0
        self.queued = False  # has its one entry in the heap of leaves
        self.serial = serial  # settles ties in the heap
        self.namespace = namespace  # of a root

    def shared_pages(self, tokens: Int32Array, position: int, page_size: int) -> int:
        """Whole pages that it and `tokens[position:]` have in common."""
        length = min(len(self.tokens), len(tokens) - position)
        if not length:
            return 0
        differs = self.tokens[:length] != tokens[position : position + length]
        first = differs.argmax()
        return int(first if differs[first] else length) // page_size

    def path_pages(self) -> Int32Array:
        """All pages from the root to its end."""
        parts = []
        current: Node | None = self
        while current is not None:
            parts.append(current.pages)
            current = current.parent
        return np.concatenate(parts[::-1])

    def stored(self) -> Stored:
        """The record that stores its pages, of which there must be some."""
        parent = self.parent
        assert parent is not None  # a root holds no pages
        return Stored(0 if parent.parent is None else int(parent.pages[-1]), parent.namespace, self.pages, self.tokens)

    def saved(self) -> Restore:
        """Puts back what the node is now, except for its children, whatever has become of it."""
        parent, tokens, pages, depth = self.parent, self.tokens, self.pages, self.depth
        locks, last_use = self.locks, self.last_use

        def restore() -> None:
            self.parent, self.tokens, self.pages, self.depth = parent, tokens, pages, depth
            self.locks, self.last_use = locks, last_use

        return restore


@dataclass(slots=True)
class Match:
    """A cached prefix: `pages` from logical page 0, `num_evictable` of which nobody has locked; `node` is where it ends."""

    node: Node
    pages: Int32Array
    num_evictable: int


@dataclass(slots=True)
class Insertion:
    """What publishing came to: the tree's pages for the published run, and which of the caller's were duplicates of those."""

    node: Node
    canonical: Int32Array
    inserted: Int32Array
    duplicates: Int32Array


def joined(parts: list[Int32Array]) -> Int32Array:
    """The parts as one array, which is not to be written to."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_PAGES
