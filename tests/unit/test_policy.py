"""Planner, for rows in use: budget, order, growth and victims. Admission is in test_admission.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.states import State

Drive = Callable[..., Any]


# Token budget


def test_budget_goes_to_decodes_then_chunks_then_resumes_then_first_chunks(drive: Drive) -> None:
    """Ten tokens: two decodes, a chunk of four, a resume of three, and one token is left for a prompt of five."""
    driver = drive(num_pages=64, chunk_size=4, token_budget=10)
    driver.submit("decode1", [1], 9)
    driver.submit("decode2", [2], 9)
    driver.submit("resume", [3], 9)
    driver.step()
    driver.retract("resume")
    driver.submit("chunk", range(10, 30), 9)
    assert list(driver.step()) == ["decode1", "decode2"], "what was just retracted holds back the queue"
    planned = driver.step()
    assert {name: row.input_len for name, row in planned.items()} == {"resume": 2, "chunk": 4, "decode1": 1, "decode2": 1}
    driver.retract("resume")
    driver.step()
    driver.submit("late", range(40, 45), 9)
    planned = driver.step()
    assert {name: (row.cause, row.input_len) for name, row in planned.items()} == {
        "chunk": ("continuation", 4),
        "resume": ("resume", 3),
        "late": ("first_chunk", 1),
        "decode1": ("decode", 1),
        "decode2": ("decode", 1),
    }


def test_budget_bounds_decodes_in_order(drive: Drive) -> None:
    """Three rows and two tokens a step: the last in order waits until one ahead of it has ended."""
    driver = drive(token_budget=2)
    for name, priority in (("third", 2), ("first", 0), ("second", 1)):
        driver.submit(name, [1], 3, priority=priority)
    assert list(driver.step()) == ["first", "second"]
    steps = [list(driver.step()) for _ in range(4)]
    assert steps == [["first", "second"], ["first", "second"], ["third"], ["third"]]


def test_chunk_is_cut_to_the_budget(drive: Drive) -> None:
    """A chunk_size above token_budget is the budget."""
    driver = drive(chunk_size=64, token_budget=4)
    driver.submit("A", range(1, 11))
    chunks = [driver.step()["A"] for _ in range(3)]
    assert [(row.num_computed, row.input_len, row.sample) for row in chunks] == [(0, 4, False), (4, 4, False), (8, 2, True)]
    assert driver.finish == {"A": "length"}


def test_decodes_can_leave_no_budget_for_chunks(drive: Drive) -> None:
    """A chunk waits whole when the decodes have used the budget, and takes what is left when it is less than a chunk."""
    driver = drive(chunk_size=4, token_budget=4)
    driver.submit("chunk", range(1, 8), 2, priority=1)
    driver.step()
    for name in "ABC":
        driver.submit(name, [5], 3)
    assert {name: row.input_len for name, row in driver.step().items()} == {"chunk": 3, "A": 1}
    driver.run()


# Growth


def test_row_grows_when_the_next_position_opens_a_page(drive: Drive) -> None:
    """A page is asked for by the step that stores its first token, not by the one before and not by the one after."""
    driver = drive(page_size=4)
    driver.submit("A", [1, 2, 3], 7)
    sizes = [(row["A"].num_computed, row["A"].size) for row in (driver.step() for _ in range(7))]
    assert sizes == [(0, 1), (3, 0), (4, 1), (5, 0), (6, 0), (7, 0), (8, 1)]


def test_twin_grows_out_of_its_own_duplicates(drive: Drive) -> None:
    """No page is left for B, but publishing frees two duplicates of its own: it takes one of them and nobody is retracted."""
    driver = drive(page_size=2, num_pages=5)
    driver.submit("A", [1, 2, 3, 4], 3)
    driver.submit("B", [1, 2, 3, 4], 3)
    driver.step()
    assert driver.free == [5]
    planned = driver.step()
    assert planned["A"].pages == [1, 2, 5]
    assert planned["B"].pages == [1, 2, 4]
    assert driver.free == [3]
    driver.run()
    assert driver.requests["B"].num_retractions == 0


def test_growth_evicts_before_it_retracts(drive: Drive) -> None:
    """Idle cached pages go first; only then does a row lose its pages."""
    driver = drive(page_size=2, num_pages=6)
    driver.submit("old", [9, 9, 9])
    driver.run()
    assert driver.tree == {1}
    driver.submit("A", [1, 2, 3], 5)
    driver.submit("B", [4, 5, 6], 3)
    driver.step()
    driver.step()
    assert (driver.rows, driver.free, driver.tree) == ({"A": [2, 3], "B": [4, 5]}, [6], {1, 2, 4})
    planned = driver.step()
    assert (planned["A"].pages, planned["B"].pages) == ([2, 3, 6], [4, 5, 1])
    driver.run()
    assert driver.requests["B"].num_retractions == 0


# Victims


def test_newest_is_the_victim(drive: Drive) -> None:
    """When A opens a page and none is left, B loses its row: its three full pages are published, one of them goes to A."""
    driver = drive(page_size=2, num_pages=6)
    driver.submit("A", [1, 2, 3], 8)
    driver.submit("B", [4, 5, 6], 8)
    for _ in range(4):
        driver.step()
    assert (driver.rows, driver.free) == ({"A": [1, 2, 5], "B": [3, 4, 6]}, [])
    planned = driver.step()
    assert list(planned) == ["A"]
    assert planned["A"].pages == [1, 2, 5, 6]
    assert driver.requests["B"].state is State.RETRACTED
    assert (driver.tree, driver.free) == ({1, 3, 4}, [])
    driver.run()
    assert [driver.requests[name].num_retractions for name in "AB"] == [0, 1]
    assert driver.finish == {"A": "length", "B": "length"}
    assert len(driver.outputs["B"]) == 8


def test_priority_decides_who_is_newest(drive: Drive) -> None:
    """The victim is the last in (priority, arrival), though it came first."""
    driver = drive(page_size=2, num_pages=6)
    driver.submit("late", [1, 2, 3], 8, priority=1)
    driver.submit("early", [4, 5, 6], 8, priority=0)
    driver.run()
    assert [driver.requests[name].num_retractions for name in ("early", "late")] == [0, 1]


def test_row_that_finds_no_page_is_its_own_victim(drive: Drive) -> None:
    """The last in order needs a page when nobody behind it has one: it is retracted itself, and the others are not touched."""
    driver = drive(page_size=2, num_pages=5)
    driver.submit("A", [1, 2, 3, 4], 6)
    driver.submit("B", [5, 6, 7], 6)
    driver.step()
    driver.step()
    assert (driver.rows, driver.free) == ({"A": [1, 2, 5], "B": [3, 4]}, [])
    planned = driver.step()
    assert list(planned) == ["A"]
    assert (planned["A"].size, planned["A"].pages) == (0, [1, 2, 5])
    assert driver.requests["B"].state is State.RETRACTED
    assert driver.tree == {1, 2, 3, 4}
    driver.run()
    assert [driver.requests[name].num_retractions for name in "AB"] == [0, 1]


def test_victim_that_was_chosen_already_is_dropped(drive: Drive) -> None:
    """C's chunk retracts D2, which was chosen to decode in this step: its place and page are void, its budget goes to E."""
    driver = drive(page_size=1, num_pages=14, chunk_size=4, token_budget=7, prefix_cache=False)
    driver.submit("D1", [1], 9, priority=1)
    driver.submit("D2", [2], 9, priority=1)
    driver.step()
    driver.submit("C", range(10, 18), 2)
    driver.submit("E", [20, 21, 22], 2)
    planned = driver.step()
    assert {name: row.input_len for name, row in planned.items()} == {"C": 4, "E": 1, "D1": 1, "D2": 1}
    assert len(driver.free) == 5
    planned = driver.step()
    assert {name: row.input_len for name, row in planned.items()} == {"C": 4, "E": 2, "D1": 1}
    used = [page for row in planned.values() for page in row.pages]
    assert len(used) == len(set(used)) == 14
    assert driver.requests["D2"].state is State.RETRACTED
    assert driver.requests["D2"].num_output == 2
    driver.run()


