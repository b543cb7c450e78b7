"""B17 to B22: who owns a page. Page numbers begin at 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from faults import Fault, fault_at_line
from scheduler_driver import alone
from scheduler_service.core.errors import PageAccountingError
from scheduler_service.core.invariants import audit
from scheduler_service.core.radix_cache import RadixCache
from scheduler_service.core.states import State

Drive = Callable[..., Any]


def test_b17_lock_includes_the_matched_node(drive: Drive) -> None:
    """sgl-project/mini-sglang#52: pages a request runs on cannot be evicted, so a request that needs them waits."""
    driver = drive(page_size=2, num_pages=4)
    for seed in ([1, 2, 9], [1, 2, 3, 4, 9]):  # two nodes: [1,2] in page 1, below it [3,4] in page 2
        driver.submit("seed", seed)
        driver.run()
    cache = driver.scheduler.placement.cache
    assert sorted(node.pages.tolist() for node in cache.nodes()) == [[1], [2]]
    driver.submit("A", [1, 2, 3, 4, 5], 2)
    driver.submit("B", [7, 8, 9, 9])
    for _ in range(2):
        planned = driver.plan()
        assert {name: row.pages for name, row in planned.items()} == {"A": [1, 2, 3]}
        assert (cache.num_evictable, [node.locks for node in cache.nodes()], driver.free) == (0, [1, 1], [4])
        driver.complete()
    assert driver.finish["A"] == "length"
    assert list(driver.step()) == ["B"]


def test_b18_failed_admissions_leave_no_lock(drive: Drive) -> None:
    """vllm-project/vllm#11565, #11562: ten failed attempts change nothing; then A's row is the hit and three more pages."""
    driver = drive(page_size=2, num_pages=4, overlap_depth=1)
    driver.submit("seed", [1, 2, 9])
    driver.run()
    driver.submit("Z", [11, 12, 13])
    assert driver.plan()["Z"].pages == [2, 3]
    cache = driver.scheduler.placement.cache
    for attempt in range(10):
        # Half of the attempts are a new life of A: what is known about the last refusal spares the planner a second look.
        if attempt % 2 == 0:
            driver.submit("A", range(1, 8))
        assert driver.plan() == {}
        (node,) = cache.nodes()
        assert (node.pages.tolist(), node.locks, cache.num_evictable, driver.free) == ([1], 0, 1, [4])
        if attempt % 2 and attempt < 9:
            driver.abort("A")
    driver.abort("Z")
    row = driver.plan()["A"]
    assert (row.pages[0], sorted(row.pages[1:]), row.num_computed) == (1, [2, 3, 4], 2)
    driver.run()
    assert driver.outputs["A"] == alone(range(1, 8), 1)


def _faults_everywhere(driver: Any, change: Callable[[], Any]) -> int:
    """Call `change` until nothing goes wrong, each time with a fault one line later, which must leave everything as it was."""
    before = driver.state()
    for number in range(1, 5000):
        try:
            with fault_at_line(number) as where:
                change()
        except Fault:
            assert driver.state() == before, where
        else:
            assert where == []
            return number - 1
    raise AssertionError("no end of lines")


def _one_fault(driver: Any, monkeypatch: pytest.MonkeyPatch, target: tuple[Any, str], change: Callable[[], Any]) -> None:
    """The last part of `change` raises, once; everything must be as it was, and the second attempt is the test's own."""
    before = driver.state()

    def fail(*_: Any, **__: Any) -> None:
        raise Fault("the second half fails")

    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        with pytest.raises(Fault):
            change()
    assert driver.state() == before
    driver.audit()


