"""How large a model and its KV cache become, worked out from settings and configuration before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from runtime_service.errors import SettingError
from runtime_service.executors.reserves import Reserve, estimate_reserve
from runtime_service.kv_cache import kv_bytes_per_page
from runtime_service.models.attention import choose_backend
from runtime_service.models.config import ModelConfig
from runtime_service.models.weights import weights_nbytes
from runtime_service.settings import RuntimeSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_DEFAULT_PAGES = 1 << 20
"""Most pages that are taken without being asked for: a tiny model on a large GPU would otherwise get hundreds of millions."""
MAX_KERNEL_HEAD_DIM = 256
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Sizing:
    """What will be allocated, and where."""

    device: torch.device
    dtype: torch.dtype
    attention_backend: str
    max_context: int  # tokens
    num_pages: int  # usable ones; the dummy page comes on top
    max_pages_per_row: int
    weights_nbytes: int
    kv_nbytes: int  # the dummy page included
    reserve: Reserve
    memory_nbytes: int  # what there is for all of it
    memory_name: str


def size_model(settings: RuntimeSettings, config: ModelConfig, measured: int | None = None) -> Sizing:
    """Chooses device, dtype and capacity, and checks that they are possible.

    Args:
        measured: bytes that the largest step takes, once the weights are loaded; None: they are not, and it is estimated.

    Raises:
        SettingError: a setting that the model or the machine does not allow; it names the value and the limit.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, config, device)
    backend = _backend(settings.attention_backend, config, device)
    max_context = _max_context(settings, config)
    page_nbytes = kv_bytes_per_page(config.num_layers, settings.page_size, config.num_kv_heads, config.head_dim, dtype)
    weights = weights_nbytes(config, dtype)
    reserve = estimate_reserve(settings, config, dtype, device, backend)
    memory, where = available_memory(device)
    if measured is not None:
        reserve = replace(reserve, activations=measured, measured=True)
        memory += weights  # they are no longer part of what is free
    if weights > memory:
        raise SettingError("--model", settings.model, f"has weights of {_gib(weights)}, and {where} has {_gib(memory)}")
    # A CPU's budget is stated; what a step takes beside it comes from the rest of the machine's memory.
    taken = weights + (reserve.nbytes if device.type == "cuda" else 0)
    num_pages = settings.num_pages or _default_num_pages(settings, max_context, page_nbytes, device, memory - taken)
    kv = (num_pages + 1) * page_nbytes
    if taken + kv > memory:
        raise SettingError(
            "--num-pages" if settings.num_pages else "--kv-cache-gib",
            settings.num_pages or settings.kv_cache_gib,
            f"takes {_gib(kv)} on {device} beside {_gib(taken)} of weights and steps, more than the {_gib(memory)} of {where}"
            if taken > weights
            else f"takes {_gib(kv)} on {device} beside {_gib(weights)} of weights, more than the {_gib(memory)} of {where}",
        )
    return Sizing(
        device=device,
        dtype=dtype,
        attention_backend=backend,
        max_context=max_context,
        num_pages=num_pages,
        # A row never has more pages than there are.
        max_pages_per_row=settings.max_pages_per_row or min(-(-max_context // settings.page_size), num_pages),
        weights_nbytes=weights,
        kv_nbytes=kv,
        reserve=reserve,
        memory_nbytes=memory,
        memory_name=where,
    )


def choose_device(name: str) -> torch.device:
    """The device that a setting means. Raises SettingError for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingError("--device", name, "needs a GPU that torch can use, and there is none; use cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that a setting means for this checkpoint."""
    if name == "auto":
        # On a CPU half precision is slow and its rounding hides mistakes; float32 whatever the checkpoint says.
        name = "float32" if device.type == "cpu" else config.dtype or "float32"
    return DTYPES[name]


def _backend(name: str, config: ModelConfig, device: torch.device) -> str:
    fits = config.head_dim % 8 == 0 and config.head_dim <= MAX_KERNEL_HEAD_DIM
    backend = choose_backend(name, device)
    if backend == "torch" or fits:
        return backend
    if name == "auto":
        return "torch"
    limit = (
        f"takes heads of a multiple of 8 up to {MAX_KERNEL_HEAD_DIM}, and this model's head_dim is {config.head_dim}; use torch"
    )
    raise SettingError("--attention-backend", name, limit)


def _max_context(settings: RuntimeSettings, config: ModelConfig) -> int:
    max_context = config.max_position if settings.max_context is None else settings.max_context
    if not 1 <= max_context <= config.max_position:
        limit = f"is not within [1, {config.max_position}], what the model is made for"
        raise SettingError("--max-context", max_context, limit)
    if config.sliding_window is not None and max_context > config.sliding_window:
        window = config.sliding_window
        limit = (
            f"is above the model's sliding_window {window}, and windows are not implemented; up to {window} it has no effect"
        )
        raise SettingError("--max-context", max_context, limit)
    return max_context


def _default_num_pages(settings: RuntimeSettings, max_context: int, page_nbytes: int, device: torch.device, free: int) -> int:
    """As many pages as the memory set aside for them holds, the dummy page included in the memory but not in the count."""
    if device.type == "cpu":
        setting, value, budget = "--kv-cache-gib", settings.kv_cache_gib, int(settings.kv_cache_gib * _GIB)
    else:
        setting, value, budget = "--kv-memory-fraction", settings.kv_memory_fraction, int(settings.kv_memory_fraction * free)
    num_pages = min(budget // page_nbytes - 1, MAX_DEFAULT_PAGES)
    if num_pages < 1:
        raise SettingError(setting, value, f"leaves {max(budget, 0)} bytes for KV pages, and two pages take {2 * page_nbytes}")
    for name, tokens in (
        ("--max-pages-per-row", (settings.max_pages_per_row or 0) * settings.page_size),
        ("--max-context", settings.max_context or 0),
    ):
        needed = -(-min(tokens, max_context) // settings.page_size)
        if needed > num_pages:
            limit = f"holds {num_pages} pages of {settings.page_size} tokens, and one row of {name} takes {needed}"
            raise SettingError(setting, value, limit)
    return num_pages


def available_memory(device: torch.device) -> tuple[int, str]:
    """Bytes that can be had at most, and whose they are."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free, f"the free memory of {device}"
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine's memory"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"
