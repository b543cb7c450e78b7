"""The decode-attention kernels and their naive twin against a definition in float64, inside poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime_service.kernels import decode_attention_triton
from runtime_service.kernels.decode_attention import (
    MAX_LANES,
    MIN_SPLIT,
    DecodeWorkspace,
    count_splits,
    paged_decode_attention,
    paged_decode_attention_naive,
)
from runtime_service.kernels.decode_attention_triton import decode_attention_launches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NAN = float("nan")
MAP_NORESERVE = 0x4000
"""Linux: address space without memory behind it until it is touched."""

# head_dim, query heads, KV heads, page size: every head dimension and group size (1, 2, 3, 4, 8) that models have.
SHAPES = [(64, 3, 3, 16), (80, 2, 1, 3), (96, 6, 2, 1), (128, 4, 1, 48), (256, 8, 1, 129), (8, 2, 2, 5)]
LENGTHS = [1, 3, 70, 7, 8, 129]


def run_triton(pool: Any, query: torch.Tensor, queries_per_row: int = 1, num_splits: int = 1, rows: Any = None) -> torch.Tensor:
    """The kernels with splits of 16 positions, past the choice by device; the result and the workspace start as poison."""
    rows = pool.rows if rows is None else rows
    lengths = pool.lengths[rows - 1]
    num_heads, head_dim = query.shape[1:]
    workspace = DecodeWorkspace.empty(len(query) * num_heads * num_splits, head_dim, DEVICE)
    workspace.partial.fill_(NAN)
    workspace.stats.fill_(NAN)
    out = torch.full(query.shape, NAN, dtype=query.dtype, device=DEVICE)
    for launch in decode_attention_launches(
        query, pool.cache, pool.table, rows, lengths, out, workspace, head_dim**-0.5, queries_per_row, num_splits, min_split=16
    ):
        launch.run()
    return out


def run_split(pool: Any, query: torch.Tensor, queries_per_row: int = 1) -> torch.Tensor:
    """The kernels with as many splits as the longest row needs."""
    return run_triton(pool, query, queries_per_row, num_splits=-(-int(pool.lengths.max()) // 16))


def run_naive(pool: Any, query: torch.Tensor, queries_per_row: int = 1) -> torch.Tensor:
    """The twin."""
    return paged_decode_attention_naive(
        query,
        pool.cache,
        pool.table,
        pool.rows,
        pool.lengths,
        scale=query.shape[2] ** -0.5,
        queries_per_row=queries_per_row,
    )


Implementation = Callable[..., torch.Tensor]
every = pytest.mark.parametrize("attend", [run_naive, run_triton, run_split], ids=["naive", "triton", "split"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


def make_query(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Seeded queries."""
    generator = torch.Generator().manual_seed(head_dim)
    return torch.randn((num_tokens, num_heads, head_dim), generator=generator).to(DEVICE, dtype)


