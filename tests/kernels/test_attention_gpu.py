"""The kernels on a real GPU: compiled once, right in every dtype, capturable, and at home in pools past 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime_service.kernels.decode_attention import DecodeWorkspace, paged_decode_attention, paged_decode_attention_naive
from runtime_service.kernels.decode_inputs import decode_inputs
from runtime_service.kernels.kv_write import kv_write
from runtime_service.kernels.prefill_attention import paged_prefill_attention, paged_prefill_attention_naive
from runtime_service.kernels.warm_up import warm_up_kernels

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_query(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Queries from the device's generator."""
    return torch.randn((num_tokens, num_heads, head_dim), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_on_the_device_matches_the_twins(make_pool: Any, dtype: torch.dtype, head_dim: int) -> None:
    """Long ragged rows, split and not, and chunks behind prefixes agree with the twins in every dtype."""
    lengths, chunk_lens = [1, 700, 255, 1537], [1, 300, 255, 64]
    pool = make_pool(lengths, page_size=16, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    scale = head_dim**-0.5
    query = random_query(4, 8, head_dim, dtype)
    arguments = (query, pool.cache, pool.table, pool.rows, pool.lengths)
    want = paged_decode_attention_naive(*arguments, scale=scale)
    for max_seq_len in (1537, 1 << 16):
        got = paged_decode_attention(*arguments, scale=scale, max_seq_len=max_seq_len)
        torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=0)
    indptr = torch.tensor([0, 1, 301, 556, 620], device="cuda")
    computed = pool.lengths - torch.tensor(chunk_lens, device="cuda")
    query = random_query(620, 8, head_dim, dtype)
    chunk = (query, pool.cache, pool.table, pool.rows, indptr, computed)
    want = paged_prefill_attention_naive(*chunk, scale=scale)
    got = paged_prefill_attention(*chunk, scale=scale, max_query_len=300, max_seq_len=1537)
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=0)


def test_nothing_is_compiled_after_warm_up(make_pool: Any) -> None:
    """Steps of 1 to 64 rows of any length launch only what the warm-up has compiled (B44)."""
    from runtime_service.kernels.decode_attention_triton import decode_attention_kernel, reduce_splits_kernel
    from runtime_service.kernels.decode_inputs_triton import decode_inputs_kernel
    from runtime_service.kernels.kv_write_triton import kv_write_kernel
    from runtime_service.kernels.prefill_attention_triton import prefill_attention_kernel

    kernels = (decode_attention_kernel, reduce_splits_kernel, decode_inputs_kernel, kv_write_kernel, prefill_attention_kernel)

    def count() -> list[int]:
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    pool = make_pool(list(range(1, 65)), page_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    lengths = torch.cat([torch.zeros(1, dtype=torch.int64, device="cuda"), pool.lengths - 1])
    warm_up_kernels(pool.cache, pool.table, 8)
    before = count()
    for num_rows in range(1, 65):
        rows = pool.rows[64 - num_rows :]
        fused = random_query(num_rows, 12, 64, torch.float16)
        _, seq_lens, slots = decode_inputs(pool.table, rows, lengths, 16, width_tokens=pool.width)
        kv_write(fused[:, 8:10], fused[:, 10:], pool.cache, slots)
        decode = (fused[:, :8], pool.cache, pool.table, rows, seq_lens)
        paged_decode_attention(*decode, scale=0.125, max_seq_len=64 * num_rows)
        chunk = (fused[:, :8], pool.cache, pool.table, rows, torch.arange(num_rows + 1, device="cuda"), seq_lens - 1)
        paged_prefill_attention(*chunk, scale=0.125, max_query_len=1, max_seq_len=64)
    assert count() == before


def test_captured_launch_serves_other_rows(make_pool: Any) -> None:
    """A captured decode step, replayed for other and fewer rows, has the eager bits; padding changes no page (B46)."""
    pool = make_pool([700, 3, 90, 1100], page_size=16, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    warm_up_kernels(pool.cache, pool.table, 8)
    query = random_query(4, 8, 128, torch.bfloat16)
    rows, seq_lens = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.ones(4, dtype=torch.int64, device="cuda")
    workspace = DecodeWorkspace.create(max_rows=4, num_heads=8, num_kv_heads=2, head_dim=128, max_seq_len=2048, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = paged_decode_attention(
            query, pool.cache, pool.table, rows, seq_lens, scale=0.1, max_seq_len=2048, workspace=workspace
        )
    before = pool.cache.clone()
    for chosen in ([1, 2, 3, 4], [4, 2, 1], [3]):
        rows.zero_()
        seq_lens.fill_(1)
        rows[: len(chosen)] = torch.tensor(chosen, device="cuda")
        seq_lens[: len(chosen)] = pool.lengths[rows[: len(chosen)] - 1]
        graph.replay()
        live = slice(0, len(chosen))
        eager = paged_decode_attention(
            query[live], pool.cache, pool.table, rows[live], seq_lens[live], scale=0.1, max_seq_len=1100
        )
        assert torch.equal(out[live], eager)
    assert torch.equal(pool.cache.view(torch.int16), before.view(torch.int16))
