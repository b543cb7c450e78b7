"""Rows that flip below their sent length, in cases small enough to follow by hand: twins, chunked twins, retract flip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.config import RefreshPolicy

Drive = Callable[..., Any]


def test_twins_of_ten_tokens(drive: Drive) -> None:
    """At the first decode nothing is appended, yet B's row changes in two places; its own copies come back as fourth pages."""
    driver = drive()
    for name in "AB":
        driver.submit(name, range(1, 11), 4)
    planned = driver.step()
    assert (planned["A"].pages, planned["B"].pages) == ([1, 2, 3], [4, 5, 6])
    planned = driver.step()
    assert (planned["A"].pages, planned["A"].size) == ([1, 2, 3], 0)
    assert (planned["B"].pages, planned["B"].size, planned["B"].full) == ([1, 2, 6], 0, True)
    assert driver.free[:2] == [5, 4]
    planned = driver.step()
    assert [(row.size, row.full) for row in planned.values()] == [(0, False), (0, False)]
    planned = driver.step()
    assert (planned["A"].pages, planned["B"].pages) == ([1, 2, 3, 5], [1, 2, 6, 4])
    assert [(row.begin, row.size, row.full) for row in planned.values()] == [(3, 1, False), (3, 1, False)]
    assert driver.outputs["A"] == driver.outputs["B"]


def test_chunked_twins_flip_the_first_owner(drive: Drive) -> None:
    """B's chunk publishes first, so A, which was there before, repoints its logical page 0; then B adopts A's other pages."""
    driver = drive(token_budget=16, mixed=False)
    for name in "AB":
        driver.submit(name, range(1, 13), 3)
    planned = driver.step()
    assert (planned["A"].pages, planned["A"].input_len) == ([1, 2, 3], 12)
    assert (planned["B"].pages, planned["B"].input_len) == ([4], 4)
    planned = driver.step()
    assert list(planned) == ["B"]
    assert (planned["B"].pages, planned["B"].full, driver.tree) == ([4, 5, 6], True, {4})
    planned = driver.step()
    assert planned["A"].pages == [4, 2, 3, 1]
    assert (planned["A"].begin, planned["A"].size, planned["A"].full) == (3, 1, True)
    assert planned["B"].pages == [4, 2, 3, 6]
    assert (planned["B"].begin, planned["B"].size, planned["B"].full) == (3, 1, True)
    driver.run()
    assert driver.outputs["A"] == driver.outputs["B"]


def test_chunked_twins_in_mixed_steps(drive: Drive) -> None:
    """Where A decodes in the same step as B's second chunk, A is visited first and stays as it is; B adopts."""
    driver = drive(token_budget=16)
    for name in "AB":
        driver.submit(name, range(1, 13), 3)
    driver.step()
    planned = driver.step()
    assert list(planned) == ["B", "A"]
    assert (planned["A"].pages, planned["A"].size) == ([1, 2, 3, 5], 1)
    assert (planned["B"].pages, planned["B"].begin, planned["B"].size) == ([1, 4, 6], 1, 2)
    assert planned["B"].full
    planned = driver.step()
    assert planned["B"].pages == [1, 2, 3, 6]
    assert (planned["B"].begin, planned["B"].size, planned["B"].full) == (3, 1, True)
    driver.run()


@pytest.mark.parametrize("policy", [RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS])
def test_retract_flip(drive: Drive, policy: RefreshPolicy) -> None:
    """A resumes on the page that C published, and its own first page comes back as its fourth."""
    driver = drive(refresh_policy=policy)
    driver.submit("A", range(1, 11), 4)
    driver.submit("C", [1, 2, 3, 4, 99])
    driver.step()
    assert (driver.rows, driver.tree) == ({"A": [1, 2, 3]}, {4})
    driver.retract("A")
    assert (driver.tree, driver.free[:3]) == ({4, 2}, [3, 1, 5])
    driver.step()
    resume = driver.step()["A"]
    assert (resume.pages, resume.begin, resume.size, resume.full) == ([4, 2, 3], 0, 3, True)
    assert (resume.num_computed, resume.input_len) == (8, 3)
    assert driver.step()["A"].pages == [4, 2, 3]
    last = driver.step()["A"]
    assert (last.pages, last.begin, last.size) == ([4, 2, 3, 1], 3, 1)
    assert last.full == (policy is RefreshPolicy.ALWAYS)
    assert driver.finish["A"] == "length"
