"""What each supported family does differently, as config.json states it, and which windows can be ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime_service.errors import SettingError
from runtime_service.executors.sizing import size_model
from runtime_service.models.config import ModelConfig, config_from_dict
from runtime_service.models.errors import UnsupportedModelError
from runtime_service.models.families import FAMILIES
from runtime_service.models.weights import expected_tensors
from runtime_service.settings import RuntimeSettings

LAYER = "model.layers.0.self_attn."


def describe(architecture: str | None, **changes: Any) -> ModelConfig:
    data: dict[str, Any] = {
        "architectures": None if architecture is None else [architecture],
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    return config_from_dict({key: value for key, value in (data | changes).items() if value is not ...})


def test_defaults_by_family() -> None:
    """Biases, norms, head size and longest context where config.json says nothing are those of the family."""
    found = {
        family.architecture: (
            config.qkv_bias,
            config.out_bias,
            config.mlp_bias,
            config.qk_norm,
            config.head_dim,
            config.max_position,
            config.sliding_window,
        )
        for family in FAMILIES
        for config in [describe(family.architecture)]
    }
    assert found == {
        "LlamaForCausalLM": (False, False, False, False, 8, 2048, None),
        "MistralForCausalLM": (False, False, False, False, 8, 131072, 4096),
        "Qwen2ForCausalLM": (True, False, False, False, 8, 32768, None),
        "Qwen3ForCausalLM": (False, False, False, True, 128, 32768, None),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_family_by_model_type(family: Any) -> None:
    """A description without `architectures` is of the family that its model_type names."""
    config = describe(None, model_type=family.model_type)
    assert config == describe(family.architecture)
    assert config.architecture == family.architecture


def test_tensors_by_family() -> None:
    """Biases and head norms are tensors that must be there in one family and must not in another."""
    names = {family.model_type: set(expected_tensors(describe(family.architecture))) for family in FAMILIES}
    assert names["llama"] == names["mistral"]
    biases = {f"{LAYER}{part}_proj.bias".replace(".0.", f".{layer}.") for part in "qkv" for layer in range(2)}
    assert names["qwen2"] - names["llama"] == biases
    norms = {f"{LAYER}{part}_norm.weight".replace(".0.", f".{layer}.") for part in "qk" for layer in range(2)}
    assert names["qwen3"] - names["llama"] == norms
    assert expected_tensors(describe("Qwen3ForCausalLM"))[LAYER + "q_norm.weight"] == (128,)
    biased = expected_tensors(describe("LlamaForCausalLM", attention_bias=True))
    assert set(biased) - names["llama"] == {
        name.replace("q_", f"{part}_") for name in biases for part in "qkvo" if "q_" in name
    }


@pytest.mark.parametrize(
    ("architecture", "keys", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {"sliding_window": 128}, 128),
        ("MistralForCausalLM", {}, 4096),
        ("Qwen2ForCausalLM", {"sliding_window": 128}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": True}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, 128),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, 4096),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["full_attention", "full_attention"]}, None),
    ],
)
def test_sliding_window(architecture: str, keys: dict[str, Any], window: int | None) -> None:
    """A window counts where some layer has one; null, a switch that is off and full layers mean none."""
    assert describe(architecture, **keys).sliding_window == window


@pytest.mark.parametrize(
    ("architecture", "keys", "words"),
    [
        ("LlamaForCausalLM", {"sliding_window": 128}, "sliding_window 128"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["linear_attention"]}, "layer_types"),
        ("MixtralForCausalLM", {}, "MixtralForCausalLM"),
        ("Qwen3MoeForCausalLM", {}, "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"),
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "mrope"}}, "mrope"),
        ("MistralForCausalLM", {"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_refused_by_name(architecture: str, keys: dict[str, Any], words: str) -> None:
    """Another architecture, kind of layer or window is refused by name, with what there is instead."""
    with pytest.raises(UnsupportedModelError) as caught:
        describe(architecture, **keys)
    assert words in str(caught.value)


def test_window_is_ignored_within_it_alone(tmp_path: Path) -> None:
    """A context of up to the window is served, since the window then hides nothing; a longer one is refused, with both."""
    config = describe("MistralForCausalLM", sliding_window=128)

    def size(**changes: Any) -> int:
        settings = RuntimeSettings(**(dict(model=str(tmp_path), device="cpu", num_pages=20) | changes))
        return size_model(settings, config).max_context

    assert size(max_context=128) == 128
    for changes, value in (({"max_context": 129}, 129), ({}, 131072)):
        with pytest.raises(SettingError, match=f"--max-context: {value} is above the model's sliding_window 128"):
            size(**changes)
