"""The audit of pages and of the prefix tree: each test damages one thing and expects just the findings that name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.invariants import audit
from scheduler_service.core.page_pool import PageState

Subject = Any
Drive = Callable[..., Any]


# Pages


def test_page_free_twice(subject: Subject) -> None:
    """The free stack has each page once."""
    subject.placement.pool._stack[0] = subject.placement.pool._stack[1]
    subject.finds(
        "a page is free twice",
        "the free stack and the states of pages disagree",
    )


def test_free_page_that_is_held(subject: Subject) -> None:
    """Stack and states must agree."""
    subject.placement.pool._states[3] = PageState.FREE
    subject.finds(
        "private pages are [4, 7, 8], rows hold [3, 4, 7, 8] besides the tree's",
        "the free stack and the states of pages disagree",
        "is counted, but is not there: 8 + 4 + 3",
    )


def test_page_in_the_tree_twice(subject: Subject) -> None:
    """A page holds one prefix."""
    subject.node_of(2).pages[:] = 1
    subject.finds(
        "request 'A': its locked path is not the first 2 pages",
        "a page is in the tree twice: [1, 1, 5, 6]",
        "the tree holds [1, 1, 5, 6], the pool counts [1, 2, 5, 6] as cached",
    )


def test_tree_and_pool_disagree(subject: Subject) -> None:
    """The pool must know which pages the tree owns."""
    subject.placement.pool._states[2] = PageState.PRIVATE
    subject.finds(
        "request 'A': row 1 counts 2 entries of [1, 2, 3, 7] as the tree's, some are not",
        "private pages are [2, 3, 4, 7, 8], rows hold [3, 4, 7, 8]",
        "the tree holds [1, 2, 5, 6], the pool counts [1, 5, 6] as cached",
        "is counted, but is not there: 8 + 4 + 5",
    )


@pytest.mark.parametrize("damage", ["pool", "tree"])
def test_counts_do_not_add_up(subject: Subject, damage: str) -> None:
    """Counters are compared with what is there."""
    if damage == "pool":
        subject.placement.pool.num_cached += 1
    else:
        subject.placement.cache.num_pages += 1
    subject.finds(
        "is counted, but is not there: 8 + 4 + 4",
    )


def test_idle_but_not_clean(drive: Drive) -> None:
    """With no request left nothing may be private or locked."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3])
    driver.run()
    driver.scheduler.placement.pool.take(1)
    driver.scheduler.placement.cache.lock(next(driver.scheduler.placement.cache.nodes()))
    assert "idle, but 1 pages are private and 1 locked" in audit(driver.scheduler)


def test_row_number_lost(subject: Subject) -> None:
    """Free rows and holders are all rows."""
    subject.placement.rows._free.pop()
    subject.finds("1 rows are free and 2 in use, of 4")


def test_row_number_free_twice(subject: Subject) -> None:
    """A row number that is free twice would be leased twice."""
    free = subject.placement.rows._free
    free[0] = free[1]
    subject.finds("a row is free twice")


def test_leased_row_that_nobody_has(subject: Subject) -> None:
    """Leases and holders are the same rows."""
    subject.placement.rows.live_generation[3] = 1
    subject.finds("rows [1, 2] are in use, but rows [1, 2, 3] are leased", "rows [3] are leased, but free")


def test_rows_out_of_order(subject: Subject) -> None:
    """Who is first in order is never retracted for pages."""
    subject.driver.requests["A"].priority = 5
    subject.finds("rows [1, 2] are not in the order of their requests: [(5, 3), (0, 4)]")


# Tree


def test_lock_count_of_a_root(subject: Subject) -> None:
    """A root is kept as long as somebody uses its namespace."""
    subject.placement.cache.root().locks += 1
    subject.finds("the root of namespace '' counts 3 locks, requests hold 2")


def test_root_that_nobody_uses(subject: Subject) -> None:
    """Clients choose the names of namespaces: none is kept for nothing."""
    subject.placement.cache.root("tenant")
    subject.finds("the root of namespace 'tenant' is kept, but nobody uses it")


def test_lock_count_is_not_the_holders(subject: Subject) -> None:
    """A lock too many keeps a page for ever, one too few loses it under a reader."""
    subject.node_of(2).locks += 1
    subject.finds("pages [2] counts 2 locks, requests hold 1")


def test_locked_pages_miscounted(subject: Subject) -> None:
    """The number of locked pages decides what is evictable."""
    subject.placement.cache.num_locked -= 1
    subject.finds(
        "2 pages of the tree are locked, 1 are counted",
    )


def test_node_of_wrong_depth(subject: Subject) -> None:
    """A node's depth is its parent's and its own pages."""
    subject.node_of(2).depth += 1
    subject.finds("pages [2] has depth 3 and 2 tokens")


def test_node_whose_tokens_do_not_fit_its_pages(subject: Subject) -> None:
    """Every page of a node has page_size tokens."""
    node = subject.node_of(2)
    node.tokens = np.append(node.tokens, np.int32(9))
    subject.finds(
        "request 'A': the tokens of its locked path are not its own",
        "pages [2] has depth 2 and 3 tokens",
    )


def test_node_not_found_from_its_parent(subject: Subject) -> None:
    """A node is reached by the tokens of its first page."""
    subject.node_of(2).tokens[0] = 99
    subject.finds(
        "request 'A': the tokens of its locked path are not its own",
        "pages [2] is not found from its parent",
    )


def test_leaf_that_would_never_be_evicted(subject: Subject) -> None:
    """An unlocked leaf waits in the heap of leaves."""
    subject.driver.abort("A")
    leaf = next(node for node in subject.placement.cache.nodes() if not node.children and not node.locks)
    leaf.queued = False
    subject.finds(f"the tree's leaf of pages {leaf.pages.tolist()} would never be evicted")
