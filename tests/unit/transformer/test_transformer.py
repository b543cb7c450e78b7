"""The transformer executor: what a step computes, and what it may touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service.executors.transformer import create_transformer
from runtime_service.models import gathered_attention
from runtime_service.models.gathered_attention import plan_gathers
from runtime_service.models.tiny import TINY_CONFIG
from runtime_service.ops import NO_TOKEN, LeaseStart, RowStatus, SamplingParams

MakeRig = Callable[..., Any]
Rows = dict[int, tuple[list[int], int, list[int]]]

PAGE_SIZE = 4
NUM_PAGES = 40


def test_warm_up_touches_no_usable_page(rig: Any) -> None:
    """Warming up runs the model on the dummy page alone and leaves sampling parameters as they were."""
    rig.executor.warm_up()
    for layer in rig.executor.cache.layers:
        assert bool(layer[:, 1:].isnan().all())
        assert not bool(layer[:, 0, 0].isnan().any())


def test_a_step_writes_only_its_own_slots(rig: Any) -> None:
    """Positions [num_computed, num_computed + input_len) of each row are written, every other cell stays bit for bit."""
    rig.run({1: ([7, 3], 0, [1, 2, 3, 4, 5])})
    before = [layer.clone() for layer in rig.executor.cache.layers]
    rig.run({2: ([9, 4], 0, [5, 6, 7, 8, 9, 10]), 1: ([7, 3, 5], 5, [])})
    written = torch.zeros(NUM_PAGES + 1, PAGE_SIZE, dtype=torch.bool)
    written[9], written[4, :2], written[3, 1] = True, True, True
    for old, new in zip(before, rig.executor.cache.layers, strict=True):
        changed = (old.view(torch.int32) != new.view(torch.int32)).any(dim=-1).any(dim=-1)
        assert torch.equal(changed[0], written)
        assert torch.equal(changed[1], written)


def test_clamped_row(make_rig: MakeRig, rig: Any) -> None:
    """A row wider than the mirror gets no token and writes past the width only to the dummy page; its neighbour is unharmed."""
    neighbour = rig.run({2: ([20, 21, 22, 23, 24, 25, 26, 27], 0, list(range(30)))})
    rig.run({1: ([1, 2, 3, 4, 5, 6, 7, 8], 0, list(range(31)))})
    before = [layer.clone() for layer in rig.executor.cache.layers]
    rows = {1: ([1, 2, 3, 4, 5, 6, 7, 8, 9], 31, [40, 41, 42]), 2: ([20, 21, 22, 23, 24, 25, 26, 27], 30, [])}
    result = rig.run(rows)
    assert result.row_status.tolist() == [RowStatus.CLAMPED, RowStatus.OK]
    assert result.tokens[0] == NO_TOKEN
    written = torch.zeros(NUM_PAGES + 1, PAGE_SIZE, dtype=torch.bool)
    written[8, 3] = written[27, 2] = True
    for old, new in zip(before, rig.executor.cache.layers, strict=True):
        changed = (old.view(torch.int32) != new.view(torch.int32)).any(dim=-1).any(dim=-1)
        assert torch.equal(changed[:, 1:], written[1:].expand(2, -1, -1))
    alone = make_rig()
    alone.run({2: ([20, 21, 22, 23, 24, 25, 26, 27], 0, list(range(30)))})
    alone.last_tokens[2] = int(neighbour.tokens[0])
    assert alone.run({2: rows[2]}).tokens[0] == result.tokens[1]
    decode = rig.run({1: ([1, 2, 3, 4, 5, 6, 7, 8, 9], 34, []), 2: ([20, 21, 22, 23, 24, 25, 26, 27], 31, [])})
    assert decode.row_status.tolist() == [RowStatus.CLAMPED, RowStatus.OK]


def test_non_finite_row_is_alone_in_it(rig: Any) -> None:
    """A row whose KV turned into not-a-number gets status NON_FINITE and no token; the others' logits keep every bit."""
    rows: Rows = {1: ([1, 2], 6, []), 2: ([3, 4, 5], 9, []), 3: ([6], 2, [])}
    for row, (pages, computed, _) in rows.items():
        rig.run({row: (pages, 0, list(range(row, row + computed)))})
    clean = rig.executor.forward(rig.batch(rows), np.arange(3)).clone()
    rig.executor.cache.layers[1][1, 4, 0, 1, 5] = torch.nan
    poisoned = rig.executor.forward(rig.batch(rows), np.arange(3))
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
    result = rig.run(rows)
    assert result.row_status.tolist() == [RowStatus.OK, RowStatus.NON_FINITE, RowStatus.OK]
    assert result.tokens.tolist() == [int(clean[0].argmax()), NO_TOKEN, int(clean[2].argmax())]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_masked_rows_write_no_live_page(backend: str, make_settings: Any, make_rig: MakeRig) -> None:
    """Rows masked in a mixed step and in a decode step write no page but the dummy; the others get the tokens of without."""
    with_mask, without = (make_rig(create_transformer(make_settings(attention_backend=backend))[0]) for _ in range(2))
    first = {1: ([1, 2], 0, [5, 6, 7]), 2: ([3, 4], 0, [8, 9, 10, 11])}
    mixed = {3: ([5], 0, [1, 2]), 1: ([1, 2], 3, []), 2: ([3, 4], 4, [])}
    decodes = {1: ([1, 2], 4, []), 3: ([5], 2, []), 2: ([3, 4], 5, [])}
    for rig in (with_mask, without):
        for layer in rig.executor.cache.layers:
            layer.zero_()
        rig.run(first)
    for rows, masked in ((mixed, [True, False, True]), (decodes, [False, True, True])):
        before = [layer.clone() for layer in with_mask.executor.cache.layers]
        found = with_mask.executor.execute(with_mask.batch(rows, masked=masked)).tokens
        expected = without.run({row: columns for (row, columns), skip in zip(rows.items(), masked, strict=True) if not skip})
        assert found[~np.array(masked)].tolist() == expected.tokens.tolist()
        with_mask.last_tokens[1] = without.last_tokens[1]
        for layer, old in zip(with_mask.executor.cache.layers, before, strict=True):
            changed = {int(page) for page in (layer != old).any(dim=-1).any(dim=-1).any(dim=-1).any(dim=0).nonzero()}
            assert changed <= {0, 1, 2}, "page 0 and the pages of row 1"


