"""The transformer executor: creation from nothing and from a directory, limits and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime_service.errors import SettingError
from runtime_service.executors.base import ModelExecutor
from runtime_service.executors.transformer import create_transformer
from runtime_service.models.config import ModelConfig
from runtime_service.models.errors import ModelConfigError, WeightsError
from runtime_service.models.tiny import END_ID, tiny_tensors
from runtime_service.settings import RuntimeSettings

MakeRig = Callable[..., Any]
MakeSettings = Callable[..., RuntimeSettings]

PAGE_SIZE = 4
SMALL = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    dtype="bfloat16",
)


def write_model(directory: Path, **changes: Any) -> Path:
    """A Hugging Face directory of SMALL, its config.json changed."""
    directory.mkdir(exist_ok=True)
    data = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": SMALL.vocab_size,
        "hidden_size": SMALL.hidden_size,
        "intermediate_size": SMALL.intermediate_size,
        "num_hidden_layers": SMALL.num_layers,
        "num_attention_heads": SMALL.num_heads,
        "num_key_value_heads": SMALL.num_kv_heads,
        "max_position_embeddings": SMALL.max_position,
        "eos_token_id": [7, 8],
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(data | changes))
    save_file({name: tensor.bfloat16() for name, tensor in tiny_tensors(SMALL).items()}, directory / "model.safetensors")
    return directory


def test_tiny_model(make_settings: MakeSettings) -> None:
    """`--model tiny` needs no files, says what it is, and fits the protocol."""
    executor, capacity = create_transformer(make_settings(num_pages=None, kv_cache_gib=0.01))
    protocol: ModelExecutor = executor
    info = protocol.info
    assert (info.name, info.architecture, info.vocab_size, info.max_context) == ("tiny", "LlamaForCausalLM", 259, 4096)
    assert (info.default_stop_ids, info.tokenizer_path, info.device, info.dtype) == ((END_ID,), None, "cpu", "float32")
    # A page takes 2 layers * 2 * 4 tokens * 2 heads * 16 * 4 bytes = 2 KiB; one of them is the dummy page.
    assert capacity.num_pages == int(0.01 * 2**30) // 2048 - 1 == executor.cache.num_pages
    assert capacity.max_pages_per_row == 4096 // PAGE_SIZE


def test_tiny_text_is_seeded_and_lively(make_rig: MakeRig, rig: Any) -> None:
    """Greedy bytes are the same for every instance, many different ones, never specials, and depend on the first token."""
    prompt = list(b"Hello, world")
    tokens = rig.greedy(prompt, 20, [3, 1, 2, 9, 8, 7, 20, 21])
    again = make_rig().greedy(prompt, 20, [30, 4, 12, 13, 14, 15, 16, 17])
    assert tokens == again
    assert bool((tiny_tensors()["lm_head.weight"][256:] == 0).all())
    assert max(tokens) < 256
    assert len(set(tokens)) > 10
    assert rig.greedy([prompt[0] ^ 1, *prompt[1:]], 20, [3, 1, 2, 9, 8, 7, 20, 21]) != tokens


def test_directory(make_rig: MakeRig, make_settings: MakeSettings, tmp_path: Path) -> None:
    """A checkpoint in bfloat16 runs in float32 on a CPU unless asked otherwise; limits and stop ids come from config.json."""
    directory = write_model(tmp_path / "model")
    executor, capacity = create_transformer(make_settings(directory))
    assert executor.decoder.weights.embedding.dtype == executor.cache.layers[0].dtype == torch.float32
    info = executor.info
    assert (info.name, info.dtype, info.max_context) == (str(directory), "float32", 64)
    assert (info.default_stop_ids, info.tokenizer_path) == ((7, 8), None)
    assert capacity.max_pages_per_row == 64 // PAGE_SIZE
    (directory / "tokenizer.json").write_text("{}")
    executor, _ = create_transformer(make_settings(directory, dtype="bfloat16"))
    assert executor.decoder.weights.embedding.dtype == executor.cache.layers[0].dtype == torch.bfloat16
    assert (executor.info.dtype, executor.info.tokenizer_path) == ("bfloat16", directory)
    assert 0 <= make_rig(executor).greedy([1, 2, 3], 1, [5])[0] < 50


def test_both_forms_of_config_give_equal_logits(make_rig: MakeRig, make_settings: MakeSettings, tmp_path: Path) -> None:
    """The two forms of RoPE keys load to bit-equal logits, and another base to other ones."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    new = write_model(tmp_path / "new", rope_parameters={"rope_type": "llama3", "rope_theta": 100.0, **scaling})
    old = write_model(tmp_path / "old", rope_theta=100.0, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    other = write_model(tmp_path / "other", rope_scaling={"type": "llama3", **scaling})
    logits = []
    for directory in (new, old, other):
        rig = make_rig(create_transformer(make_settings(directory))[0])
        logits.append(rig.executor.forward(rig.batch({1: ([4, 2, 6], 0, list(range(10)))}), np.array([0])))
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)


def test_capacity_follows_the_settings(make_settings: MakeSettings, tmp_path: Path) -> None:
    """A row is as wide as max_context needs, never wider than the pool, unless the width is stated."""
    directory = write_model(tmp_path / "model")
    for changes, pages_per_row, max_context in (
        ({"max_context": 30}, 8, 30),
        ({"num_pages": 5}, 5, 64),
        ({"max_pages_per_row": 3}, 3, 64),
    ):
        executor, capacity = create_transformer(make_settings(directory, **changes))
        assert (capacity.max_pages_per_row, executor.info.max_context) == (pages_per_row, max_context)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_context": 65}, "--max-context: 65 is not within [1, 64]"),
        (
            {"num_pages": None, "kv_cache_gib": 1e-6},
            "--kv-cache-gib: 1e-06 leaves 1073 bytes for KV pages, and two pages take 2048",
        ),
        ({"num_pages": 2**31 - 2, "page_size": 256}, "--num-pages: 2147483646 takes 131072.0 GiB on cpu"),
    ],
)
def test_settings_that_do_not_fit(make_settings: MakeSettings, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """A setting that model or machine does not allow is an error with value and limit."""
    directory = write_model(tmp_path / "model")
    with pytest.raises(SettingError) as caught:
        create_transformer(make_settings(directory, **changes))
    assert words in str(caught.value)


def test_device_without_gpu(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, auto is the CPU and cuda an error that says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert create_transformer(make_settings(device="auto"))[0].info.device == "cpu"
    with pytest.raises(SettingError, match="--device: cuda needs a GPU"):
        create_transformer(make_settings(device="cuda"))


def test_no_such_model(make_settings: MakeSettings, tmp_path: Path) -> None:
    """A missing directory and one without weights are errors that name it."""
    with pytest.raises(ModelConfigError, match="does not exist"):
        create_transformer(make_settings(tmp_path / "absent"))
    directory = write_model(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="has neither"):
        create_transformer(make_settings(directory))
