"""The audit finds what it claims to find: each test damages one thing by hand and looks for the finding that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import InvariantViolation
from scheduler_service.core.invariants import audit, audit_op, audit_writes, check
from scheduler_service.core.ops import ForwardOp
from scheduler_service.core.page_pool import PageState
from scheduler_service.core.placement import Placement
from scheduler_service.core.radix_cache import Node
from scheduler_service.core.row_table import Phase
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.states import State

Drive = Callable[..., Any]


class Subject:
    """A scheduler in the middle of its work: A holds [1, 2, 3, 7], B holds [1, 4, 8], C is retracted, D waits.

    Page 1 is shared, pages 1 and 2 are the tree's, as are 5 and 6, which C has published; one op is in flight.
    """

    def __init__(self, driver: Any) -> None:
        driver.submit("old", [1, 2, 3])
        driver.run()
        driver.submit("C", [8, 8, 8], 9, priority=1)
        driver.submit("A", [1, 2, 3, 4, 5], 9)
        driver.submit("B", [1, 2, 9], 9)
        driver.plan()
        driver.complete()
        driver.plan()
        driver.complete()
        driver.retract("C")
        driver.submit("D", [7], 9)
        driver.plan()
        self.driver = driver
        self.scheduler: Scheduler = driver.scheduler
        self.placement: Placement = driver.scheduler.placement
        self.row = {name: driver.requests[name].row for name in "AB"}

    def node_of(self, page: int) -> Node:
        return next(node for node in self.placement.cache.nodes() if page in node.pages.tolist())

    def finds(self, *words: str) -> None:
        """One of the findings has all the words, and `check` raises with it."""
        findings = audit(self.scheduler)
        assert any(all(word in finding for word in words) for finding in findings), findings
        with pytest.raises(InvariantViolation) as caught:
            check(self.scheduler)
        assert caught.value.findings == findings


@pytest.fixture
def subject(drive: Drive) -> Subject:
    """The scheduler in question, sound so far."""
    made = Subject(drive(page_size=2, overlap_depth=1, max_rows=4))
    assert audit(made.scheduler) == []
    return made


def test_subject_is_what_it_says(subject: Subject) -> None:
    """The damage below is done to this state."""
    assert subject.driver.rows == {"A": [1, 2, 3, 7], "B": [1, 4, 8]}
    assert subject.driver.tree == {1, 2, 5, 6}
    assert subject.placement.rows.num_tree[[subject.row["A"], subject.row["B"]]].tolist() == [2, 1]
    scheduler = subject.scheduler
    assert (scheduler.num_retracted, scheduler.num_waiting, scheduler.num_in_flight) == (1, 1, 1)


# Rows


def test_page_twice_in_a_row(subject: Subject) -> None:
    """A row that names a page twice aliases two positions."""
    subject.placement.rows.pages[subject.row["A"], 3] = 3
    subject.finds("request 'A'", "a page is in row", "twice: [1, 2, 3, 3]")


def test_tree_entries_that_are_not_the_trees(subject: Subject) -> None:
    """A row must not count a private page among the tree's."""
    subject.placement.rows.num_tree[subject.row["A"]] = 3
    subject.finds("request 'A'", "counts 3 entries", "some are not")


def test_tree_pages_beyond_the_shared_part(subject: Subject) -> None:
    """A row must not believe that it owns a page of the tree."""
    subject.placement.rows.num_tree[subject.row["A"]] = 1
    subject.finds("request 'A'", "holds pages of the tree beyond its first 1")


def test_locked_path_is_not_the_rows_prefix(subject: Subject) -> None:
    """The lock a request holds must keep just the pages it reads."""
    subject.driver.requests["A"].node = subject.driver.requests["B"].node
    subject.finds("request 'A'", "its locked path is not the first 2 pages")


