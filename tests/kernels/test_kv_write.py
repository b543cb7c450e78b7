"""The KV-write kernel and its naive twin inside memory full of canaries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runtime_service.kernels.kv_write import kv_write, kv_write_naive
from runtime_service.kernels.kv_write_triton import kv_write_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CANARY = 77.0

Implementation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def run_triton(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """The kernel, past the choice by device."""
    kv_write_launch(keys, values, cache, slots).run()


both = pytest.mark.parametrize("write", [kv_write_naive, run_triton], ids=["naive", "triton"])


def filled_cache(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache of canaries."""
    return torch.full((2, num_pages + 1, page_size, num_kv_heads, head_dim), CANARY, dtype=dtype, device=DEVICE)


def heads_of(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Seeded heads [num_tokens, num_heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_tokens, num_heads, head_dim), generator=generator).to(DEVICE, dtype)


@both
@pytest.mark.parametrize(
    ("page_size", "num_kv_heads", "head_dim", "dtype"),
    [
        (1, 1, 64, torch.float32),
        (3, 3, 80, torch.float16),
        (16, 2, 96, torch.float32),
        (129, 5, 256, torch.float16),  # 1280 elements a token: more than one block
        (48, 1, 128, torch.bfloat16),
        (2, 1, 8, torch.float16),
    ],
)
def test_tokens_land_in_their_slots_and_nowhere_else(
    write: Implementation, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Each token's heads are bit for bit at its slot, and every other element of the cache stays (B49)."""
    cache = filled_cache(5, page_size, num_kv_heads, head_dim, dtype)
    want = cache.clone()
    slots = [page_size * 5 + page_size - 1, page_size, page_size * 3 + page_size // 2]
    keys, values = (heads_of(3, num_kv_heads, head_dim, dtype, seed) for seed in (1, 2))
    for token, slot in enumerate(slots):
        want[0, slot // page_size, slot % page_size] = keys[token]
        want[1, slot // page_size, slot % page_size] = values[token]
    write(keys, values, cache, torch.tensor(slots, device=DEVICE))
    assert torch.equal(cache, want)


@both
def test_views_of_fused_projections_are_read_through_their_strides(write: Implementation) -> None:
    """Keys and values that are slices of one [T, 7, D] tensor are written as their copies would be (B48)."""
    fused = heads_of(4, 7, 64, torch.float32, 3)
    slots = torch.tensor([0, 9, 4, 7, 5], device=DEVICE)[1:]  # an index column that starts at an odd address
    cache, want = filled_cache(2, 4, 2, 64, torch.float32), filled_cache(2, 4, 2, 64, torch.float32)
    kv_write_naive(fused[:, 3:5].clone(), fused[:, 5:].clone(), want, slots)
    write(fused[:, 3:5], fused[:, 5:], cache, slots)
    assert torch.equal(cache, want)


@both
def test_padding_and_overflow_write_the_dummy_page_only(write: Implementation) -> None:
    """Tokens of padding rows and past the mirror's width share dummy slots, and no live page changes (B46, B47)."""
    cache = filled_cache(3, 4, 1, 64, torch.float16)
    keys, values = heads_of(5, 1, 64, torch.float16, 4), heads_of(5, 1, 64, torch.float16, 5)
    write(keys, values, cache, torch.tensor([0, 0, 3, 8, 0], device=DEVICE))
    assert torch.equal(cache[0, 2, 0], keys[3])
    assert torch.equal(cache[1, 2, 0], values[3])
    cache[:, 2, 0] = CANARY
    assert bool((cache[:, 1:] == CANARY).all())
    assert torch.equal(cache[0, 0, 3], keys[2])


@pytest.mark.usefixtures("either_side")
def test_no_tokens_launch_nothing() -> None:
    """A step without tokens is no launch of an empty grid (B45)."""
    cache = filled_cache(1, 2, 1, 64, torch.float32)
    kv_write(cache[0, 0, :0], cache[1, 0, :0], cache, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert bool((cache == CANARY).all())


@pytest.mark.usefixtures("either_side")
def test_public_function_writes_on_the_device_it_is_given() -> None:
    """`kv_write` stores one token of each of two rows."""
    cache = filled_cache(2, 2, 1, 64, torch.float32)
    keys, values = heads_of(2, 1, 64, torch.float32, 6), heads_of(2, 1, 64, torch.float32, 7)
    kv_write(keys, values, cache, torch.tensor([2, 5], device=DEVICE))
    assert torch.equal(cache[0, [1, 2], [0, 1]], keys)
    assert torch.equal(cache[1, [1, 2], [0, 1]], values)


HEADS = torch.zeros((2, 1, 64))
SLOTS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("keys", "slots", "error", "message"),
    [
        (HEADS.half(), SLOTS, TypeError, "keys is torch.float16, the cache torch.float32"),
        (HEADS, SLOTS.int(), TypeError, "out_cache_loc must be int64"),
        (HEADS, SLOTS[:1], ValueError, r"out_cache_loc must be \[2\]"),
        (HEADS[:1], SLOTS[:1], ValueError, "2 values for 1 keys"),
        (torch.zeros((2, 3, 64)), SLOTS, ValueError, "3 heads, the cache 1"),
        (torch.zeros((2, 1, 63)), SLOTS, ValueError, "keys must be"),
        (torch.zeros((2, 1, 128))[..., ::2], SLOTS, ValueError, "must follow one another"),
        (torch.zeros((1, 1, 64)).expand(2, 1, 64), SLOTS, ValueError, "overlapping"),
        (torch.zeros(129)[1:].view(2, 1, 64), SLOTS, ValueError, "multiple of 16 bytes"),
    ],
)
def test_unaddressable_arguments_are_refused_before_launch(
    keys: torch.Tensor, slots: torch.Tensor, error: type[Exception], message: str
) -> None:
    """A wrong dtype, shape, layout or alignment raises and writes nothing (B48, B52)."""
    cache = torch.full((2, 3, 4, 1, 64), CANARY)
    with pytest.raises(error, match=message):
        kv_write(keys, HEADS, cache, slots)
    assert bool((cache == CANARY).all())


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        (torch.zeros((2, 3, 4, 1, 64), dtype=torch.float64), TypeError, "float16, bfloat16 or float32"),
        (torch.zeros((3, 4, 1, 64)), ValueError, "layer_cache must be"),
        (torch.zeros((2, 3, 257, 1, 64)), ValueError, "page_size 257 exceeds 256"),
        (torch.zeros((2, 3, 4, 1, 264)), ValueError, "head_dim 264"),
        (torch.zeros((2, 3, 4, 1, 12)), ValueError, "head_dim 12"),
        (torch.zeros((2, 3, 2, 4, 64)).transpose(2, 3), ValueError, "contiguous"),
    ],
)
def test_caches_that_the_kernels_cannot_address_are_refused(cache: torch.Tensor, error: type[Exception], message: str) -> None:
    """A cache of another dtype, layout, page size or head dimension is named with the limit."""
    with pytest.raises(error, match=message):
        kv_write(HEADS, HEADS, cache, SLOTS)
