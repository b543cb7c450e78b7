"""B09 to B16: which cached pages are a request's prefix. Page numbers begin at 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_driver import alone
from scheduler_service.core.errors import CacheInUseError, PageAccountingError
from scheduler_service.core.radix_cache import RadixCache

Drive = Callable[..., Any]


class SameHash(bytes):
    """Bytes that all have one hash."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return bytes.__eq__(self, other)


def _nodes(cache: RadixCache) -> list[tuple[list[int], list[int], int]]:
    """Tokens, pages and locks of every node."""
    return sorted((node.tokens.tolist(), node.pages.tolist(), node.locks) for node in cache.nodes())


def _ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def test_b09_only_equal_tokens_are_a_hit(monkeypatch: pytest.MonkeyPatch, drive: Drive) -> None:
    """openvinotoolkit/openvino.genai#3722, vllm-project/vllm#12621: with every hash the same, tokens still tell pages apart."""
    key = RadixCache.key
    monkeypatch.setattr(RadixCache, "key", lambda cache, tokens, position: SameHash(key(cache, tokens, position)))
    assert hash(RadixCache(2).key(_ids(1, 2), 0)) == hash(RadixCache(2).key(_ids(3, 4), 0))
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3, 4])
    driver.run()
    prompts = {"B": [5, 6, 7, 8, 9], "C": [1, 2, 9, 9, 9], "D": [3, 4, 1, 2, 9], "E": [1, 2, 3, 4, 9]}
    for name, prompt in prompts.items():
        driver.submit(name, prompt)
        driver.run()
        assert driver.outputs[name] == alone(prompt, 1)
    assert {name: driver.requests[name].cached_tokens for name in prompts} == {"B": 0, "C": 2, "D": 0, "E": 4}


def test_b10_evicted_prefix_is_forgotten(drive: Drive) -> None:
    """GeeeekExplorer/nano-vllm#163: a page that was given to other content no longer answers to its old prefix."""
    driver = drive(page_size=2, num_pages=2)
    driver.submit("A", [1, 2, 3])
    driver.run()
    cache = driver.scheduler.placement.cache
    assert _nodes(cache) == [([1, 2], [1], 0)]
    driver.submit("B", [7, 8, 9, 9])
    driver.run()
    assert cache.match_prefix(_ids(1, 2)).pages.tolist() == []
    assert driver.tree == {1, 2}
    driver.submit("C", [1, 2, 5])
    driver.run()
    assert (driver.requests["C"].cached_tokens, driver.outputs["C"]) == (0, alone([1, 2, 5], 1))


def test_b11_no_hit_on_pages_of_the_same_step(drive: Drive) -> None:
    """vllm-project/vllm#37152: what a step computes can be matched from the next one on, not in the same one."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3, 4, 5], 3)
    driver.submit("B", [1, 2, 3, 4, 6], 3)
    planned = driver.step()
    assert (planned["A"].pages, planned["B"].pages) == ([1, 2, 3], [4, 5, 6])
    assert driver.requests["B"].cached_tokens == 0
    assert driver.outputs == {"A": [70], "B": [75]}
    # With look-ahead B may match what was sent before and is not acknowledged yet: B's op is a later one of the same stream.
    driver = drive(page_size=2, overlap_depth=2)
    driver.submit("A", [1, 2, 3, 4, 5], 3)
    driver.plan()
    driver.submit("B", [1, 2, 3, 4, 6], 3)
    planned = driver.plan()
    assert (planned["A"].pages, planned["B"].pages, driver.outputs["A"]) == ([1, 2, 3], [1, 2, 4], [])
    driver.run()
    assert driver.requests["B"].cached_tokens == 4
    assert {name: tokens[0] for name, tokens in driver.outputs.items()} == {"A": 70, "B": 75}


def test_b12_whole_prompt_cached(drive: Drive) -> None:
    """vllm-project/vllm#17999, #11186, LMCache/LMCache#3322, nano-vllm#144: at least one token is computed, in an own page."""
    driver = drive()
    driver.submit("first", range(1, 9))
    driver.run()
    assert driver.tree == {1, 2}
    free = sorted(driver.free)
    driver.submit("again", range(1, 9))
    again = driver.step()["again"]
    assert (again.pages, again.num_computed, again.input_len) == ([1, 3], 4, 4)
    assert driver.outputs == {"first": [240], "again": [240]}
    assert (driver.tree, sorted(driver.free)) == ({1, 2}, free)
    driver.submit("short", range(1, 5))
    assert driver.step()["short"].input_len == 4
    driver.submit("longer", range(1, 10))
    longer = driver.step()["longer"]
    assert (longer.pages[:2], longer.num_computed, longer.input_len) == ([1, 2], 8, 1)
    assert [driver.requests[name].cached_tokens for name in ("again", "short", "longer")] == [4, 0, 8]