def test_request_believes_in_another_row(subject: Subject) -> None:
    """Request and row must name each other."""
    subject.driver.requests["A"].row = 4
    subject.placement.rows.num_known[4] = len(subject.driver.requests["A"].tokens)
    subject.finds("request 'A'", f"believes to hold row 4, holds {subject.row['A']}")


def test_more_tokens_computed_than_pages_hold(subject: Subject) -> None:
    """Every computed token has a place."""
    subject.placement.rows.num_computed[subject.row["B"]] = 7
    subject.finds("request 'B'", "7 tokens computed in 3 pages")


def test_private_page_of_two_rows(subject: Subject) -> None:
    """A page that two rows write is the fault this project exists for."""
    subject.placement.rows.pages[subject.row["B"], 2] = 7
    subject.finds("page 7 is private to 2 rows")


def test_private_page_that_no_row_holds(subject: Subject) -> None:
    """A page that is lost is never freed."""
    lost = int(subject.placement.pool.take(1)[0])
    subject.finds("private pages are", "rows hold", str(lost))


# Pages


def test_page_free_twice(subject: Subject) -> None:
    """The free stack has each page once."""
    subject.placement.pool._stack[0] = subject.placement.pool._stack[1]
    subject.finds("a page is free twice")


def test_free_page_that_is_held(subject: Subject) -> None:
    """Stack and states must agree."""
    subject.placement.pool._states[3] = PageState.FREE
    subject.finds("the free stack and the states of pages disagree")


def test_page_in_the_tree_twice(subject: Subject) -> None:
    """A page holds one prefix."""
    subject.node_of(2).pages[:] = 1
    subject.finds("a page is in the tree twice")


def test_tree_and_pool_disagree(subject: Subject) -> None:
    """The pool must know which pages the tree owns."""
    subject.placement.pool._states[2] = PageState.PRIVATE
    subject.finds("the tree holds", "the pool counts", "as cached")


@pytest.mark.parametrize("damage", ["pool", "tree"])
def test_counts_do_not_add_up(subject: Subject, damage: str) -> None:
    """Counters are compared with what is there."""
    if damage == "pool":
        subject.placement.pool.num_cached += 1
    else:
        subject.placement.cache.num_pages += 1
    subject.finds("free", "cached", "private", "is not")


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


# Tree


def test_lock_count_is_not_the_holders(subject: Subject) -> None:
    """A lock too many keeps a page for ever, one too few loses it under a reader."""
    subject.node_of(2).locks += 1
    subject.finds("pages [2] counts 2 locks, requests hold 1")


def test_locked_pages_miscounted(subject: Subject) -> None:
    """The number of locked pages decides what is evictable."""
    subject.placement.cache.num_locked -= 1
    subject.finds("pages of the tree are locked", "are counted")


def test_node_of_wrong_depth(subject: Subject) -> None:
    """A node's depth is its parent's and its own pages."""
    subject.node_of(2).depth += 1
    subject.finds("pages [2] has depth 3 and 2 tokens")


def test_node_whose_tokens_do_not_fit_its_pages(subject: Subject) -> None:
    """Every page of a node has page_size tokens."""
    node = subject.node_of(2)
    node.tokens = np.append(node.tokens, np.int32(9))
    subject.finds("pages [2] has depth 2 and 3 tokens")


def test_node_not_found_from_its_parent(subject: Subject) -> None:
    """A node is reached by the tokens of its first page."""
    subject.node_of(2).tokens[0] = 99
    subject.finds("pages [2] is not found from its parent")


def test_leaf_that_would_never_be_evicted(subject: Subject) -> None:
    """An unlocked leaf waits in the heap of leaves."""
    subject.driver.abort("A")
    leaf = next(node for node in subject.placement.cache.nodes() if not node.children and not node.locks)
    leaf.queued = False
    subject.finds(f"the tree's leaf of pages {leaf.pages.tolist()} would never be evicted")


# Requests


def test_finished_request_still_live(subject: Subject) -> None:
    """What is over is not in the table of the live."""
    subject.driver.requests["D"].state = State.FINISHED
    subject.finds("request 'D' is over, but live")


