"""KV memory in pages: one tensor a layer, addressed by slots that come from the mirror and from nowhere else.

A slot is `page * page_size + offset`. Page 0 is the dummy: tokens past a mirror row's width are written there, and nobody
reads it. Memory is never cleared, so a page holds what its last tenant left, not-a-number included; readers therefore gather
only slots of positions that were written (`runtime_service.models.attention`), instead of masking what they should not see.
"""

from __future__ import annotations

import torch


def kv_bytes_per_page(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    return num_layers * 2 * page_size * num_kv_heads * head_dim * dtype.itemsize


class PagedKVCache:
    """Keys and values of `num_pages` pages and the dummy page, for every layer.

    Attributes:
        layers: per layer a tensor `[2, num_pages + 1, page_size, num_kv_heads, head_dim]`; index 0 keys, 1 values.
        num_pages: usable pages, ids 1 ... num_pages.
        page_size: tokens in a page.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages {num_pages} and page_size {page_size} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (2, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        for layer in self.layers:
            layer[:, 0] = 0  # finite, so that a mirror row that wrongly names page 0 gives wrong text, not none
        # The same memory by slot: [2][(num_pages + 1) * page_size, num_kv_heads, head_dim].
        self._by_slot = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores T tokens of one layer.

        Args:
            layer: layer number.
            slots: int64 [T], `ForwardBatch.out_cache_loc`; distinct except for dummy slots, of which any write may win.
            keys, values: [T, num_kv_heads, head_dim] in the cache's dtype.
        """
        key_slots, value_slots = self._by_slot[layer]
        key_slots.index_copy_(0, slots, keys)
        value_slots.index_copy_(0, slots, values)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these slots.

        Args:
            layer: layer number.
            slots: int64 of any shape `[...]`.

        Returns:
            Two tensors `[..., num_kv_heads, head_dim]`, copies.
        """
        shape = (*slots.shape, *self.layers[layer].shape[3:])
        flat = slots.reshape(-1)
        key_slots, value_slots = self._by_slot[layer]
        return key_slots.index_select(0, flat).view(shape), value_slots.index_select(0, flat).view(shape)