def test_b13_open_tail_page_is_not_shared(drive: Drive) -> None:
    """Avarok-Cybersecurity/atlas#1193, #692: only full pages are shared, so position 6 may differ between the two."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5, 6], 3)
    driver.step()
    assert driver.rows == {"A": [1, 2]}
    driver.submit("B", [1, 2, 3, 4, 5, 6, 7], 2)
    planned = driver.step()
    assert (planned["A"].pages, planned["B"].pages) == ([1, 2], [1, 3])
    assert driver.requests["B"].cached_tokens == 4
    assert (driver.runtime.cells[2, 2], driver.runtime.cells[3, 2]) == (112, 7)
    driver.run()
    assert (driver.outputs["A"][:2], driver.outputs["B"]) == ([112, 903], [168, 523])


def test_b14_keys_shorter_than_a_page(drive: Drive) -> None:
    """sgl-project/sglang#10637: what is less than a page matches nothing and adds nothing."""
    driver = drive()
    cache = driver.scheduler.placement.cache
    driver.submit("seed", [1, 2, 3, 4])
    driver.run()
    nodes = _nodes(cache)
    assert nodes == [([1, 2, 3, 4], [1], 0)]
    for tokens in ((), (1,), (1, 2, 3)):
        assert cache.match_prefix(_ids(*tokens)).pages.tolist() == []
    # Publishing needs whole pages; what is none is refused. The open end of a request never comes to that.
    with pytest.raises(PageAccountingError):
        cache.insert_prefix(cache.root(), _ids(1, 2, 3), _ids(9))
    assert cache.insert_prefix(cache.root(), _ids(), _ids()).inserted.tolist() == []
    for prompt, cached in (([1], 0), ([1, 2, 3], 0), ([1, 2, 3, 4, 5], 4)):
        driver.submit("x", prompt)
        driver.run()
        assert driver.requests["x"].cached_tokens == cached
        assert (_nodes(cache), cache.num_evictable) == (nodes, 1)


def test_b15_match_inside_a_node(drive: Drive) -> None:
    """mratsim/tattletale#93: a match that ends inside a run returns its part, and the split keeps both halves locked."""
    driver = drive(page_size=2)
    cache = driver.scheduler.placement.cache
    driver.submit("seed", [0, 1, 2, 3, 4, 5])
    driver.run()
    assert _nodes(cache) == [([0, 1, 2, 3, 4, 5], [1, 2, 3], 0)]
    driver.submit("holder", [0, 1, 2, 3, 4, 5, 6], 9)
    driver.step()
    assert _nodes(cache) == [([0, 1, 2, 3, 4, 5], [1, 2, 3], 1)]
    for name, prompt, pages in (("one", [0, 1, 2, 9, 9], [1]), ("two", [0, 1, 2, 3, 9, 9], [1, 2])):
        driver.submit(name, prompt)
        row = driver.step()[name]
        assert (row.pages[: len(pages)], row.num_computed) == (pages, 2 * len(pages))
        assert not set(row.pages[len(pages) :]) & {1, 2, 3}
        assert driver.requests[name].cached_tokens == 2 * len(pages)
    held = [(tokens, pages, locks) for tokens, pages, locks in _nodes(cache) if locks]
    assert held == [([0, 1], [1], 1), ([2, 3], [2], 1), ([4, 5], [3], 1)]


def test_b16_cache_reset_that_is_refused(drive: Drive) -> None:
    """vllm-project/vllm#12284, #28827: a reset that is refused says so and changes nothing, one that is done leaves nothing."""
    for force in (False, True):
        driver = drive(page_size=2, num_pages=8)
        driver.submit("A", [1, 2, 3], 3)
        driver.step()
        assert driver.scheduler.reset_prefix_cache() == 0  # nothing is cached yet, A's pages are its own
        driver.step()  # A publishes page 1, and uses it
        before = driver.state()
        with pytest.raises(CacheInUseError) as caught:
            driver.scheduler.reset_prefix_cache()
        assert caught.value.code == "FAILED_PRECONDITION"
        assert driver.state() == before
        if force:
            assert driver.scheduler.reset_prefix_cache(force=True) == 2  # A's two computed pages, published and dropped
            assert driver.stats.free == 8
            driver.audit()
        driver.run()
        assert (driver.outputs["A"], driver.requests["A"].num_retractions) == ([20, 104, 629], int(force))
        driver.scheduler.reset_prefix_cache()
        assert driver.stats.free == 8
        driver.submit("B", [1, 2, 3, 4])
        driver.run()
        assert driver.requests["B"].cached_tokens == 0
