"""The prefill-attention kernel and its naive twin against a definition in float64, inside poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

from runtime_service.kernels.prefill_attention import MAX_GROUP, paged_prefill_attention, paged_prefill_attention_naive
from runtime_service.kernels.prefill_attention_triton import prefill_attention_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
NAN = float("nan")

# head_dim, query heads, KV heads, page size: every head dimension and group size (1, 2, 3, 4, 8) that models have.
SHAPES = [(64, 3, 3, 16), (80, 2, 1, 3), (96, 6, 2, 1), (128, 4, 1, 48), (256, 8, 1, 129), (8, 2, 2, 5)]


def run_triton(pool: Any, query: torch.Tensor, chunk_lens: list[int]) -> torch.Tensor:
    """The kernel, past the choice by device; the result starts as poison."""
    indptr = torch.tensor([0, *accumulate(chunk_lens)], device=DEVICE)
    out = torch.full(query.shape, NAN, dtype=query.dtype, device=DEVICE)
    computed = pool.lengths - torch.tensor(chunk_lens, device=DEVICE)
    scale = query.shape[2] ** -0.5
    prefill_attention_launch(query, pool.cache, pool.table, pool.rows, indptr, computed, out, scale, max(chunk_lens)).run()
    return out


def run_naive(pool: Any, query: torch.Tensor, chunk_lens: list[int]) -> torch.Tensor:
    """The twin."""
    indptr = torch.tensor([0, *accumulate(chunk_lens)], device=DEVICE)
    computed = pool.lengths - torch.tensor(chunk_lens, device=DEVICE)
    scale = query.shape[2] ** -0.5
    return paged_prefill_attention_naive(query, pool.cache, pool.table, pool.rows, indptr, computed, scale=scale)


Implementation = Callable[[Any, torch.Tensor, list[int]], torch.Tensor]
both = pytest.mark.parametrize("attend", [run_naive, run_triton], ids=["naive", "triton"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


def make_query(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Seeded queries."""
    generator = torch.Generator().manual_seed(head_dim)
    return torch.randn((num_tokens, num_heads, head_dim), generator=generator).to(DEVICE, dtype)


def check(attend: Implementation, pool: Any, query: torch.Tensor, chunk_lens: list[int]) -> None:
    """Compare every token with the definition."""
    got = attend(pool, query, chunk_lens)
    token = 0
    for row, chunk_len in enumerate(chunk_lens, start=1):
        computed = int(pool.lengths[row - 1]) - chunk_len
        for number in range(chunk_len):
            want = pool.attend(row, query[token], computed + number + 1)
            torch.testing.assert_close(got[token].cpu().double(), want, atol=TOLERANCE[query.dtype], rtol=0)
            token += 1
    assert token == len(query)


