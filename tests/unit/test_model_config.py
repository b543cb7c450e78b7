"""config.json in its two forms, what is refused in it, and where stop ids come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime_service.errors import RuntimeServiceError
from runtime_service.models.config import RopeConfig, config_from_dict, load_config
from runtime_service.models.errors import ModelConfigError, UnsupportedModelError
from runtime_service.models.rope import rope_frequencies

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def description(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return {key: value for key, value in (data | changes).items() if value is not ...}


def test_two_forms_of_rope() -> None:
    """The keys of transformers 5 and those of older versions give the same configuration."""
    new = description(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, dtype="bfloat16")
    old = description(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}, torch_dtype="bfloat16")
    oldest = description(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}, torch_dtype="torch.bfloat16")
    expected = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    for data in (new, old, oldest):
        config = config_from_dict(data)
        assert (config.rope, config.dtype) == (expected, "bfloat16")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": None},
        {"rope_scaling": {}},
    ],
)
def test_default_rope_base(keys: dict[str, Any]) -> None:
    """Where no base is stated it is the architecture's documented 10000."""
    config = config_from_dict(description(**keys))
    assert config.rope == RopeConfig(10000.0, "default")
    assert config.dtype is None


def test_base_beside_rope_parameters_without_one() -> None:
    """A base at the top level counts when rope_parameters has none, and twice the same value is no contradiction."""
    assert config_from_dict(description(rope_theta=7.0, rope_parameters={"rope_type": "default"})).rope.theta == 7.0
    assert config_from_dict(description(rope_theta=7.0, rope_parameters={"rope_theta": 7.0})).rope.theta == 7.0


def test_optional_sizes() -> None:
    """head_dim and the number of KV heads follow from the others where they are left out, and are taken where they are not."""
    config = config_from_dict(description(num_key_value_heads=..., max_position_embeddings=...))
    assert (config.head_dim, config.num_kv_heads, config.max_position, config.rms_norm_eps) == (8, 6, 2048, 1e-6)
    assert config_from_dict(description(head_dim=32)).head_dim == 32
    assert config_from_dict(description(head_dim=10, hidden_size=50)).head_dim == 10


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_theta": 1e4}, "rope_theta", "10000 disagrees with 100000"),
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_scaling": {"rope_type": "default"}}, "rope_scaling", "disagrees"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta", "-1"),
        ({"rope_theta": "1e4"}, "rope_theta", "'1e4'"),
        ({"rope_parameters": [1]}, "rope_parameters", "[1]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling.low_freq_factor", "missing"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "missing"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "rope_scaling.high_freq_factor", "1"),
        ({"vocab_size": ...}, "vocab_size", "missing"),
        ({"hidden_size": 48.0}, "hidden_size", "48.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "True"),
        ({"num_key_value_heads": 4}, "num_key_value_heads", "4 does not divide num_attention_heads 6"),
        ({"hidden_size": 50}, "head_dim", "50"),
        ({"head_dim": 7}, "head_dim", "7 is odd"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'"),
        ({"eos_token_id": 100}, "eos_token_id", "100 is not a token id in [0, 100)"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id", "'x'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "nan"),
    ],
)
def test_bad_values(changes: dict[str, Any], key: str, words: str) -> None:
    """A value that cannot be used, or contradicts another, is an error that names file, key and value."""
    with pytest.raises(ModelConfigError) as caught:
        config_from_dict(description(**changes), "some/config.json")
    assert caught.value.key == key
    assert str(caught.value).startswith(f"some/config.json: {key}: ")
    assert words in str(caught.value)
    assert isinstance(caught.value, RuntimeServiceError)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "GPT2LMHeadModel"),
        ({"architectures": ..., "model_type": "mamba"}, "model_type", "mamba"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type", "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type", "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type", "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor", "0.25"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq"),
        ({"sliding_window": 128}, "sliding_window", "128"),
        ({"dtype": "float8_e4m3fn"}, "dtype", "float8_e4m3fn"),
    ],
)
def test_other_kinds_of_model(changes: dict[str, Any], key: str, value: str) -> None:
    """What would compute something else than a plain Llama is refused by name, with what there is instead."""
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_dict(description(**changes))
    assert caught.value.key == key
    assert value in str(caught.value)
    assert f"supported: {caught.value.supported}" in str(caught.value)


def test_architecture_by_model_type() -> None:
    """A description without `architectures` is a Llama when its model_type says so."""
    assert config_from_dict(description(architectures=..., model_type="llama")).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [
        ({"eos_token_id": 3}, 2, (3,)),
        ({"eos_token_id": [3, 4, 3]}, 2, (3, 4)),
        ({"eos_token_id": None}, 2, (2,)),
        ({}, [5, 2], (5, 2)),
        (None, 0, (0,)),
        (None, None, ()),
    ],
)
def test_stop_ids(tmp_path: Path, generation: dict[str, Any] | None, own: object, expected: tuple[int, ...]) -> None:
    """generation_config.json decides the stop ids, config.json where it does not, and there may be none."""
    (tmp_path / "config.json").write_text(json.dumps(description(eos_token_id=own)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(tmp_path).stop_ids == expected


def test_bad_stop_id_names_its_file(tmp_path: Path) -> None:
    """A stop id outside the vocabulary is reported with the file that has it."""
    (tmp_path / "config.json").write_text(json.dumps(description()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 4096}))
    with pytest.raises(ModelConfigError, match=r"generation_config\.json: eos_token_id: 4096 is not a token id"):
        load_config(tmp_path)


def test_bad_files(tmp_path: Path) -> None:
    """A missing directory, a file for a directory, no config.json and a damaged one each have their own message."""
    for path, words in ((tmp_path / "absent", "does not exist"), (tmp_path, "has no config.json")):
        with pytest.raises(ModelConfigError, match=words):
            load_config(path)
    config = tmp_path / "config.json"
    for content, words in (("{", "cannot be read"), ("[]", "holds a list")):
        config.write_text(content)
        with pytest.raises(ModelConfigError, match=words):
            load_config(tmp_path)
    with pytest.raises(ModelConfigError, match="is not a directory"):
        load_config(config)


def test_rope_frequencies_by_hand() -> None:
    """Base, linear and llama3 scaling against values worked out by the definitions."""
    plain = rope_frequencies(RopeConfig(theta=100.0), 4)
    assert plain.tolist() == pytest.approx([1.0, 0.1])
    assert rope_frequencies(RopeConfig(100.0, "linear", 4.0), 4).tolist() == pytest.approx([0.25, 0.025])
    # Wavelengths 6.28, 62.8, 628, 6283 against 2048 tokens: below 512 untouched, above 2048 divided by 8, blended between.
    scaled = rope_frequencies(RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 2048), 8)
    blend = (2048 / (2 * torch.pi / 0.01) - 1.0) / 3.0
    expected = [1.0, 0.1, 0.01 * (blend + (1 - blend) / 8), 0.001 / 8]
    assert scaled.tolist() == pytest.approx(expected)
