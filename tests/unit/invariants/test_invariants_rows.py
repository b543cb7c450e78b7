"""The audit of rows finds what it claims to find: each test damages one thing and expects just the findings that name it."""

from __future__ import annotations

from typing import Any

Subject = Any


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
    subject.finds(
        "request 'A': a page is in row 1 twice: [1, 2, 3, 3]",
        "page 3 is private to 2 rows",
        "private pages are [3, 4, 7, 8], rows hold [3, 4, 8] besides the tree's",
        "row 1 changed below its sent length",
    )


def test_tree_entries_that_are_not_the_trees(subject: Subject) -> None:
    """A row must not count a private page among the tree's."""
    subject.placement.rows.num_tree[subject.row["A"]] = 3
    subject.finds(
        "request 'A': row 1 counts 3 entries of [1, 2, 3, 7] as the tree's, some are not",
        "request 'A': its locked path is not the first 3 pages",
        "private pages are [3, 4, 7, 8], rows hold [4, 7, 8] besides the tree's",
    )


def test_tree_pages_beyond_the_shared_part(subject: Subject) -> None:
    """A row must not believe that it owns a page of the tree."""
    subject.placement.rows.num_tree[subject.row["A"]] = 1
    subject.finds(
        "request 'A': row 1 holds pages of the tree beyond its first 1",
        "request 'A': its locked path is not the first 1 pages",
        "private pages are [3, 4, 7, 8], rows hold [2, 3, 4, 7, 8] besides the tree's",
    )


def test_locked_path_is_not_the_rows_prefix(subject: Subject) -> None:
    """The lock a request holds must keep just the pages it reads."""
    subject.driver.requests["A"].node = subject.driver.requests["B"].node
    subject.finds(
        "request 'A': its locked path is not the first 2 pages of its row",
        "pages [2] counts 1 locks, requests hold 0",
    )


def test_request_believes_in_another_row(subject: Subject) -> None:
    """Request and row must name each other."""
    subject.driver.requests["A"].row = 4
    subject.placement.rows.num_known[4] = len(subject.driver.requests["A"].tokens)
    subject.finds(
        "request 'A': row 1 is its, but it is not live or believes to hold row 4",
        "request 'A': row 4 knows",
        "request 'A': row 4 ends at 0 tokens",
        "request 'A' counts 0 ops in flight, there are 1",
    )


def test_more_tokens_computed_than_pages_hold(subject: Subject) -> None:
    """Every computed token has a place."""
    subject.placement.rows.num_computed[subject.row["B"]] = 7
    subject.finds(
        "request 'B': 7 tokens computed in 3 pages",
        "request 'B': 7 tokens computed, 5 known, and 1 results awaited of row 2",
    )


def test_tokens_computed_that_nobody_knows(subject: Subject) -> None:
    """Each computed token is known, or a result in flight will tell it."""
    subject.placement.rows.num_computed[subject.row["B"]] = 6
    subject.finds("request 'B': 6 tokens computed, 5 known, and 1 results awaited of row 2")


def test_tree_pages_that_are_not_computed(subject: Subject) -> None:
    """What others read is written: a row has computed at least what it shares."""
    subject.placement.rows.num_computed[subject.row["A"]] = 3
    subject.finds("request 'A': 2 pages of row 1 are the tree's, but only 3 tokens are computed")


def test_row_of_a_request_that_is_not_live(subject: Subject) -> None:
    """A row whose request is gone is never given back."""
    del subject.scheduler.requests["B"]
    subject.finds("request 'B': row 2 is its, but it is not live")


def test_row_without_a_lock(subject: Subject) -> None:
    """Pages of the tree that are used without a lock are evicted under their reader."""
    subject.placement.cache.unlock(subject.node_of(2))
    subject.driver.requests["A"].node = None
    subject.finds("request 'A': it locks nothing in the tree and uses [1, 2] of it")


def test_prefix_of_other_tokens(subject: Subject) -> None:
    """Pages that were written for another prompt are wrong however well they are accounted for."""
    subject.driver.requests["B"].tokens[1] = 5
    subject.finds("request 'B': the tokens of its locked path are not its own")


def test_prefix_of_another_tenant(subject: Subject) -> None:
    """Namespaces share nothing."""
    subject.driver.requests["B"].cache_namespace = "other"
    subject.finds("request 'B': its locked path does not begin at the root of namespace 'other'")


def test_private_page_of_two_rows(subject: Subject) -> None:
    """A page that two rows write is the fault this project exists for."""
    subject.placement.rows.pages[subject.row["B"], 2] = 7
    subject.finds(
        "page 7 is private to 2 rows",
        "private pages are [3, 4, 7, 8], rows hold [3, 4, 7] besides the tree's",
        "row 2 changed below its sent length",
    )


def test_private_page_that_no_row_holds(subject: Subject) -> None:
    """A page that is lost is never freed."""
    subject.placement.pool.take(1)
    subject.finds(
        "private pages are [3, 4, 7, 8, 9], rows hold [3, 4, 7, 8] besides the tree's",
    )