@both
@dtypes
@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads", "page_size"), SHAPES)
def test_every_shape_matches_the_definition(
    attend: Implementation,
    make_pool: Any,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
) -> None:
    """Chunks with and without a cached prefix, of one token and longer than a tile, see what they should (B49, B51)."""
    lengths, chunk_lens = [1, 8, 150, 97], [1, 8, 1, 70]
    pool = make_pool(lengths, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    check(attend, pool, make_query(sum(chunk_lens), num_heads, head_dim, dtype), chunk_lens)


@both
def test_row_without_tokens_is_passed_over(attend: Implementation, make_pool: Any) -> None:
    """A row with an empty chunk between two others takes no result and gives none."""
    pool = make_pool([5, 9, 3], page_size=2, num_kv_heads=1, head_dim=64)
    check(attend, pool, make_query(5, 1, 64, torch.float32), [2, 0, 3])


def test_memory_that_is_not_the_rows_cannot_matter(make_pool: Any) -> None:
    """Other contents of foreign pages, of pages' unused ends and of table entries past a row change no bit (B51)."""
    query = make_query(1 + 3 + 7 + 8, 2, 64, torch.float16)
    results = []
    for garbage, poison in ((0, 0.0), (-1, NAN), (1 << 30, float("inf"))):
        pool = make_pool(
            [1, 3, 77, 8], page_size=3, num_kv_heads=1, head_dim=64, dtype=torch.float16, garbage=garbage, poison=poison
        )
        results.append(run_triton(pool, query, [1, 3, 7, 8]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_tokens_of_a_chunk_not_yet_due_cannot_matter(make_pool: Any) -> None:
    """A token's result has the same bits whatever the later tokens of its own chunk hold (causality)."""
    pool = make_pool([90], page_size=4, num_kv_heads=1, head_dim=64)
    query = make_query(80, 1, 64, torch.float32)
    before = run_triton(pool, query, [80])
    pages = pool.table[1].long()
    for position in range(50, 90):
        pool.cache[:, pages[position // 4], position % 4] = 1e4
    after = run_triton(pool, query, [80])
    assert torch.equal(before[:40], after[:40])
    assert not torch.equal(before[40], after[40])


@both
def test_tokens_past_the_mirror_see_it_up_to_its_width(attend: Implementation, make_pool: Any) -> None:
    """A chunk that runs past the width reads no page id from behind it (B47)."""
    pool = make_pool([6], page_size=2, num_kv_heads=1, head_dim=64)
    base = torch.full((2, 9), 1 << 30, dtype=torch.int32, device=DEVICE)
    base[:, :3] = pool.table[:, :3]
    pool.table, pool.lengths = base[:, :3], torch.tensor([8], device=DEVICE)
    query = make_query(4, 1, 64, torch.float32)
    got = attend(pool, query, [4])
    for token, seen in enumerate([5, 6, 6, 6]):
        torch.testing.assert_close(got[token].cpu().double(), pool.attend(1, query[token], seen), atol=2e-6, rtol=0)


@pytest.mark.usefixtures("either_side")
def test_public_function_picks_by_device(make_pool: Any) -> None:
    """`paged_prefill_attention` computes where its tensors are, from a query that is a slice of fused projections."""
    pool = make_pool([7, 20], page_size=16, num_kv_heads=2, head_dim=64)
    fused = make_query(8, 8, 64, torch.float32)
    indptr = torch.tensor([0, 3, 8], device=DEVICE)
    computed = torch.tensor([4, 15], device=DEVICE)
    got = paged_prefill_attention(
        fused[:, :4], pool.cache, pool.table, pool.rows, indptr, computed, scale=0.125, max_query_len=5, max_seq_len=20
    )
    assert got.is_contiguous()
    for token, (row, seen) in enumerate([(1, 5), (1, 6), (1, 7), (2, 16), (2, 17), (2, 18), (2, 19), (2, 20)]):
        want = pool.attend(row, fused[token, :4], seen)
        torch.testing.assert_close(got[token].cpu().double(), want, atol=2e-6, rtol=0)
    none = paged_prefill_attention(
        fused[:0, :4], pool.cache, pool.table, pool.rows, indptr * 0, computed, scale=0.125, max_query_len=0, max_seq_len=0
    )
    assert none.shape == (0, 4, 64)  # and nothing was launched (B45)


CACHE = torch.zeros((2, 3, 4, 1, 64))
TABLE = torch.zeros((2, 3), dtype=torch.int32)
INDEX = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros((2, 1, 64)).half()}, TypeError, "query is torch.float16"),
        ({"query": torch.zeros((2, MAX_GROUP + 1, 64))}, ValueError, "65 query heads share a KV head, more than 64"),
        ({"req_to_page": TABLE.long()}, TypeError, "req_to_page must be int32"),
        ({"rows": INDEX.int()}, TypeError, "rows must be int64"),
        ({"query_indptr": INDEX}, ValueError, r"query_indptr must be \[2\]"),
        ({"num_computed": INDEX.new_zeros(2)}, ValueError, r"num_computed must be \[1\]"),
        ({"max_query_len": 0}, ValueError, "max_query_len 0"),
        ({"max_query_len": 13}, ValueError, r"max_query_len 13 is outside \[1, max_seq_len 12\]"),
    ],
)
def test_unaddressable_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """A wrong dtype, shape, layout or size raises before a launch (B48, B52)."""
    arguments = {
        "query": torch.zeros((2, 1, 64)),
        "layer_cache": CACHE,
        "req_to_page": TABLE,
        "rows": INDEX,
        "query_indptr": torch.tensor([0, 2]),
        "num_computed": INDEX,
        "scale": 1.0,
        "max_query_len": 2,
        "max_seq_len": 12,
    }
    with pytest.raises(error, match=message):
        paged_prefill_attention(**(arguments | change))
