"""KV pages by slot."""

from __future__ import annotations

import pytest
import torch

from runtime_service.kv_cache import PagedKVCache, kv_bytes_per_page


def make(dtype: torch.dtype = torch.float32) -> PagedKVCache:
    return PagedKVCache(num_layers=2, num_pages=5, page_size=4, num_kv_heads=2, head_dim=3, dtype=dtype)


def test_layout() -> None:
    """One tensor a layer: keys and values, the dummy page and the usable pages, tokens, heads."""
    cache = make(torch.bfloat16)
    assert [tuple(layer.shape) for layer in cache.layers] == [(2, 6, 4, 2, 3)] * 2
    assert {layer.dtype for layer in cache.layers} == {torch.bfloat16}
    assert cache.nbytes == 6 * kv_bytes_per_page(2, 4, 2, 3, torch.bfloat16) == 6 * 2 * 2 * 4 * 2 * 3 * 2


def test_written_slots_and_no_others() -> None:
    """A slot is page * page_size + offset; only the named slots of the named layer change, and reads give them back."""
    cache = make()
    for layer in cache.layers:
        layer.fill_(-7.0)
    slots = torch.tensor([3 * 4 + 2, 1 * 4 + 0, 5 * 4 + 3])
    keys, values = torch.randn(2, 3, 2, 3).unbind()
    cache.write(1, slots, keys, values)
    assert torch.equal(cache.layers[1][0, 3, 2], keys[0])
    assert torch.equal(cache.layers[1][1, 5, 3], values[2])
    assert bool((cache.layers[0] == -7.0).all())
    assert int((cache.layers[1] == -7.0).sum()) == cache.layers[1].numel() - 2 * 3 * 6
    read_keys, read_values = cache.gather(1, cache.lines(slots.flip(0)[:, None])).view(2, 3, 2, 3)
    assert torch.equal(read_keys, keys.flip(0))
    assert torch.equal(read_values, values.flip(0))


def test_gathers_share_memory() -> None:
    """Each gather takes the memory of the last one, which grows to the largest."""
    cache = make()
    for layer in cache.layers:
        layer.normal_()
    small, large = cache.lines(torch.tensor([5, 6])), cache.lines(torch.arange(4, 24))
    first = cache.gather(0, small)
    assert torch.equal(first, cache.layers[0].flatten(0, 2)[small].flatten(1))
    second = cache.gather(1, small)
    assert second.data_ptr() == first.data_ptr()
    third = cache.gather(0, large)
    assert torch.equal(third, cache.layers[0].flatten(0, 2)[large].flatten(1))
    assert cache.gather(1, small).data_ptr() == third.data_ptr()


def test_dummy_page_takes_repeated_writes() -> None:
    """Several tokens may go to one dummy slot; usable pages stay as they are."""
    cache = make()
    before = cache.layers[0][:, 1:].clone()
    cache.write(0, torch.tensor([0, 0, 1]), torch.ones(3, 2, 3), torch.ones(3, 2, 3))
    assert torch.equal(cache.layers[0][:, 1:].nan_to_num(), before.nan_to_num())
    assert bool((cache.layers[0][:, 0, :2] == 1).all())


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (3, 0)])
def test_sizes_are_checked(num_pages: int, page_size: int) -> None:
    """A cache without pages or slots is refused with both values."""
    with pytest.raises(ValueError, match=f"num_pages {num_pages} and page_size {page_size}"):
        PagedKVCache(num_layers=1, num_pages=num_pages, page_size=page_size, num_kv_heads=1, head_dim=1)
