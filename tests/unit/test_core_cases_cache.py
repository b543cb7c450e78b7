"""Public bug reports as small scenarios: identity of cached prefixes, ownership of pages.

Each docstring names the report. Page and row numbers begin at 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import CacheInUseError, PageAccountingError
from scheduler_service.core.radix_cache import RadixCache

Drive = Callable[..., Any]


def _seed(driver: Any, prompt: Any) -> None:
    """Leave the full pages of `prompt` in the tree."""
    driver.submit("seed", prompt)
    driver.run()


# K2: identity of cached prefixes


def test_b09_only_equal_tokens_are_a_hit(drive: Drive) -> None:
    """openvinotoolkit/openvino.genai#3722, vllm-project/vllm#12621: pages are found by their tokens, so nothing can collide."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3, 4])
    driver.run()
    prompts = {"B": [5, 6, 7, 8, 9], "C": [1, 2, 9, 9, 9], "D": [3, 4, 1, 2, 9], "E": [1, 2, 3, 4, 9]}
    for name, prompt in prompts.items():
        driver.submit(name, prompt)
        driver.run()
    assert {name: driver.requests[name].cached_tokens for name in prompts} == {"B": 0, "C": 2, "D": 0, "E": 4}


def test_b10_evicted_prefix_is_forgotten(drive: Drive) -> None:
    """GeeeekExplorer/nano-vllm#163: a page that was given to other content no longer answers to its old prefix."""
    driver = drive(page_size=2, num_pages=2)
    driver.submit("A", [1, 2, 3])
    driver.run()
    assert driver.tree == {1}
    driver.submit("B", [7, 8, 9, 9])
    driver.run()
    assert driver.tree == {1, 2}
    driver.submit("C", [1, 2, 5])
    driver.run()
    assert driver.requests["C"].cached_tokens == 0


def test_b11_no_hit_on_pages_of_the_same_step(drive: Drive) -> None:
    """vllm-project/vllm#37152: a page can be matched only after the op that writes it was sent."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3, 4, 5])
    driver.submit("B", [1, 2, 3, 4, 6])
    planned = driver.step()
    assert not set(planned["A"].pages) & set(planned["B"].pages)
    assert driver.requests["B"].cached_tokens == 0
    assert driver.outputs == {"A": [70], "B": [75]}


def test_b12_whole_prompt_cached(drive: Drive) -> None:
    """vllm-project/vllm#17999, #11186, LMCache/LMCache#3322, nano-vllm#144: at least one token is computed, in an own page."""
    driver = drive()
    driver.submit("first", range(1, 9))
    driver.run()
    free = sorted(driver.free)
    driver.submit("again", range(1, 9))
    planned = driver.step()
    assert (planned["again"].pages, planned["again"].num_computed) == ([1, 3], 4)
    assert driver.outputs == {"first": [240], "again": [240]}
    assert (driver.tree, sorted(driver.free)) == ({1, 2}, free)
    driver.submit("short", range(1, 5))
    driver.run()
    driver.submit("longer", range(1, 10))
    assert driver.step()["longer"].input_len == 1
    assert [driver.requests[name].cached_tokens for name in ("again", "short", "longer")] == [4, 0, 8]


def test_b13_open_tail_page_is_not_shared(drive: Drive) -> None:
    """Avarok-Cybersecurity/atlas#1193, #692: only full pages are shared, so position 6 may differ between the two."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5, 6], 3)
    driver.step()
    driver.submit("B", [1, 2, 3, 4, 5, 6, 7], 2)
    planned = driver.step()
    assert (planned["A"].pages, planned["B"].pages) == ([1, 2], [1, 3])
    assert driver.requests["B"].cached_tokens == 4
    driver.run()
    assert (driver.outputs["A"][:2], driver.outputs["B"]) == ([112, 903], [168, 523])


def test_b14_keys_shorter_than_a_page(drive: Drive) -> None:
    """sgl-project/sglang#10637: prompts of less than a page match nothing and publish nothing."""
    driver = drive()
    _seed(driver, [1, 2, 3, 4])
    for prompt, cached in (([1], 0), ([1, 2, 3], 0), ([1, 2, 3, 4, 5], 4)):
        driver.submit("x", prompt)
        driver.run()
        assert driver.requests["x"].cached_tokens == cached
        assert driver.scheduler.placement.cache.num_evictable == 1
        assert len(list(driver.scheduler.placement.cache.nodes())) == 1


