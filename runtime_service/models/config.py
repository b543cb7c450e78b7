"""A model's description, read from config.json and generation_config.json of a Hugging Face directory.

config.json comes in two forms: transformers 5 writes `rope_parameters: {rope_theta, rope_type, ...}` and `dtype`, older
versions wrote `rope_theta`, `rope_scaling` and `torch_dtype`. A wrong RoPE base or scaling does not fail, it only makes the
text worse, so whatever is contradictory or not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_service.models.config_reader import ConfigReader, read_object
from runtime_service.models.errors import ModelConfigError
from runtime_service.models.families import check_kind, sliding_window

DEFAULT_ROPE_THETA = 10000.0
"""The base where config.json names none (documented default of every supported family)."""
DTYPES = ("float32", "bfloat16", "float16")
"""Checkpoint dtypes that can be read."""
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base and scaling.

    `linear` divides every frequency by `factor`; `llama3` divides those whose wavelength is longer than
    `original_max_position / low_freq_factor`, leaves those shorter than `original_max_position / high_freq_factor`, and blends
    in between. The fields after `factor` are used by `llama3` alone.
    """

    theta: float = DEFAULT_ROPE_THETA
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder, of whatever family.

    `max_position` and `sliding_window` are in tokens; None for the window: every token sees the whole sequence before it.
    `dtype` is that of the checkpoint, None where it is not stated.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    rope: RopeConfig = RopeConfig()
    dtype: str | None = None
    stop_ids: tuple[int, ...] = ()
    architecture: str = "LlamaForCausalLM"


def load_config(directory: Path) -> ModelConfig:
    """Reads the description of the model in a Hugging Face directory.

    Raises:
        ModelConfigError: a file is missing or damaged, a key is missing, contradictory or out of range.
        UnsupportedModelError: another architecture, RoPE type, activation, or a quantized checkpoint.
    """
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise ModelConfigError(directory, "", f"{problem}; --model takes a Hugging Face directory, `tiny` or `fingerprint`")
    path = directory / "config.json"
    generation_path = directory / "generation_config.json"
    if not path.is_file():
        raise ModelConfigError(directory, "", "has no config.json; `make model` makes a directory that has one")
    generation = read_object(generation_path) if generation_path.is_file() else None
    return config_from_dict(read_object(path), path, generation, generation_path)


def config_from_dict(
    data: Mapping[str, Any],
    path: Path | str = "config",
    generation: Mapping[str, Any] | None = None,
    generation_path: Path | str = "generation config",
) -> ModelConfig:
    """Builds a ModelConfig from the content of config.json and, where there is one, of generation_config.json.

    Raises:
        ModelConfigError, UnsupportedModelError: as `load_config`.
    """
    reader = ConfigReader(path, data)
    family = check_kind(reader)
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.fail("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    if reader.get("head_dim", family.head_dim) is None and hidden_size % num_heads:
        raise reader.fail("head_dim", f"missing, and hidden_size {hidden_size} is no multiple of {num_heads} heads")
    head_dim = reader.integer("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise reader.fail("head_dim", f"{head_dim} is odd, rotary embedding needs an even number")
    vocab_size = reader.integer("vocab_size")
    max_position = reader.integer("max_position_embeddings", family.max_position)
    stop_ids = _stop_ids(ConfigReader(generation_path, generation or {}), vocab_size)
    if stop_ids is None:
        stop_ids = _stop_ids(reader, vocab_size)
    stated_bias = reader.boolean("attention_bias", False) if family.stated_bias else False
    num_layers = reader.integer("num_hidden_layers")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or stated_bias,
        out_bias=stated_bias,
        mlp_bias=reader.boolean("mlp_bias", False) if family.stated_bias else False,
        qk_norm=family.qk_norm,
        sliding_window=sliding_window(reader, family, num_layers),
        rope=_rope(reader, max_position),
        dtype=_dtype(reader),
        stop_ids=stop_ids or (),
        architecture=family.architecture,
    )


def _rope(reader: ConfigReader, max_position: int) -> RopeConfig:
    """RoPE of either form of config.json. Stated twice with different values is an error, not a choice."""
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    if new is not None and old is not None and new.data != old.data:
        raise reader.fail("rope_scaling", "disagrees with rope_parameters; remove one of them")
    scaling = new or old
    theta = None
    for source in (scaling, reader):
        if source is not None and source.get("rope_theta") is not None:
            value = source.number("rope_theta")
            if theta is not None and value != theta:
                raise reader.fail("rope_theta", f"{value:g} disagrees with {theta:g} beside rope_type; remove one of them")
            theta = value
    theta = DEFAULT_ROPE_THETA if theta is None else theta
    _check_whole_head(reader)
    if scaling is None:
        return RopeConfig(theta=theta)
    _check_whole_head(scaling)
    # "type" is the key's name in the oldest files.
    key = "type" if scaling.get("rope_type") is None and scaling.get("type") is not None else "rope_type"
    rope_type = scaling.get(key, "default")
    if rope_type not in ROPE_TYPES:
        raise scaling.unsupported(key, rope_type, ", ".join(ROPE_TYPES))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=scaling.number("factor"))
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.fail("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
    return RopeConfig(
        theta=theta,
        rope_type="llama3",
        factor=scaling.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=scaling.integer("original_max_position_embeddings", max_position),
    )


def _check_whole_head(reader: ConfigReader) -> None:
    if reader.get("partial_rotary_factor", 1) != 1:
        raise reader.unsupported("partial_rotary_factor", reader.get("partial_rotary_factor"), "1, the whole head")


def _dtype(reader: ConfigReader) -> str | None:
    key = "dtype" if reader.get("dtype") is not None else "torch_dtype"
    value = reader.get(key)
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise reader.unsupported(key, value, ", ".join(DTYPES))
    return name


def _stop_ids(reader: ConfigReader, vocab_size: int) -> tuple[int, ...] | None:
    """`eos_token_id`, an integer or a list; None when it is not stated."""
    value = reader.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    for stop_id in ids:
        if isinstance(stop_id, bool) or not isinstance(stop_id, int) or not 0 <= stop_id < vocab_size:
            raise reader.fail("eos_token_id", f"{stop_id!r} is not a token id in [0, {vocab_size})")
    return tuple(dict.fromkeys(ids))
