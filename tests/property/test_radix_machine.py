"""The radix cache beside a dictionary of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_service.core.errors import PageAccountingError
from scheduler_service.core.radix_cache import RadixCache
from scheduler_service.core.radix_node import Match

TOKENS = st.lists(st.integers(0, 2), max_size=14)
NAMESPACES = st.sampled_from(["", "tenant"])


class RadixMachine(RuleBasedStateMachine):
    """The model maps (namespace, tokens of a whole-page prefix) to the page that holds the last page of it."""

    @initialize(page_size=st.integers(1, 4))
    def begin(self, page_size: int) -> None:
        self.page_size = page_size
        self.cache = RadixCache(page_size)
        self.pages: dict[tuple[str, tuple[int, ...]], int] = {}
        self.next_page = 1
        self.locked: list[tuple[str, tuple[int, ...], Match]] = []

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        whole = len(tokens) // self.page_size
        return [tuple(tokens[: (i + 1) * self.page_size]) for i in range(whole)]

    def expected(self, namespace: str, tokens: list[int]) -> list[int]:
        found = []
        for prefix in self.prefixes(tokens):
            if (namespace, prefix) not in self.pages:
                break
            found.append(self.pages[namespace, prefix])
        return found

    def held(self) -> set[int]:
        return {page for namespace, tokens, _ in self.locked for page in self.expected(namespace, list(tokens))}

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def match(self, tokens: list[int], namespace: str) -> None:
        match = self.cache.match_prefix(np.array(tokens, dtype=np.int32), namespace)
        expected = self.expected(namespace, tokens)
        assert match.pages.tolist() == expected
        assert match.num_evictable == len(set(expected) - self.held())

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def insert(self, tokens: list[int], namespace: str) -> None:
        prefixes = self.prefixes(tokens)
        own = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(prefixes)
        known = self.expected(namespace, tokens)
        whole = np.array(tokens[: len(prefixes) * self.page_size], dtype=np.int32)
        insertion = self.cache.insert_prefix(self.cache.root(namespace), whole, np.array(own, dtype=np.int32))
        assert insertion.canonical.tolist() == known + own[len(known) :]
        assert insertion.duplicates.tolist() == own[: len(known)]
        assert insertion.inserted.tolist() == own[len(known) :]
        for prefix, page in zip(prefixes, insertion.canonical.tolist(), strict=True):
            self.pages[namespace, prefix] = page

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def lock(self, tokens: list[int], namespace: str) -> None:
        match = self.cache.match_prefix(np.array(tokens, dtype=np.int32), namespace)
        self.cache.lock(match.node)
        self.locked.append((namespace, tuple(tokens[: len(match.pages) * self.page_size]), match))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        _, _, match = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(match.node)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        evictable = len(self.pages) - len(self.held())
        count = data.draw(st.integers(0, evictable))
        taken = self.cache.evict(count).tolist()
        assert len(taken) == count == len(set(taken))
        assert not set(taken) & self.held()
        for page in taken:
            # Leaves first: when a page goes, nothing that continues its prefix may be left.
            (namespace, prefix), *_ = [key for key, value in self.pages.items() if value == page]
            del self.pages[namespace, prefix]
            longer = [key for key in self.pages if key[0] == namespace and key[1][: len(prefix)] == prefix]
            assert not longer

    @rule()
    def evict_too_many(self) -> None:
        before = self.cache.num_pages
        with pytest.raises(PageAccountingError):
            self.cache.evict(self.cache.num_evictable + 1)
        assert self.cache.num_pages == before

    @precondition(lambda self: not self.held())
    @rule()
    def reset(self) -> None:
        assert sorted(self.cache.reset().tolist()) == sorted(self.pages.values())
        self.pages.clear()

    @invariant()
    def counts_are_those_of_a_walk(self) -> None:
        walked = [page for node in self.cache.nodes() for page in node.pages.tolist()]
        assert sorted(walked) == sorted(self.pages.values())
        assert self.cache.num_pages == len(walked)
        assert self.cache.num_locked == len(self.held())
        for namespace, tokens, match in self.locked:
            assert self.cache.path_pages(match.node).tolist() == self.expected(namespace, list(tokens))


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_least_recently_used_leaf_goes_first() -> None:
    """Eviction follows the order of use, not of insertion."""
    cache = RadixCache(1)
    root = cache.root()
    for token in range(4):
        cache.insert_prefix(root, np.array([token], dtype=np.int32), np.array([token + 1], dtype=np.int32))
    for token in (0, 2):
        match = cache.match_prefix(np.array([token], dtype=np.int32))
        cache.lock(match.node)
        cache.unlock(match.node)
    assert cache.evict(4).tolist() == [2, 4, 1, 3]