def test_b15_match_inside_a_node(drive: Drive) -> None:
    """mratsim/tattletale#93: a match that ends inside a run returns its part, and the split keeps both halves locked."""
    driver = drive(page_size=2)
    _seed(driver, [0, 1, 2, 3, 4, 5])
    driver.submit("holder", [0, 1, 2, 3, 4, 5, 6], 9)
    driver.step()
    assert [node.pages.tolist() for node in driver.scheduler.placement.cache.nodes()] == [[1, 2, 3]]
    driver.submit("one", [0, 1, 2, 9, 9])
    driver.submit("two", [0, 1, 2, 3, 9, 9])
    planned = driver.step()
    assert (planned["one"].pages[:1], planned["two"].pages[:2]) == ([1], [1, 2])
    assert [driver.requests[name].cached_tokens for name in ("one", "two")] == [2, 4]
    held = {tuple(node.pages.tolist()): node.locks for node in driver.scheduler.placement.cache.nodes() if node.locks}
    assert held == {(1,): 1, (2,): 1, (3,): 1}


def test_b16_cache_reset_that_is_refused(drive: Drive) -> None:
    """vllm-project/vllm#12284, #28827: a reset that cannot be done says so, and one that is done leaves nothing."""
    driver = drive(page_size=2, num_pages=8)
    driver.submit("A", [1, 2, 3], 3)
    driver.step()
    driver.step()
    with pytest.raises(CacheInUseError) as caught:
        driver.scheduler.reset_prefix_cache()
    assert caught.value.code == "FAILED_PRECONDITION"
    driver.run()
    driver.scheduler.reset_prefix_cache()
    assert driver.stats.free == 8
    driver.submit("B", [1, 2, 3, 4])
    driver.run()
    assert driver.requests["B"].cached_tokens == 0


# K3: ownership of pages


def test_b17_lock_includes_the_matched_node(drive: Drive) -> None:
    """sgl-project/mini-sglang#52: pages a request runs on are not evictable, so a request that needs them waits."""
    driver = drive(page_size=2, num_pages=4)
    _seed(driver, [1, 2, 3, 4, 9])
    driver.submit("A", [1, 2, 3, 4, 5], 2)
    driver.submit("B", [7, 8, 9, 9])
    planned = driver.step()
    assert list(planned) == ["A"]
    assert planned["A"].pages == [1, 2, 3]
    assert (driver.scheduler.placement.cache.num_evictable, len(driver.free)) == (0, 1)
    assert list(driver.step()) == ["A"]
    assert list(driver.step()) == ["B"]


def test_b18_failed_admissions_leave_no_lock(drive: Drive) -> None:
    """vllm-project/vllm#11565, #11562: ten attempts change nothing; then the hit and three more pages are the row."""
    driver = drive(page_size=2, num_pages=4, overlap_depth=1)
    _seed(driver, [1, 2, 9])
    driver.submit("Z", [11, 12, 13])
    driver.plan()
    driver.submit("A", range(1, 8))
    for _ in range(10):
        assert driver.plan() == {}
        cache = driver.scheduler.placement.cache
        (node,) = cache.nodes()
        assert (node.locks, cache.num_evictable, len(driver.free)) == (0, 1, 1)
    driver.abort("Z")
    pages = driver.plan()["A"].pages
    assert pages[0] == 1
    assert sorted(pages[1:]) == [2, 3, 4]
    driver.run()


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
def test_b20_no_page_is_freed_twice(drive: Drive, overlap_depth: int) -> None:
    """sgl-project/sglang-jax#982, #994: look-ahead and end do not both release a page, and a second release raises."""
    driver = drive(page_size=1, num_pages=8, overlap_depth=overlap_depth)
    driver.submit("A", [1, 2, 3], 4)
    driver.run()
    assert driver.scheduler.placement.num_available == 8
    driver.scheduler.reset_prefix_cache()
    assert sorted(driver.free) == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(PageAccountingError):
        driver.scheduler.placement.pool.give(np.array([3], dtype=np.int32))


def test_b21_shared_pages_count_once(drive: Drive) -> None:
    """sgl-project/sglang#35270, mini-sglang#149: evictable pages are those of the tree, each counted once."""
    driver = drive(page_size=2, num_pages=8)
    driver.submit("A", [1, 2, 3, 4, 5, 6])
    driver.submit("B", [1, 2, 3, 4, 7, 8])
    driver.run()
    cache = driver.scheduler.placement.cache
    assert (cache.num_evictable, cache.num_locked, len(driver.free)) == (4, 0, 4)
    pages = [page for node in cache.nodes() for page in node.pages.tolist()]
    assert len(pages) == len(set(pages)) == 4


def test_b22_nodes_are_split_at_pages_only() -> None:
    """sgl-project/sglang#5221: tokens that differ inside a page make two pages, each evicted alone."""
    cache = RadixCache(page_size=3)
    for page, tokens in ((1, [1, 2, 3]), (2, [1, 2, 9])):
        cache.insert_prefix(cache.root(), np.array(tokens, dtype=np.int32), np.array([page], dtype=np.int32))
    assert cache.match_prefix(np.array([1, 2], dtype=np.int32)).pages.tolist() == []
    assert cache.match_prefix(np.array([1, 2, 9], dtype=np.int32)).pages.tolist() == [2]
    assert [cache.evict(1).tolist(), cache.evict(1).tolist()] == [[1], [2]]
    assert list(cache.nodes()) == []
