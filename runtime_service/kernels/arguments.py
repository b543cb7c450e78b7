"""What the kernels ask of their arguments, looked at on the host before a launch, without a look at device memory.

Every tensor of heads and the cache itself must start at a multiple of 16 bytes and have heads without gaps: then every head
starts at such a multiple too, loads are as wide as the hardware has them, and no launch differs from another in alignment,
which would be a reason for Triton to compile again. Head dimensions that are multiples of 8 give this by themselves.
"""

from __future__ import annotations

import torch

HEAD_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ALIGNMENT = 16
MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 256


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the naive twins are to do the work: Triton has no CPU but its interpreter."""
    return tensor.device.type == "cpu"


def check_cache(layer_cache: torch.Tensor) -> None:
    """Raise TypeError or ValueError for a layer's cache that is not `[2, num_pages + 1, page_size, num_kv_heads, head_dim]`."""
    if layer_cache.dtype not in HEAD_DTYPES:
        raise TypeError(f"layer_cache must be float16, bfloat16 or float32, not {layer_cache.dtype}")
    if layer_cache.dim() != 5 or layer_cache.shape[0] != 2 or 0 in layer_cache.shape:
        raise ValueError(f"layer_cache must be [2, pages, page_size, kv heads, head_dim], not {tuple(layer_cache.shape)}")
    if not layer_cache.is_contiguous():
        raise ValueError(f"layer_cache must be contiguous, not of strides {layer_cache.stride()}")
    page_size, head_dim = layer_cache.shape[2], layer_cache.shape[4]
    if page_size > MAX_PAGE_SIZE:
        raise ValueError(f"page_size {page_size} exceeds {MAX_PAGE_SIZE}")
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(f"head_dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}")
    _check_alignment("layer_cache", layer_cache)


def check_heads(name: str, heads: torch.Tensor, layer_cache: torch.Tensor) -> None:
    """Raise for heads `[T, num_heads, head_dim]` that do not suit the cache; tokens may be any multiple of 8 apart."""
    if heads.dtype != layer_cache.dtype:
        raise TypeError(f"{name} is {heads.dtype}, the cache {layer_cache.dtype}")
    if heads.device != layer_cache.device:
        raise ValueError(f"{name} is on {heads.device}, the cache on {layer_cache.device}")
    head_dim = layer_cache.shape[4]
    if heads.dim() != 3 or heads.shape[2] != head_dim:
        raise ValueError(f"{name} must be [tokens, heads, {head_dim}], not {tuple(heads.shape)}")
    if heads.stride(2) != 1 or (heads.shape[1] > 1 and heads.stride(1) != head_dim):
        raise ValueError(f"the heads of a token of {name} must follow one another, not be at strides {heads.stride()}")
    if heads.shape[0] > 1 and (heads.stride(0) % 8 or heads.stride(0) < heads.shape[1] * head_dim):
        raise ValueError(f"tokens of {name} are {heads.stride(0)} elements apart: overlapping, or no multiple of 8")
    _check_alignment(name, heads)


def check_query(query: torch.Tensor, layer_cache: torch.Tensor) -> None:
    """Raise for queries that do not suit the cache, or whose heads do not share KV heads in groups of one size."""
    check_heads("query", query, layer_cache)
    if query.shape[1] == 0 or query.shape[1] % layer_cache.shape[3]:
        raise ValueError(f"{query.shape[1]} query heads are not a multiple of {layer_cache.shape[3]} KV heads")


def check_table(req_to_page: torch.Tensor, device: torch.device) -> None:
    """Raise for a mirror that is not int32 `[rows, width]` with a row's entries side by side."""
    if req_to_page.dtype != torch.int32:
        raise TypeError(f"req_to_page must be int32, not {req_to_page.dtype}")
    if req_to_page.dim() != 2 or 0 in req_to_page.shape:
        raise ValueError(f"req_to_page must be [rows, width], not {tuple(req_to_page.shape)}")
    if req_to_page.shape[1] > 1 and req_to_page.stride(1) != 1:
        raise ValueError(f"entries of a row of req_to_page must be side by side, not at strides {req_to_page.stride()}")
    if req_to_page.device != device:
        raise ValueError(f"req_to_page is on {req_to_page.device}, not on {device}")


def check_index(name: str, index: torch.Tensor, length: int | None, device: torch.device) -> None:
    """Raise for an index column that is not contiguous int64 `[length]` (of any length for None)."""
    if index.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, not {index.dtype}")
    if index.dim() != 1 or (length is not None and len(index) != length):
        raise ValueError(f"{name} must be [{'n' if length is None else length}], not {tuple(index.shape)}")
    if not index.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of stride {index.stride(0)}")
    if index.device != device:
        raise ValueError(f"{name} is on {index.device}, not on {device}")


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} does not start at a multiple of {ALIGNMENT} bytes")
