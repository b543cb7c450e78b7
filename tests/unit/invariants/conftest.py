"""A sound scheduler in the middle of its work, for tests that damage it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.errors import InvariantViolation
from scheduler_service.core.invariants import audit, check
from scheduler_service.core.placement import Placement
from scheduler_service.core.radix_node import Node
from scheduler_service.core.scheduler import Scheduler

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

    def finds(self, *expected: str) -> None:
        """There is one finding with each of these texts and no other, and `check` raises with them."""
        findings = audit(self.scheduler)
        assert len(findings) == len(expected), findings
        assert [sum(text in finding for finding in findings) for text in expected] == [1] * len(expected), findings
        with pytest.raises(InvariantViolation) as caught:
            check(self.scheduler)
        assert caught.value.findings == findings


@pytest.fixture
def subject(drive: Drive) -> Subject:
    """The scheduler in question, sound so far."""
    made = Subject(drive(page_size=2, overlap_depth=1, max_rows=4))
    assert audit(made.scheduler) == []
    return made
