"""Capacity before allocation: what follows from the settings, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime_service.errors import SettingError
from runtime_service.executors import sizing
from runtime_service.executors.sizing import Sizing, size_model
from runtime_service.models.config import DTYPES as CHECKPOINT_DTYPES
from runtime_service.models.config import ModelConfig
from runtime_service.models.tiny import tiny_tensors
from runtime_service.models.weights import weights_nbytes
from runtime_service.settings import RuntimeSettings

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=4096,
    dtype="bfloat16",
)
PAGE_NBYTES = 2 * 2 * 16 * 2 * 8 * 4
GIB = 2**30


def size(config: ModelConfig = CONFIG, **changes: Any) -> Sizing:
    return size_model(RuntimeSettings(**(dict(model="some/model", device="cpu") | changes)), config)


def test_what_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of weights and of KV pages are exact, and the dummy page counts."""
    monkeypatch.setattr(torch, "empty", None)  # nothing is allocated
    found = size(num_pages=10, max_context=100)
    expected = sum(tensor.numel() for tensor in tiny_tensors(CONFIG).values())
    assert found.weights_nbytes == weights_nbytes(CONFIG, torch.float32) == expected * 4
    assert (found.num_pages, found.max_pages_per_row, found.max_context) == (10, 7, 100)
    assert found.kv_nbytes == 11 * PAGE_NBYTES
    assert (found.device.type, found.dtype, found.attention_backend) == ("cpu", torch.float32, "torch")
    assert size(dtype="bfloat16", num_pages=10).kv_nbytes == 11 * PAGE_NBYTES // 2


def test_pages_from_memory() -> None:
    """As many pages as the memory set aside holds beside the dummy page, and no row wider than them."""
    found = size(kv_cache_gib=20 * PAGE_NBYTES / GIB)
    assert (found.num_pages, found.max_pages_per_row, found.max_context) == (19, 19, 4096)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(kv_cache_gib=1.5 * PAGE_NBYTES / GIB), f"leaves {PAGE_NBYTES * 3 // 2} bytes for KV pages, and two pages take"),
        (
            dict(kv_cache_gib=20 * PAGE_NBYTES / GIB, max_context=320),
            "holds 19 pages of 16 tokens, and one row of --max-context takes 20",
        ),
        (
            dict(kv_cache_gib=20 * PAGE_NBYTES / GIB, max_pages_per_row=21),
            "holds 19 pages of 16 tokens, and one row of --max-pages-per-row takes 21",
        ),
        (dict(num_pages=2**30), f"--num-pages: {2**30} takes 4096.0 GiB on cpu beside 0.0 GiB of weights, more than the"),
        (dict(max_context=4097), "--max-context: 4097 is not within [1, 4096]"),
        (dict(kv_cache_gib=60_000.0), "--kv-cache-gib: 60000.0 takes"),
    ],
)
def test_too_little_memory(changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that does not hold one row, or is not there, is refused with value and limit before anything is allocated."""
    monkeypatch.setattr(torch, "empty", None)
    monkeypatch.setattr(sizing, "MAX_DEFAULT_PAGES", 1 << 40)
    with pytest.raises(SettingError) as caught:
        size(**changes)
    assert words in str(caught.value)


def test_weights_that_do_not_fit() -> None:
    """A model larger than the machine is refused by its size."""
    with pytest.raises(SettingError, match=r"--model: some/model has weights of \d+\.\d GiB, and this machine's memory has"):
        size(replace(CONFIG, intermediate_size=2**40))


def test_kernels_and_head_sizes() -> None:
    """Heads that the kernels cannot take are refused when the kernels are asked for by name."""
    odd = replace(CONFIG, head_dim=12)
    assert size(attention_backend="triton", num_pages=5).attention_backend == "triton"
    assert size(odd, num_pages=5).attention_backend == "torch"
    with pytest.raises(
        SettingError, match=r"--attention-backend: triton takes heads of a multiple of 8 up to 256, and .* is 12"
    ):
        size(odd, attention_backend="triton", num_pages=5)
    assert sizing._backend("auto", odd, torch.device("cuda", 0)) == "torch"
    assert sizing._backend("auto", CONFIG, torch.device("cuda", 0)) == "triton"


def test_gpu_dtype_is_the_checkpoints() -> None:
    """On a GPU, auto takes the checkpoint's dtype, each of the three that can be read, and float32 where it states none."""
    cuda = torch.device("cuda", 0)
    assert sizing.choose_dtype("auto", CONFIG, cuda) == torch.bfloat16
    assert sizing.choose_dtype("auto", replace(CONFIG, dtype=None), cuda) == torch.float32
    assert sizing.choose_dtype("auto", replace(CONFIG, dtype="float16"), cuda) == torch.float16
    assert set(sizing.DTYPES) == set(CHECKPOINT_DTYPES)