@every
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
    """Ragged rows of every head dimension, group and page size, poison all around, give what they should (B49, B51)."""
    pool = make_pool(LENGTHS, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    query = make_query(len(LENGTHS), num_heads, head_dim, dtype)
    got = attend(pool, query)
    for row, length in enumerate(LENGTHS, start=1):
        want = pool.attend(row, query[row - 1], length)
        torch.testing.assert_close(got[row - 1].cpu().double(), want, atol=TOLERANCE[dtype], rtol=0)


@every
@pytest.mark.parametrize(("queries_per_row", "num_heads"), [(2, 1), (3, 3), (4, 8)])
def test_few_queries_a_row_see_one_token_more_each(
    attend: Implementation, make_pool: Any, queries_per_row: int, num_heads: int
) -> None:
    """Token q of Q sees all but the last Q - 1 - q, also where a row, or the last split of one, is shorter than Q."""
    lengths = [1, 5, 33, 40]
    pool = make_pool(lengths, page_size=3, num_kv_heads=1, head_dim=64)
    query = make_query(len(lengths) * queries_per_row, num_heads, 64, torch.float32)
    got = attend(pool, query, queries_per_row)
    for token in range(len(query)):
        row, number = divmod(token, queries_per_row)
        want = pool.attend(row + 1, query[token], lengths[row] - (queries_per_row - 1 - number))
        torch.testing.assert_close(got[token].cpu().double(), want, atol=2e-6, rtol=0)


@pytest.mark.parametrize("attend", [run_triton, run_split], ids=["triton", "split"])
def test_memory_that_is_not_the_rows_cannot_matter(attend: Implementation, make_pool: Any) -> None:
    """Other contents of foreign pages, of pages' unused ends and of table entries past a row change no bit (B51)."""
    query = make_query(4, 2, 64, torch.float16)
    results = []
    for garbage, poison in ((0, 0.0), (-1, NAN), (1 << 30, float("inf"))):
        pool = make_pool(
            [1, 3, 7, 8], page_size=3, num_kv_heads=1, head_dim=64, dtype=torch.float16, garbage=garbage, poison=poison
        )
        results.append(attend(pool, query))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_cuts_depend_on_the_row_alone(make_pool: Any) -> None:
    """A row has the same bits alone and among longer ones, split or not needing a split, as in a captured launch."""
    pool = make_pool([16, 100, 7], page_size=5, num_kv_heads=1, head_dim=64)
    query = make_query(3, 2, 64, torch.float32)
    together = run_triton(pool, query, num_splits=9)
    for row, num_splits in ((1, 1), (1, 4), (2, 7), (3, 1), (3, 2)):
        alone = run_triton(pool, query[row - 1 : row], num_splits=num_splits, rows=pool.rows[row - 1 : row])
        assert torch.equal(alone[0], together[row - 1]), (row, num_splits)


def test_long_rows_are_cut_into_no_more_than_the_most_splits(make_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more positions than the most cuts of the least length would hold, cuts get longer and none is left out."""
    monkeypatch.setattr(decode_attention_triton, "max_splits", lambda num_kv_heads: 3)
    lengths = [16 * 3, 16 * 3 + 1, 16 * 8, 5]  # cuts of 16, 32, 48 and 16
    pool = make_pool(lengths, page_size=16, num_kv_heads=1, head_dim=64)
    query = make_query(4, 2, 64, torch.float32)
    got = run_triton(pool, query, num_splits=3)
    for row, length in enumerate(lengths, start=1):
        want = pool.attend(row, query[row - 1], length)
        torch.testing.assert_close(got[row - 1].cpu().double(), want, atol=2e-6, rtol=0)


@every
def test_row_with_nothing_to_see_gets_zeros(attend: Implementation, make_pool: Any) -> None:
    """A length of 0 is no division by zero."""
    pool = make_pool([0, 4], page_size=2, num_kv_heads=1, head_dim=64)
    got = attend(pool, make_query(2, 1, 64, torch.float32))
    assert not got[0].any()
    assert bool(got[1].any())


@every
def test_lengths_past_the_mirror_are_cut(attend: Implementation, make_pool: Any) -> None:
    """A row said to be longer than the mirror is wide is read up to the width, and no page id comes from behind it (B47)."""
    pool = make_pool([6], page_size=2, num_kv_heads=1, head_dim=64)
    query = make_query(1, 1, 64, torch.float32)
    base = torch.full((2, 9), 1 << 30, dtype=torch.int32, device=DEVICE)
    base[:, :3] = pool.table[:, :3]
    pool.table, pool.lengths = base[:, :3], torch.tensor([100], device=DEVICE)
    torch.testing.assert_close(attend(pool, query)[0].cpu().double(), pool.attend(1, query[0], 6), atol=2e-6, rtol=0)


def test_padding_rows_read_the_dummy_page_and_change_nothing(make_pool: Any) -> None:
    """Rows of a bigger bucket point to row 0: live rows keep their bits, and no bit of the pool changes (B46)."""
    pool = make_pool([9, 4], page_size=2, num_kv_heads=1, head_dim=64)
    query = make_query(4, 2, 64, torch.float32)
    before = pool.cache.clone()
    want = run_triton(pool, query[:2])
    pool.lengths = torch.cat([pool.lengths, torch.ones(1, dtype=torch.int64, device=DEVICE)])  # rows - 1 == -1: the last
    got = run_triton(pool, query, rows=torch.tensor([1, 2, 0, 0], device=DEVICE))
    assert torch.equal(got[:2], want)
    assert bool(got.isfinite().all())
    assert torch.equal(pool.cache.view(torch.int32), before.view(torch.int32))


@pytest.mark.usefixtures("either_side")
def test_public_function_picks_by_device(make_pool: Any) -> None:
    """`paged_decode_attention` computes where its tensors are, from a query that is a slice of fused projections."""
    pool = make_pool([300, 7], page_size=16, num_kv_heads=2, head_dim=64)
    fused = make_query(2, 8, 64, torch.float32)
    workspace = DecodeWorkspace.create(max_rows=2, num_heads=4, num_kv_heads=2, head_dim=64, max_seq_len=300, device=DEVICE)
    got = paged_decode_attention(
        fused[:, :4], pool.cache, pool.table, pool.rows, pool.lengths, scale=0.125, max_seq_len=300, workspace=workspace
    )
    assert got.is_contiguous()
    for row, length in ((1, 300), (2, 7)):
        want = pool.attend(row, fused[row - 1, :4], length)
        torch.testing.assert_close(got[row - 1].cpu().double(), want, atol=2e-6, rtol=0)
    none = paged_decode_attention(
        fused[:0, :4], pool.cache, pool.table, pool.rows[:0], pool.lengths[:0], scale=0.125, max_seq_len=1
    )
    assert none.shape == (0, 4, 64)  # and nothing was launched (B45)


@pytest.mark.parametrize(
    ("num_rows", "num_kv_heads", "max_seq_len", "splits"),
    [
        (1, 8, MIN_SPLIT, 1),  # short
        (1, 8, MIN_SPLIT + 1, 2),
        (32, 8, 4096, 16),
        (33, 8, 4096, 1),  # padded to 64, and 64 rows of 8 heads fill a GPU
        (64, 8, 4096, 1),
        (1, 8, 1 << 20, 64),
        (1, 1, 1 << 20, 128),
        (1, 128, 1 << 20, 8),
    ],
)
def test_long_and_few_rows_are_split(num_rows: int, num_kv_heads: int, max_seq_len: int, splits: int) -> None:
    """Splitting is for rows that are long and few."""
    assert count_splits(num_rows, num_kv_heads, max_seq_len) == splits


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 300, 512])
def test_workspace_is_enough_for_every_batch(num_kv_heads: int) -> None:
    """A workspace made for 200 rows of 5000 tokens holds the partial results of any batch within that, and no more."""
    needed = [
        rows * splits * num_kv_heads * 2
        for rows in range(1, 201)
        for length in (1, 256, 257, 5000)
        if (splits := count_splits(rows, num_kv_heads, length)) > 1
    ]
    made = DecodeWorkspace.create(
        max_rows=200, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=8, max_seq_len=5000, device="meta"
    )
    assert len(made.stats) // 2 == max(needed, default=0)
    assert len(made.partial) == 8 * max(needed, default=0)
    assert made.nbytes == max(needed, default=0) * (8 + 2) * 4


CACHE = torch.zeros((2, 3, 4, 1, 64))
TABLE = torch.zeros((2, 3), dtype=torch.int32)
INDEX = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros((2, 1, 64)).half()}, TypeError, "query is torch.float16"),
        ({"query": torch.zeros((2, 3, 64)), "layer_cache": torch.zeros((2, 3, 4, 2, 64))}, ValueError, "3 query heads"),
        ({"query": torch.zeros((3, 1, 64))}, ValueError, "3 queries for 2 rows of 1"),
        ({"query": torch.zeros((2, MAX_LANES + 1, 64))}, ValueError, "65 queries share a KV head of a row, more than 64"),
        ({"req_to_page": TABLE.long()}, TypeError, "req_to_page must be int32"),
        ({"req_to_page": TABLE.T}, ValueError, "side by side"),
        ({"rows": INDEX.int()}, TypeError, "rows must be int64"),
        ({"seq_lens": INDEX[:1]}, ValueError, r"seq_lens must be \[2\]"),
        ({"queries_per_row": 0}, ValueError, "for 2 rows of 0"),
        ({"max_seq_len": 0}, ValueError, "max_seq_len 0"),
        ({"max_seq_len": 600, "workspace": DecodeWorkspace.empty(5, 64, "cpu")}, ValueError, "room for 5 partial results of 6"),
    ],
)
def test_unaddressable_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """A wrong dtype, shape, layout or size raises before a launch (B48, B52)."""
    arguments = {
        "query": torch.zeros((2, 1, 64)),
        "layer_cache": CACHE,
        "req_to_page": TABLE,
        "rows": INDEX,
        "seq_lens": INDEX,
        "scale": 1.0,
        "max_seq_len": 12,
    }
    with pytest.raises(error, match=message):
        paged_decode_attention(**(arguments | change))
