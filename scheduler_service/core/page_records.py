"""What happens to the pages of the prefix tree, as plain records, for whoever follows it from outside.

A page number names one page of the tree from the record that stores it to the one that takes it out; later it may come again
with other tokens. So records have to be read in their order, and all of them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from scheduler_service.core.ops import Int32Array


class Stored(NamedTuple):
    """`pages` have come into the tree, one after the other, below `parent`.

    Attributes:
        parent: the page before them, which the tree holds; 0 where they begin a sequence.
        namespace: of that sequence; said only where `parent` is 0, since all that follows has it too.
        pages: int32 [n], n ≥ 1
        tokens: int32 [n * page_size]; not to be changed.
    """

    parent: int
    namespace: str
    pages: Int32Array
    tokens: Int32Array


class Evicted(NamedTuple):
    """`pages`, int32 [n], have left the tree; nothing in it followed them any more."""

    pages: Int32Array


class Cleared(NamedTuple):
    """The tree is empty."""


Record: TypeAlias = Stored | Evicted | Cleared