def test_rows_that_want_no_token(rig: Any) -> None:
    """A chunk that leaves prompt tokens gets -1 and status OK; so may a whole batch, and a batch may be empty."""
    result = rig.run({1: ([1, 2], 0, [1, 2, 3]), 2: ([3], 0, [4, 5])}, [False, True])
    assert result.tokens[0] == NO_TOKEN
    assert result.tokens[1] >= 0
    assert result.row_status.tolist() == [0, 0]
    assert rig.run({1: ([1, 2], 3, [1, 2])}, [False]).tokens.tolist() == [NO_TOKEN]
    empty = rig.batch({1: ([1, 2], 5, [1])})
    none = np.zeros(0, dtype=np.int32)
    empty.host_rows = empty.host_num_computed = empty.host_input_lens = none
    empty.sample = empty.clamped = np.zeros(0, dtype=np.bool_)
    assert rig.executor.execute(empty).tokens.tolist() == []


def test_long_batches_are_cut(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows that together are too long for one gather attend in several calls, to the same effect."""
    rows: Rows = {1: ([1, 2], 6, []), 2: ([3, 4, 5], 9, []), 3: ([6], 2, []), 4: ([7, 8], 7, [])}
    for row, (pages, computed, _) in rows.items():
        rig.run({row: (pages, 0, list(range(row, row + computed)))})
    whole = rig.executor.forward(rig.batch(rows), np.arange(4)).clone()
    cache = rig.executor.cache
    line = 2 * cache.layers[0].shape[3:].numel() * 4
    for limit, expected in ((20, [2, 2]), (1, [1, 1, 1, 1]), (30, [2, 2]), (40, [4])):
        monkeypatch.setattr(gathered_attention, "MAX_GATHERED_BYTES", {"cpu": limit * line})
        batch = rig.batch(rows)
        assert sorted(reads.num_rows for reads in plan_gathers(batch, cache).reads) == sorted(expected)
        torch.testing.assert_close(rig.executor.forward(batch, np.arange(4)), whole, rtol=0, atol=1e-5)


def test_sampling_parameters_follow_the_row(make_rig: MakeRig, rig: Any) -> None:
    """A lease's seed and temperature decide its tokens, the same after a retraction to another row and other pages."""
    params = SamplingParams(temperature=3.0, top_p=0.99, seed=77)
    prompt = list(b"seeded")
    rig.executor.start_leases([LeaseStart(1, "a", params), LeaseStart(2, "b", replace(params, seed=78))])
    outputs: dict[int, list[int]] = {1: [], 2: []}
    result = rig.run({1: ([1, 2, 3, 4], 0, prompt), 2: ([5, 6, 7, 8], 0, prompt)})
    for i in range(7):
        outputs[1].append(int(result.tokens[0]))
        outputs[2].append(int(result.tokens[1]))
        result = rig.run({1: ([1, 2, 3, 4], 6 + i, []), 2: ([5, 6, 7, 8], 6 + i, [])})
    assert outputs[1] != outputs[2]
    rig.executor.release_rows(np.array([1, 2], dtype=np.int32))
    rig.executor.start_leases([LeaseStart(4, "a", params)])
    resumed = [int(rig.run({4: ([11, 12, 13, 14], 0, prompt + outputs[1][:3])}).tokens[0])]
    resumed += [int(rig.run({4: ([11, 12, 13, 14], 9 + i, [])}).tokens[0]) for i in range(3)]
    assert resumed == outputs[1][3:7]
    rig.executor.reset()
    assert rig.greedy(prompt, 4, [1, 2, 3, 4]) == make_rig().greedy(prompt, 4, [1, 2, 3, 4])
    assert TINY_CONFIG.vocab_size == rig.executor.info.vocab_size
