"""A prefix tree that takes tokens and pages as lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from scheduler_service.core.ops import Int32Array
from scheduler_service.core.radix_cache import RadixCache
from scheduler_service.core.radix_node import Insertion, Match, Node


def _ids(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


class HandCache(RadixCache):
    """The tree under test, and how tests write and read it."""

    def publish(self, tokens: Sequence[int], pages: Sequence[int], node: Node | None = None) -> Insertion:
        """Insert below `node`, by default below the root."""
        return self.insert_prefix(node or self.root(), _ids(tokens), _ids(pages))

    def find(self, tokens: Sequence[int], namespace: str = "") -> Match:
        return self.match_prefix(_ids(tokens), namespace)

    def hit(self, tokens: Sequence[int], namespace: str = "") -> list[int]:
        """The pages of a match."""
        return self.find(tokens, namespace).pages.tolist()

    def shape(self) -> list[tuple[list[int], list[int], int, int]]:
        """Each node as (pages, tokens, depth, locks), ordered."""
        return sorted((node.pages.tolist(), node.tokens.tolist(), node.depth, node.locks) for node in self.nodes())

    def counts(self) -> tuple[int, int, int]:
        return self.num_pages, self.num_locked, self.num_evictable


@pytest.fixture
def make_cache() -> Callable[[int], HandCache]:
    """An empty tree over pages of so many tokens."""
    return HandCache


@pytest.fixture
def cache() -> HandCache:
    """An empty tree over pages of two tokens."""
    return HandCache(page_size=2)
