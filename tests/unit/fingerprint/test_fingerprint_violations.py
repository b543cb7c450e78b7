"""The fingerprint model: every wrong read is found, counted and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime_service.executors.fingerprint import MAX_VIOLATIONS

Make = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]


def test_resume_with_a_stale_head_is_wrong_and_named(make_runtime: Make, row_step: Make) -> None:
    """The worked example told only its tail: the mirror reads [1,2,1], the token is 776, and page 1 is named (B01)."""
    runtime = make_runtime(zero_fill=False)
    runtime.step(row_step(1, [1, 2], [1, 2, 3, 4, 5, 6, 7], lease="A"), row_step(2, [3, 4], [1, 2, 3, 4, 9], lease="B"))
    assert runtime.step(row_step(1, [3, 2], [168], num_computed=7, lease="A", begin=2), released=(1, 2)) == [523]
    assert runtime.violations == []  # page 1 still holds the same four tokens
    assert runtime.step(row_step(1, [3, 2, 1], num_computed=8, begin=2)) == [776]
    assert runtime.mirror.row(1).tolist() == [1, 2, 1]
    assert len(runtime.violations) == 1
    found = "request 'A' in row 1 reads position 0 from page 1: the cell was written for another position or prefix"
    assert runtime.violations[0] == f"{found} (1 wrong positions in this step)"


def test_pages_of_two_prefixes_put_together_are_found(make_runtime: Make, row_step: Make) -> None:
    """A cached row of page 0 of one prompt and page 1 of another is a violation at position 4."""
    runtime = make_runtime()
    runtime.step(
        row_step(1, [1, 2], [1, 2, 3, 4, 5, 6, 7, 8], lease="A"), row_step(2, [3, 4], [9, 9, 9, 9, 5, 6, 7, 8], lease="B")
    )
    runtime.step(row_step(3, [1, 4, 5], [10], num_computed=8, lease="C"))
    assert len(runtime.violations) == 1
    assert "request 'C' in row 3 reads position 4 from page 4" in runtime.violations[0]
    assert "4 wrong positions" in runtime.violations[0]


def test_right_page_at_a_wrong_depth_is_found_where_the_sum_is_right(
    make_runtime: Make, row_step: Make, definition: Definition
) -> None:
    """Two pages of equal tokens, swapped, give the right token and still eight violations of one row."""
    prompt = [5] * 8
    runtime = make_runtime()
    runtime.step(row_step(1, [1, 2, 3], prompt, lease="A"))
    token = runtime.step(row_step(1, [2, 1, 3], num_computed=8))
    assert token == [definition(prompt, 2)[1]]
    assert len(runtime.violations) == 1
    assert "position 0 from page 2" in runtime.violations[0]
    assert "8 wrong positions" in runtime.violations[0]


def test_foreign_prefix_that_is_consistent_shows_in_the_output_only(
    make_runtime: Make, row_step: Make, definition: Definition
) -> None:
    """The stated limit: a lease started on another prompt's pages as a whole reads what those pages say."""
    runtime = make_runtime()
    runtime.step(row_step(1, [1], [9, 9, 9, 9], lease="A"))
    assert runtime.step(row_step(2, [1, 2], [5], num_computed=4, lease="B")) == definition([9, 9, 9, 9, 5], 1)
    assert runtime.violations == []


def test_overwritten_cells_are_found_by_their_owner(make_runtime: Make, row_step: Make) -> None:
    """A page granted to a second request while the first still names it is reported for the first."""
    runtime = make_runtime()
    runtime.step(row_step(1, [1, 2], [1, 2, 3, 4, 5], lease="A"))
    runtime.step(row_step(2, [1], [7, 7], lease="B"))
    assert runtime.violations == []
    runtime.step(row_step(1, [1, 2], num_computed=5))
    assert len(runtime.violations) == 1
    assert "request 'A' in row 1 reads position 0 from page 1" in runtime.violations[0]


def test_two_rows_that_write_one_page_in_one_step_are_found_in_that_step(make_runtime: Make, row_step: Make) -> None:
    """All rows write before any row reads, so the loser of a shared page sees it at once."""
    runtime = make_runtime()
    runtime.step(row_step(1, [1], [1, 2], lease="A"), row_step(2, [1], [3, 4], lease="B"))
    assert len(runtime.violations) == 1


def test_poisoned_cells_are_never_read_as_valid(make_runtime: Make, row_step: Make) -> None:
    """After poisoning, old cells are violations for a running row and for a cached prefix, and new ones are not."""
    runtime = make_runtime()
    runtime.step(row_step(1, [1], [0, 0, 0], lease="A"))
    runtime.executor.poison()
    runtime.step(row_step(1, [1], num_computed=3))
    runtime.step(row_step(2, [1, 2], [5], num_computed=4, lease="B"))
    assert runtime.step(row_step(3, [3], [1, 2, 3], lease="C")) == [20]
    assert [text.partition(": ")[2] for text in runtime.violations] == [
        "the cell was never written (3 wrong positions in this step)",
        "the cell was never written (4 wrong positions in this step)",
    ]


def test_cells_never_written_and_entries_without_a_page_are_told_apart(make_runtime: Make, row_step: Make) -> None:
    """A cached prefix on a fresh page, and a row whose mirror lost its entry, are each named for what they are."""
    runtime = make_runtime()
    runtime.step(row_step(1, [5, 6], [1], num_computed=4, lease="A"))
    runtime.step(row_step(2, [7, 8], [1, 2, 3, 4, 5], lease="B"))
    runtime.mirror.table[2, 1] = 0
    runtime.step(row_step(2, [7, 8], num_computed=5, begin=2))
    assert len(runtime.violations) == 2
    assert "position 0 from page 5: the cell was never written" in runtime.violations[0]
    assert "position 4 from page 0: the mirror has no page there (2 wrong positions" in runtime.violations[1]


def test_kept_violations_are_limited_and_all_are_counted(make_runtime: Make, row_step: Make) -> None:
    """A long run of wrong steps keeps the first texts and goes on counting."""
    runtime = make_runtime()
    runtime.step(row_step(1, [1], [1], lease="A"))
    runtime.executor.poison()
    for _ in range(MAX_VIOLATIONS + 5):
        runtime.step(row_step(1, [1], num_computed=1))
    assert len(runtime.violations) == MAX_VIOLATIONS
    assert runtime.executor.num_violations == MAX_VIOLATIONS + 5