def test_row_in_the_middle_of_its_prompt_can_be_a_victim(drive: Drive) -> None:
    """A chunked prompt loses its row to a decode ahead of it, and goes on from what is left of what it published."""
    driver = drive(page_size=1, num_pages=9, chunk_size=1)
    driver.submit("A", [1], 7)
    driver.step()
    driver.submit("B", range(10, 16))
    for _ in range(4):
        driver.step()
    assert {name: len(pages) for name, pages in driver.rows.items()} == {"A": 5, "B": 4}
    assert driver.requests["B"].state is State.PREFILLING
    assert list(driver.step()) == ["A"]
    assert driver.requests["B"].state is State.RETRACTED
    assert driver.step()["A"].input_len == 1
    assert driver.finish == {"A": "length"}
    resume = driver.step()["B"]
    assert (resume.cause, resume.num_computed, resume.input_len) == ("resume", 2, 1)
    driver.run()
    assert driver.requests["B"].num_retractions == 1


def test_first_in_order_is_never_a_victim(drive: Drive) -> None:
    """Alone or ahead of all, a row keeps its pages whatever the others want."""
    driver = drive(page_size=1, num_pages=12, max_rows=4)
    for name in "ABCD":
        driver.submit(name, [ord(name)], 8)
    driver.run()
    retractions = [driver.requests[name].num_retractions for name in "ABCD"]
    assert retractions[0] == 0
    assert sum(retractions) > 0
    assert all(len(output) == 8 for output in driver.outputs.values())


