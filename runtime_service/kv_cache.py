"""KV memory in pages: one tensor a layer, addressed by slots that come from the mirror and from nowhere else.

A slot is `page * page_size + offset`. Page 0 is the dummy: tokens past a mirror row's width are written there, and nobody
reads it. Memory is never cleared, so a page holds what its last tenant left, not-a-number included; readers therefore gather
only slots of positions that were written (`runtime_service.models.gathered_attention`), instead of masking what they should not
see.
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
        self._num_slots = (num_pages + 1) * page_size
        # The same memory by slot, [2][num_slots, kv heads, head_dim], and by line, [2 * num_slots, kv heads * head_dim].
        self._by_slot = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self.layers]
        self._by_line = [layer.view(2 * self._num_slots, num_kv_heads * head_dim) for layer in self.layers]
        self._gathered = torch.empty((0, num_kv_heads * head_dim), dtype=dtype, device=device)

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

    def lines(self, slots: torch.Tensor) -> torch.Tensor:
        """What `gather` takes to read both keys and values of slots int64 `[...]`: int64 [2 * number of slots]."""
        flat = slots.reshape(-1)
        return torch.cat((flat, flat + self._num_slots))

    def gather(self, layer: int, lines: torch.Tensor) -> torch.Tensor:
        """Keys, then values, of the slots that `lines` was made of.

        One copy for both, into memory that is used again by the next call: fresh memory of this size would cost more than the
        copy, since the system hands it out page by page.

        Args:
            layer: layer number.
            lines: int64 [2 * N] of `lines`.

        Returns:
            [2 * N, num_kv_heads * head_dim], valid until the next call.
        """
        if len(lines) > len(self._gathered):
            self._gathered = self._gathered.new_empty((len(lines), self._gathered.shape[1]))
        return torch.index_select(self._by_line[layer], 0, lines, out=self._gathered[: len(lines)])