@pytest.mark.parametrize("column", ["num_known", "phase"])
def test_row_and_request_disagree(subject: Subject, column: str) -> None:
    """The row's copy of a request's length and state is exact."""
    getattr(subject.placement.rows, column)[subject.row["B"]] = Phase.PREFILLING
    subject.finds("request 'B'", "knows", "tokens, the request")


def test_outstanding_steps_miscounted(subject: Subject) -> None:
    """A request that believes in a step too many would never resume."""
    subject.placement.rows.num_outstanding[subject.row["B"]] += 1
    subject.finds("request 'B' counts 2 ops in flight, there are 1")


def test_outstanding_steps_of_a_retracted_request_miscounted(subject: Subject) -> None:
    """The same for one that holds no row."""
    subject.driver.requests["C"].num_outstanding = 1
    subject.finds("request 'C' counts 1 ops in flight, there are 0")


def test_request_that_should_have_ended(subject: Subject) -> None:
    """A request with all its tokens does not stay."""
    request = subject.driver.requests["A"]
    request.limit_len = len(request.tokens)
    subject.finds("request 'A' has all its", "but is decoding")


@pytest.mark.parametrize("name", ["C", "D"])
def test_queue_lost_a_request(subject: Subject, name: str) -> None:
    """A request that waits must be in the queue for its state."""
    if name == "C":
        subject.scheduler._retracted.remove(subject.driver.requests["C"])
    else:
        subject.scheduler._waiting.pop()
    subject.finds("queues hold", "states say")


# What was sent


def test_change_below_the_sent_length_unmarked(subject: Subject) -> None:
    """A write past `repoint` is found by comparing with what was sent."""
    pages, row = subject.placement.rows.pages, subject.row["A"]
    pages[row, [2, 3]] = pages[row, [3, 2]]
    subject.finds(f"row {row} changed below its sent length and is not marked dirty")


# Ops


@pytest.fixture
def op(subject: Subject) -> ForwardOp:
    """The op in flight, and sound."""
    made: ForwardOp = subject.driver.op
    assert audit_op(made) == audit_writes(subject.scheduler, made) == []
    return made


def test_op_names_a_row_twice(op: ForwardOp) -> None:
    """Two entries of one row would race."""
    op.req_pool_indices[1] = op.req_pool_indices[0]
    assert any("a row number is named twice" in finding for finding in audit_op(op))


def test_op_whose_lengths_do_not_add_up(op: ForwardOp) -> None:
    """Begin and size make the row's length."""
    op.sizes[0] += 1
    assert any("begin + size is not row_len" in finding for finding in audit_op(op))


def test_op_with_too_many_input_ids(op: ForwardOp) -> None:
    """The ids are those of the extend rows."""
    op.input_ids = np.append(op.input_ids, np.int32(1))
    assert any(f"{len(op.input_ids)} input ids for lengths" in finding for finding in audit_op(op))


def test_op_with_a_row_that_computes_nothing(op: ForwardOp) -> None:
    """A row without an input has no place in an op."""
    op.input_lens[-1] = 0
    assert any("a row computes nothing" in finding for finding in audit_op(op))


def test_op_that_writes_a_page_of_the_tree(subject: Subject, op: ForwardOp) -> None:
    """Shared pages are never written."""
    index = op.req_pool_indices.tolist().index(subject.row["A"])
    op.num_computed[index] = 3
    assert audit_writes(subject.scheduler, op) == [
        f"step {op.step}: row {subject.row['A']} writes logical page 1, but its first 2 pages are the tree's"
    ]


def test_op_without_a_page_for_its_last_token(subject: Subject, op: ForwardOp) -> None:
    """Every token an op computes has a page in the row it carries."""
    op.input_lens[0] += 20
    row = int(op.req_pool_indices[0])
    assert f"step {op.step}: row {row} has no page for its last token" in audit_writes(subject.scheduler, op)
