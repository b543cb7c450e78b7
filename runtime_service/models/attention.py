"""Attention over KV pages: which backend computes it, and the one interface that the decoder uses.

`torch` gathers pages and calls PyTorch's scaled dot product (`gathered_attention`); it runs everywhere and is what a CPU uses.
`triton` reads pages in place by kernels (`kernel_attention`). A plan holds what a step reads; it is made once per step and used
by every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from runtime_service.forward_batch import ForwardBatch
from runtime_service.kv_cache import PagedKVCache

if TYPE_CHECKING:
    from runtime_service.kernels.decode_attention import DecodeWorkspace

BACKENDS = ("torch", "triton")


class AttentionPlan(Protocol):
    """What the rows of a step read and write, the same for every layer."""

    def write(self, cache: PagedKVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [T, num_kv_heads, head_dim] of the step's tokens."""

    def attend(self, cache: PagedKVCache, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention [T, num_heads, head_dim] of rotated queries [T, num_heads, head_dim]; the layer must have been written."""


def choose_backend(name: str, device: torch.device) -> str:
    """The backend that a setting means: `auto` is `triton` on a GPU and `torch` elsewhere.

    Raises:
        ValueError: no such backend.
    """
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if name not in BACKENDS:
        raise ValueError(f"{name!r} is not one of auto, {', '.join(BACKENDS)}")
    return name


def plan_attention(
    batch: ForwardBatch, cache: PagedKVCache, backend: str = "torch", workspace: DecodeWorkspace | None = None
) -> AttentionPlan:
    """Works out from the mirror what a step reads.

    Args:
        batch: R rows, R at least 1.
        cache: the KV pages that all layers of the step use.
        backend: one of `BACKENDS`.
        workspace: of the decode kernel, for launches that are captured; None where it may allocate its own.
    """
    if backend == "triton":
        from runtime_service.models.kernel_attention import KernelPlan

        return KernelPlan(batch, workspace)
    from runtime_service.models.gathered_attention import plan_gathers

    return plan_gathers(batch, cache)