def test_row_whose_last_token_is_planned_is_no_victim(drive: Drive) -> None:
    """C is last in order, but its last allowed token is on its way: B, before it, is retracted."""
    driver = drive(page_size=1, num_pages=6, prefix_cache=False, overlap_depth=1)
    driver.submit("A", [1], 5)
    driver.submit("B", [2], 5)
    driver.submit("C", [3], 2)
    driver.plan()
    driver.plan()
    driver.complete()
    assert driver.free == []
    planned = driver.plan()
    assert list(planned) == ["A"]
    assert planned["A"].pages == [1, 4, 5]
    assert driver.rows == {"A": [1, 4, 5], "C": [3, 6]}
    assert driver.requests["B"].state is State.RETRACTED
    driver.run()
    assert driver.requests["C"].num_retractions == 0
    assert [len(driver.outputs[name]) for name in "ABC"] == [5, 5, 2]


def test_first_in_order_waits_when_there_is_no_victim(drive: Drive) -> None:
    """Everybody behind A only waits for results: A waits for their pages, unplanned, unretracted and unchanged."""
    driver = drive(page_size=1, num_pages=4, prefix_cache=False, overlap_depth=1)
    driver.submit("A", [1], 4)
    driver.submit("B", [2], 2)
    driver.plan()
    driver.plan()
    driver.complete()
    before = driver.state()
    assert driver.plan() == {}
    assert driver.state() == before
    driver.complete()
    assert driver.finish == {"B": "length"}
    assert driver.plan()["A"].pages == [1, 3, 4]
    driver.run()
    assert driver.requests["A"].num_retractions == 0


def test_several_victims_for_one_chunk(drive: Drive) -> None:
    """A chunk of eight pages meets an empty pool: the last four rows, of two pages each, are retracted for it, no more."""
    driver = drive(num_pages=20, max_pages_per_row=20, chunk_size=32, prefix_cache=False)
    driver.submit("A", [7] * 64, 2)
    for name in "UVWXYZ":
        driver.submit(name, [5] * 4, 4)
    planned = driver.step()
    assert list(planned) == list("AUVWXYZ")
    assert len(driver.free) == 6
    planned = driver.step()
    assert list(planned) == ["A", "U", "V"]
    assert {name: len(row.pages) for name, row in planned.items()} == {"A": 16, "U": 2, "V": 2}
    assert driver.free == []
    assert [name for name in "AUVWXYZ" if driver.requests[name].state is State.RETRACTED] == list("WXYZ")
    driver.run()
    assert driver.requests["A"].num_retractions == 0


# mixed: false


def test_unmixed_step_decodes_only_when_nothing_prefills(drive: Drive) -> None:
    """A chunk in progress, a resume or a first chunk keeps every decode row out of the step."""
    driver = drive(mixed=False, chunk_size=4)
    driver.submit("A", [1, 2, 3], 9)
    driver.step()
    driver.submit("B", range(10, 20), 9)
    steps = [driver.step() for _ in range(4)]
    assert [list(planned) for planned in steps] == [["B"], ["B"], ["B"], ["A", "B"]]
    driver.retract("B")
    assert list(driver.step()) == ["A"]
    assert [(name, row.cause) for name, row in driver.step().items()] == [("B", "resume")]
    driver.run()


def test_unmixed_step_decodes_when_the_head_does_not_fit(drive: Drive) -> None:
    """A prompt that waits for pages cannot keep the others from running."""
    driver = drive(mixed=False, num_pages=4)
    driver.submit("A", [1, 2, 3, 4, 5], 3)
    driver.step()
    driver.submit("B", range(1, 13))
    assert list(driver.step()) == ["A"]
    driver.run()
    assert driver.finish == {"A": "length", "B": "length"}


@pytest.mark.parametrize(
    ("prompt", "pages", "size"), [([1, 2, 3], [1], 0), ([1, 2, 3, 4], [1, 3], 1), ([1, 2, 3, 4, 5], [1, 2], 0)]
)
def test_unmixed_step_reserves_nothing_for_who_is_not_in_it(
    drive: Drive, prompt: list[int], pages: list[int], size: int
) -> None:
    """A decode that is left out of a step has the row it had, and its page is in the op in which it runs."""
    driver = drive(mixed=False)
    driver.submit("A", prompt, 3)
    driver.step()
    before = driver.rows["A"]
    driver.submit("B", [9, 9, 9], 2)
    assert list(driver.step()) == ["B"]
    assert driver.rows["A"] == before
    row = driver.step()["A"]
    assert (row.pages, row.size, row.full) == (pages, size, True)
