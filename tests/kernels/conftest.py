"""KV pools full of poison, with rows in them, for the tests of the attention kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from runtime_service.kernels import decode_attention, decode_inputs, kv_write, prefill_attention


@dataclass
class Pool:
    """Rows 1 ... R of a mirror, their pages scattered over a pool in which everything else is poison."""

    cache: torch.Tensor  # [2, num_pages + 1, page_size, num_kv_heads, head_dim]
    table: torch.Tensor  # int32 [R + 1, width]
    keys: list[torch.Tensor]  # of each row, [length, num_kv_heads, head_dim]
    values: list[torch.Tensor]
    rows: torch.Tensor  # int64 [R], 1 ... R
    lengths: torch.Tensor  # int64 [R]
    width: int  # tokens that a row can hold

    def attend(self, row: int, query: torch.Tensor, seen: int) -> torch.Tensor:
        """What one token's heads [num_heads, head_dim] should get from the first `seen` tokens: a definition in float64."""
        group = query.shape[0] // self.cache.shape[3]
        result = torch.zeros(query.shape, dtype=torch.float64)
        for head in range(query.shape[0] if seen > 0 else 0):
            keys = self.keys[row - 1][:seen, head // group].double()
            values = self.values[row - 1][:seen, head // group].double()
            weights = (keys @ query[head].cpu().double() * query.shape[1] ** -0.5).softmax(0)
            result[head] = weights @ values
        return result


@pytest.fixture(params=["by device", "kernels"])
def either_side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test twice: as the public functions choose, and with the kernels also where only their interpreter can run."""
    if request.param == "kernels":
        for module in (kv_write, decode_inputs, decode_attention, prefill_attention):
            monkeypatch.setattr(module, "on_host", lambda tensor: False)


PoolMaker = Callable[..., Pool]


@pytest.fixture(scope="session")
def make_pool() -> PoolMaker:
    """A function that makes a `Pool`; on the GPU where the kernels run there."""
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

    def make(
        lengths: list[int],
        *,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        garbage: int = 1 << 30,
        poison: float = float("nan"),
        on: str = device,
    ) -> Pool:
        """Rows of these lengths; table entries past a row's pages are `garbage`, unwritten memory is `poison`."""
        generator = torch.Generator().manual_seed(sum(lengths) + page_size)
        num_pages = [-(-length // page_size) for length in lengths]
        width = max([*num_pages, 1]) + 1
        cache = torch.full((2, sum(num_pages) + 3, page_size, num_kv_heads, head_dim), poison, dtype=dtype)
        cache[:, 0] = 0
        table = torch.full((len(lengths) + 1, width), garbage, dtype=torch.int32)
        table[0] = 0
        free = (torch.randperm(sum(num_pages), generator=generator) + 2).tolist()  # page 1 and the last stay poison
        keys, values = [], []
        for row, (length, count) in enumerate(zip(lengths, num_pages, strict=True), start=1):
            pages = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
            table[row, :count] = pages
            position = torch.arange(length)
            for which, stored in ((0, keys), (1, values)):
                heads = torch.randn((length, num_kv_heads, head_dim), generator=generator).to(dtype)
                cache[which, pages[position // page_size], position % page_size] = heads
                stored.append(heads)
        rows = torch.arange(1, len(lengths) + 1, device=on)
        return Pool(cache.to(on), table.to(on), keys, values, rows, torch.tensor(lengths, device=on), width * page_size)

    return make
