"""The warm-up reaches every kernel and leaves live memory alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime_service.kernels import decode_attention, decode_inputs, kv_write, mirror_apply, prefill_attention, row_digest
from runtime_service.kernels.decode_attention import count_splits
from runtime_service.kernels.warm_up import warm_up_kernels, warm_up_mirror_kernels


def test_warm_up_runs_every_kernel_on_the_dummy_page(make_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each twin is reached, decode attention also with a split length, and only page 0 is written."""
    reached: list[str] = []
    for module, name in (
        (kv_write, "kv_write_naive"),
        (decode_inputs, "decode_inputs_naive"),
        (decode_attention, "paged_decode_attention_naive"),
        (prefill_attention, "paged_prefill_attention_naive"),
    ):
        original = getattr(module, name)

        def record(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            reached.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(module, name, record)
    splits: list[int] = []

    def counted(num_rows: int, num_kv_heads: int, max_seq_len: int) -> int:
        splits.append(count_splits(num_rows, num_kv_heads, max_seq_len))
        return splits[-1]

    monkeypatch.setattr(decode_attention, "count_splits", counted)
    pool = make_pool([9, 4], page_size=2, num_kv_heads=1, head_dim=64, on="cpu")
    before = pool.cache.clone()
    warm_up_kernels(pool.cache, pool.table, 2, queries_per_row=3)
    assert set(reached) == {
        "kv_write_naive",
        "decode_inputs_naive",
        "paged_decode_attention_naive",
        "paged_prefill_attention_naive",
    }
    assert splits == [1, 2]
    assert torch.equal(pool.cache[:, 1:].view(torch.int32), before[:, 1:].view(torch.int32))


def test_warm_up_of_the_mirror_leaves_it_as_it_is(make_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels over the mirror are reached, and no entry changes."""
    reached: list[str] = []
    for module, name in ((mirror_apply, "mirror_apply_naive"), (row_digest, "row_digest_naive")):
        original = getattr(module, name)

        def record(*args: Any, _name: str = name, _original: Any = original) -> Any:
            reached.append(_name)
            return _original(*args)

        monkeypatch.setattr(module, name, record)
    pool = make_pool([9, 4], page_size=2, num_kv_heads=1, head_dim=64, on="cpu")
    before = pool.table.clone()
    warm_up_mirror_kernels(pool.table)
    assert reached == ["mirror_apply_naive", "row_digest_naive"]
    assert torch.equal(pool.table, before)
