"""Gathering attention beside the kernels' naive twins: batches of any mixture, and how rows are batched by length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime_service.batch_builder import BatchBuilder
from runtime_service.forward_batch import ForwardBatch
from runtime_service.kv_cache import PagedKVCache
from runtime_service.models import gathered_attention
from runtime_service.models.attention import choose_backend, plan_attention
from runtime_service.models.gathered_attention import GatherPlan, plan_gathers
from runtime_service.ops import ForwardOp
from runtime_service.req_to_page import ReqToPage

NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 3, 8
WIDTH = 24


def make_batch(lens: list[tuple[int, int]], num_decode: int, page_size: int = 4) -> ForwardBatch:
    """A batch of rows `(num_computed, input_len)`, the last `num_decode` of them decode rows, on pages in random order."""
    num_pages = sum(-(-sum(row) // page_size) for row in lens)
    pages = np.random.default_rng(num_pages).permutation(num_pages).astype(np.int32) + 1
    mirror = ReqToPage(len(lens), WIDTH, num_pages, page_size)
    computed, inputs = (np.array(column, dtype=np.int32) for column in zip(*lens, strict=True))
    row_lens = (-(-(computed + inputs) // page_size)).astype(np.int32)
    num_extend_rows = len(lens) - num_decode
    op = ForwardOp(
        session_no=1,
        step=1,
        req_pool_indices=np.arange(1, len(lens) + 1, dtype=np.int32),
        row_generations=np.ones(len(lens), dtype=np.int32),
        row_lens=row_lens,
        begins=np.zeros(len(lens), dtype=np.int32),
        sizes=row_lens,
        full_refresh=np.ones(len(lens), dtype=np.bool_),
        occupied_pages=pages,
        num_computed=computed,
        num_extend_rows=num_extend_rows,
        input_lens=inputs,
        input_ids=np.zeros(int(inputs[:num_extend_rows].sum()), dtype=np.int32),
        sample=np.ones(len(lens), dtype=np.bool_),
        released_rows=np.zeros(0, dtype=np.int32),
    )
    mirror.apply(op)
    return BatchBuilder(mirror, "cpu").build(op, torch.zeros(len(lens) + 1, dtype=torch.int64))


def filled_cache(batch: ForwardBatch, dtype: torch.dtype = torch.float32) -> PagedKVCache:
    """A cache in which exactly the slots below the length of some row are numbers."""
    num_pages = int(batch.req_to_page.max())
    cache = PagedKVCache(
        num_layers=1,
        num_pages=num_pages,
        page_size=batch.page_size,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )
    cache.layers[0].fill_(torch.nan)
    generator = torch.Generator().manual_seed(0)
    for row, length in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
        for position in range(length):
            page, offset = batch.req_to_page[row, position // batch.page_size], position % batch.page_size
            cache.layers[0][:, page, offset] = torch.randn(2, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    return cache


def attended(batch: ForwardBatch, cache: PagedKVCache, backend: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(batch.positions), NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator)
    return plan_attention(batch, cache, backend).attend(cache, 0, query.to(cache.layers[0].dtype))


def assert_same(batch: ForwardBatch, dtype: torch.dtype = torch.float32) -> None:
    """Both backends agree on every token that is not past the mirror's width."""
    cache = filled_cache(batch, dtype)
    expected, found = (attended(batch, cache, backend) for backend in ("triton", "torch"))
    kept = batch.positions < WIDTH * batch.page_size
    assert not bool(expected[kept].isnan().any())
    torch.testing.assert_close(found[kept], expected[kept], rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("lens", "num_decode"),
    [
        ([(0, 7)], 0),
        ([(0, 7), (0, 7), (0, 7)], 0),
        ([(0, 2), (0, 30), (0, 5), (0, 29)], 0),
        ([(8, 7), (4, 7), (12, 3)], 0),
        ([(0, 1), (20, 1), (3, 1)], 2),
        ([(9, 1), (9, 1), (9, 1)], 3),
        ([(60, 1), (2, 1), (59, 1), (1, 1), (17, 1)], 5),
        ([(0, 9), (5, 4), (31, 1), (0, 1), (6, 1), (70, 1)], 2),
        ([(90, 12), (3, 1)], 1),
        ([(0, 100), (0, 5), (96, 1)], 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixtures(lens: list[tuple[int, int]], num_decode: int, dtype: torch.dtype) -> None:
    """Prompts, chunks behind prefixes, decode rows and clamped rows give what the twins give, and read no foreign slot."""
    assert_same(make_batch(lens, num_decode), dtype)


@pytest.mark.parametrize("seed", range(8))
def test_random_mixtures_in_small_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However calls are cut, by gathered tokens or by the size of a mask, and pages sized, the result is the same."""
    generator = np.random.default_rng(seed)
    line = 2 * NUM_KV_HEADS * HEAD_DIM * 4
    monkeypatch.setattr(gathered_attention, "MAX_GATHERED_BYTES", {"cpu": line * int(generator.choice([1, 40, 10_000]))})
    monkeypatch.setattr(gathered_attention, "MAX_MASK_ELEMENTS", int(generator.choice([1, 50, 10_000])))
    monkeypatch.setattr(gathered_attention, "CALL_ELEMENTS", int(generator.choice([1, 1000])))
    extends = [(int(generator.choice([0, generator.integers(40)])), int(generator.integers(1, 30))) for _ in range(6)]
    decodes = [(int(generator.integers(1, 60)), 1) for _ in range(6)]
    assert_same(make_batch(extends + decodes, len(decodes), page_size=int(generator.choice([3, 4, 16]))))


def calls(batch: ForwardBatch) -> list[tuple[int, int, int]]:
    """(rows, queries, keys) of each call of a plan."""
    plan = plan_gathers(batch, filled_cache(batch))
    return [(reads.num_rows, reads.num_queries, reads.length) for reads in plan.reads]


def test_equal_decode_rows_are_one_unmasked_call() -> None:
    """Decode rows of one length take one call, without a mask and without picking tokens."""
    batch = make_batch([(0, 3), *[(50, 1)] * 6], 6)
    plan = plan_gathers(batch, filled_cache(batch))
    assert isinstance(plan, GatherPlan)
    decode = plan.reads[0]
    assert (decode.num_rows, decode.num_queries, decode.length) == (6, 1, 51)
    assert decode.mask is None
    assert decode.tokens == slice(3, 9)


def test_similar_rows_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows join a longer batch while padding costs less than a call; far shorter ones get their own."""
    lens = [(90, 1), (88, 1), (4, 1), (5, 1), (4, 1)]
    assert calls(make_batch(lens, 5)) == [(5, 1, 91)]
    monkeypatch.setattr(gathered_attention, "CALL_ELEMENTS", 20 * NUM_KV_HEADS * HEAD_DIM)
    assert calls(make_batch(lens, 5)) == [(2, 1, 91), (3, 1, 6)]


def test_chunks_are_batched_by_queries_and_keys() -> None:
    """Whole prompts go by their length alone, without a mask; chunks behind a prefix also by what they read."""
    batch = make_batch([(0, 30), (0, 4), (0, 29), (60, 4), (4, 4), (59, 4)], 0)
    assert sorted(calls(batch)) == [(1, 4, 4), (1, 4, 8), (2, 4, 64), (2, 30, 30)]
    plan = plan_gathers(batch, filled_cache(batch))
    assert sorted((reads.causal, reads.mask is None) for reads in plan.reads) == [(False, False)] * 2 + [(True, True)] * 2


def test_long_chunks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose mask would be too large becomes several of consecutive queries, each reading no further than it sees."""
    monkeypatch.setattr(gathered_attention, "MAX_MASK_ELEMENTS", 8 * 40)
    assert sorted(calls(make_batch([(20, 20)], 0))) == [(1, 4, 40), (1, 8, 28), (1, 8, 36)]


def test_backend_names() -> None:
    """`auto` goes by the device, a name stands for itself, and another one is refused with the choice there is."""
    assert choose_backend("auto", torch.device("cpu")) == "torch"
    assert choose_backend("auto", torch.device("cuda", 0)) == "triton"
    assert choose_backend("triton", torch.device("cpu")) == "triton"
    with pytest.raises(ValueError, match="'flash' is not one of auto, torch, triton"):
        choose_backend("flash", torch.device("cpu"))