def test_b19_transition_that_fails_half_way(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """lightseekorg/tokenspeed#767, #688: wherever a transition raises, request, row, tree and free list are what they were."""
    options = {"page_size": 2, "num_pages": 6}
    # The retraction, after the tree has taken A's pages and before the rest is freed; then at every line on the way.
    driver = drive(**options)
    pool = driver.scheduler.placement.pool
    driver.submit("A", [1, 2, 3, 4, 5], 4, stop_ids=[7, 8])
    driver.step()
    assert driver.rows == {"A": [1, 2, 3]}
    retract = lambda: driver.scheduler.retract("A")  # noqa: E731
    _one_fault(driver, monkeypatch, (pool, "give"), retract)
    assert (driver.rows, driver.requests["A"].state, driver.tree, driver.free) == (
        {"A": [1, 2, 3]},
        State.PREFILL_DONE,
        set(),
        [4, 5, 6],
    )
    driver.step()  # the next decode works
    assert driver.outputs["A"] == alone([1, 2, 3, 4, 5], 2)
    assert _faults_everywhere(driver, retract) > 40
    assert (driver.requests["A"].state, driver.tree) == (State.RETRACTED, {1, 2, 3})
    driver.run()
    driver.scheduler.reset_prefix_cache()
    assert (driver.outputs["A"], driver.stats.free) == (alone([1, 2, 3, 4, 5], 4), 6)

    # The others happen inside `plan()`: the op cannot be made after all rows have their pages; then a fault at every line.
    def fails_to_plan(driver: Any, cause: str) -> None:
        _one_fault(driver, monkeypatch, (driver.scheduler, "_send"), driver.scheduler.plan)
        ops: list[Any] = []
        assert _faults_everywhere(driver, lambda: ops.append(driver.scheduler.plan())) > 150
        assert cause in [str(found) for found in ops[0].causes]
        driver.results.append(driver.runtime.run(ops[0]))
        driver.audit()
        driver.complete()

    # Admission with a hit that splits a node, and eviction of what is cached beside it.
    driver = drive(**options)
    for seed in ([1, 2, 3, 4, 9], [7, 7, 8, 8, 9]):
        driver.submit("seed", seed)
        driver.run()
    driver.submit("A", [1, 2, 5, 5, 6, 6, 7, 7, 8], 2)
    fails_to_plan(driver, "first_chunk")
    assert (driver.rows["A"][0], driver.stats.cached) == (1, 2), "page 1 is the hit, one page beside it is left"
    driver.run()
    assert driver.outputs["A"] == alone([1, 2, 5, 5, 6, 6, 7, 7, 8], 2)

    # A chunk's continuation that publishes, meets a duplicate and adopts the tree's page.
    driver = drive(**options, chunk_size=2)
    driver.submit("A", [1, 2, 3, 4], 2)
    driver.submit("B", [1, 2, 9, 9], 2)
    driver.step()
    fails_to_plan(driver, "continuation")
    assert (driver.rows["A"][0], driver.rows["B"][0]) == (1, 1)
    driver.run()
    assert (driver.outputs["A"], driver.outputs["B"]) == (alone([1, 2, 3, 4], 2), alone([1, 2, 9, 9], 2))

    # The same without a cache, where a chunk publishes nothing and its end is all that changes.
    driver = drive(**options, chunk_size=2, prefix_cache=False)
    driver.submit("A", [1, 2, 3, 4], 2, stop_ids=[5, 6])
    driver.submit("B", [1, 2], 2)
    driver.step()
    fails_to_plan(driver, "continuation")
    driver.run()
    assert driver.outputs == {"A": alone([1, 2, 3, 4], 2), "B": alone([1, 2], 2)}

    # A resume on a page that C has published meanwhile.
    driver = drive(**options)
    driver.submit("A", [1, 2, 3, 4, 5], 3)
    driver.submit("C", [1, 2, 9])
    driver.step()
    driver.retract("A")
    assert (driver.step(), driver.tree) == ({}, {4, 2})
    fails_to_plan(driver, "resume")
    assert driver.rows["A"][:2] == [4, 2]
    driver.run()
    assert driver.outputs["A"] == alone([1, 2, 3, 4, 5], 3)

    # The first decode step, which publishes the prompt; B's own pages are duplicates by then.
    driver = drive(**options)
    driver.submit("A", [1, 2, 3], 3)
    driver.submit("B", [1, 2, 3], 3)
    driver.step()
    fails_to_plan(driver, "prefill_done_to_decode")
    assert (driver.rows["A"], driver.rows["B"]) == ([1, 2], [1, 4])
    driver.run()
    assert driver.outputs["A"] == driver.outputs["B"] == alone([1, 2, 3], 3)

    # All in one plan: B grows, C is retracted, A publishes a chunk and gets a page that C has left in the tree.
    driver = drive(page_size=2, num_pages=8, chunk_size=2)
    driver.submit("A", range(1, 9), 2)
    driver.submit("B", [5, 6], 5)
    driver.submit("C", [7, 8], 5)
    for _ in range(3):
        driver.step()
    fails_to_plan(driver, "continuation")
    assert [driver.requests[name].num_retractions for name in "ABC"] == [0, 0, 1]
    assert [len(driver.rows[name]) for name in "AB"] == [4, 3]
    driver.run()
    assert driver.outputs == {"A": alone(range(1, 9), 2), "B": alone([5, 6], 5), "C": alone([7, 8], 5)}


def test_b20_no_page_is_freed_twice(drive: Drive) -> None:
    """sgl-project/sglang-jax#982, #994: look-ahead and end do not both release a page, and a second release raises."""
    for overlap_depth in (1, 0, 2):
        driver = drive(page_size=1, num_pages=8, overlap_depth=overlap_depth)
        driver.submit("A", [1, 2, 3], 4)
        most = 0
        while driver.scheduler.has_work or driver.results:
            most = max(most, 0, *(len(row.pages) for row in driver.step().values()))
        assert most == 6, "the last token is stored nowhere, and no page is reserved for it"
        placement = driver.scheduler.placement
        assert placement.num_available == 8
        driver.scheduler.reset_prefix_cache()
        assert sorted(driver.free) == [1, 2, 3, 4, 5, 6, 7, 8]
        before = driver.state()
        for pages in ([3], [3, 4]):
            with pytest.raises(PageAccountingError):
                placement.pool.give(np.array(pages, dtype=np.int32))
        assert driver.state() == before


def test_b21_shared_pages_count_once(drive: Drive) -> None:
    """sgl-project/sglang#35270, mini-sglang#149: evictable pages are those of the tree, each counted once, by walking it."""
    driver = drive(page_size=2, num_pages=8)
    driver.submit("A", [1, 2, 3, 4, 5, 6])
    driver.submit("B", [1, 2, 3, 4, 7, 8])
    assert set(driver.step()) == {"A", "B"}
    assert not driver.scheduler.has_work
    cache = driver.scheduler.placement.cache
    assert (cache.num_evictable, cache.num_locked, len(driver.free)) == (4, 0, 4)
    pages = [page for node in cache.nodes() for page in node.pages.tolist()]
    assert len(pages) == len(set(pages)) == 4
    cache.num_pages += 2  # what counting the shared pages twice would come to
    assert any("tree" in finding for finding in audit(driver.scheduler)), "the self-check would not notice"
    cache.num_pages -= 2
    assert audit(driver.scheduler) == []


def test_b22_nodes_are_split_at_pages_only() -> None:
    """sgl-project/sglang#5221: tokens that differ inside a page make two pages, each evicted alone."""
    cache = RadixCache(page_size=3)
    for page, tokens in ((1, [1, 2, 3]), (2, [1, 2, 9])):
        cache.insert_prefix(cache.root(), np.array(tokens, dtype=np.int32), np.array([page], dtype=np.int32))
    assert cache.match_prefix(np.array([1, 2], dtype=np.int32)).pages.tolist() == []
    assert cache.match_prefix(np.array([1, 2, 9], dtype=np.int32)).pages.tolist() == [2]
    assert sorted(node.pages.tolist() for node in cache.nodes()) == [[1], [2]]
    assert [cache.evict(1).tolist(), cache.evict(1).tolist()] == [[1], [2]]
    assert list(cache.nodes()) == []
