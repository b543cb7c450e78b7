"""Weights of a decoder: which tensors there must be, reading them from safetensors, and the layout they compute in.

Every tensor that the configuration implies must be there with exactly its shape, and no other: a checkpoint that almost fits
is a wrong configuration, and would otherwise show only as bad text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from runtime_service.models.config import ModelConfig
from runtime_service.models.errors import WeightsError

Shape = tuple[int, ...]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_STORED_DTYPES = ("F32", "BF16", "F16")
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_MATCH_REMEDY = "use the config.json that was saved with these weights"


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. A weight `[out, in]` is applied as `x @ weight.T`; a bias is None where the model has none."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: query, key, value heads
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    out: torch.Tensor  # [hidden, num_heads * head_dim]
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]: gate, up
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    """All weights, of one dtype and on one device."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the embedding itself where they are tied


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of a checkpoint of this configuration, in the order of the computation."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, Shape] = {_EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = (hidden,)
        projections: dict[str, Shape] = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden)}
        _add(tensors, prefix + "self_attn.", projections, config.qkv_bias)
        if config.qk_norm:
            tensors |= {f"{prefix}self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
        _add(tensors, prefix + "self_attn.", {"o_proj": (hidden, query)}, config.out_bias)
        tensors[prefix + "post_attention_layernorm.weight"] = (hidden,)
        projections = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        _add(tensors, prefix + "mlp.", projections, config.mlp_bias)
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors[_HEAD] = (config.vocab_size, hidden)
    return tensors


def _add(tensors: dict[str, Shape], prefix: str, projections: Mapping[str, Shape], bias: bool) -> None:
    for name, shape in projections.items():
        tensors[f"{prefix}{name}.weight"] = shape
        if bias:
            tensors[f"{prefix}{name}.bias"] = shape[:1]


def weights_nbytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights of this configuration in a dtype, known before any is read."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values()) * dtype.itemsize


def assemble(config: ModelConfig, take: Callable[[str], torch.Tensor]) -> DecoderWeights:
    """Puts checkpoint tensors into the fused layout of `DecoderWeights`.

    Tensors that a layer applies to the same input are concatenated, so that a step makes four products a layer, not seven.

    Args:
        config: shape of the model.
        take: gives the tensor of a name of `expected_tensors`. It is asked for each once, and nothing is kept beside the
            result, so that loading needs no more memory than the weights and one layer.
    """

    def fused(prefix: str, names: tuple[str, ...], kind: str) -> torch.Tensor:
        return torch.cat([take(f"{prefix}{name}.{kind}") for name in names])

    embedding = take(_EMBEDDING)
    layers = []
    for layer in range(config.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        query_key_value, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
        layers.append(
            LayerWeights(
                input_norm=take(f"model.layers.{layer}.input_layernorm.weight"),
                qkv=fused(attention, query_key_value, "weight"),
                qkv_bias=fused(attention, query_key_value, "bias") if config.qkv_bias else None,
                query_norm=take(attention + "q_norm.weight") if config.qk_norm else None,
                key_norm=take(attention + "k_norm.weight") if config.qk_norm else None,
                out=take(attention + "o_proj.weight"),
                out_bias=take(attention + "o_proj.bias") if config.out_bias else None,
                post_norm=take(f"model.layers.{layer}.post_attention_layernorm.weight"),
                gate_up=fused(mlp, gate_up, "weight"),
                gate_up_bias=fused(mlp, gate_up, "bias") if config.mlp_bias else None,
                down=take(mlp + "down_proj.weight"),
                down_bias=take(mlp + "down_proj.bias") if config.mlp_bias else None,
            )
        )
    final_norm = take("model.norm.weight")
    head = embedding if config.tie_word_embeddings else take(_HEAD)
    return DecoderWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=head)


def load_weights(
    directory: Path, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """Reads `model.safetensors`, or the files that `model.safetensors.index.json` names, and converts to `dtype`.

    Names, shapes and dtypes of all tensors are checked before the first one is read.

    Raises:
        WeightsError: no safetensors, a damaged file, a missing or extra tensor, a wrong shape, a dtype that is no float.
    """
    where = find_tensors(directory, config)
    with ExitStack() as stack:
        # Files are mapped, and each tensor is copied from the mapping to the device when it is asked for.
        stored = {path: stack.enter_context(_open(path, device)) for path in dict.fromkeys(where.values())}

        def take(name: str) -> torch.Tensor:
            tensor: torch.Tensor = stored[where[name]].get_tensor(name)
            return tensor.to(dtype)

        weights = assemble(config, take)
        if config.tie_word_embeddings and _HEAD in where and not torch.equal(take(_HEAD), weights.head):
            problem = f"{_HEAD} differs from {_EMBEDDING}, but config.json says tie_word_embeddings"
            raise WeightsError(directory, problem, "set tie_word_embeddings to false, or remove the tensor")
    return weights


def find_tensors(directory: Path, config: ModelConfig) -> dict[str, Path]:
    """The file of each tensor of the model, after names, shapes and dtypes were checked; reads headers only.

    Raises:
        WeightsError: as `load_weights`, except for a head that differs from tied embeddings.
    """
    return _check_headers(directory, _weight_files(directory), expected_tensors(config), config)


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files, each once; what an index names must exist in the directory itself."""
    index = directory / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(index, f"is no index of safetensors files ({error!r})", "fetch it again") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise WeightsError(index, f"names {name!r}, which is no file of this directory", "fetch the index again")
            if not (directory / name).is_file():
                raise WeightsError(directory, f"has no {name}, which {INDEX_NAME} names", "fetch the missing file")
        return [directory / name for name in names]
    if (directory / SINGLE_NAME).is_file():
        return [directory / SINGLE_NAME]
    stray = (".bin", ".gguf", ".pt", ".pth", ".safetensors")
    others = sorted(path.name for path in directory.iterdir() if path.suffix in stray)
    found = f" (it has {', '.join(others[:4])})" if others else ""
    remedy = "fetch the safetensors files, or convert the model once with transformers' save_pretrained"
    raise WeightsError(directory, f"has neither {SINGLE_NAME} nor {INDEX_NAME}{found}", remedy)


def _open(path: Path, device: torch.device | str = "cpu") -> safe_open:
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        remedy = "fetch it again; a text file of some hundred bytes is a Git LFS pointer: run `git lfs pull`"
        raise WeightsError(path, f"is no safetensors file ({error})", remedy) from error


def _check_headers(directory: Path, files: list[Path], expected: Mapping[str, Shape], config: ModelConfig) -> dict[str, Path]:
    """Compares what is stored with what is expected; returns the file of each tensor."""
    where: dict[str, Path] = {}
    extra: list[str] = []
    for path in files:
        with _open(path) as stored:
            for name in stored.keys():  # noqa: SIM118  (safe_open is no mapping)
                if name.endswith("rotary_emb.inv_freq"):
                    continue  # old checkpoints store what follows from config.json
                shape = expected[_EMBEDDING] if name == _HEAD and config.tie_word_embeddings else expected.get(name)
                if shape is None:
                    extra.append(name)
                    continue
                if name in where:
                    raise WeightsError(path, f"{name} is in {where[name].name} as well", "remove one of the files")
                where[name] = path
                _check_tensor(path, name, tuple(stored.get_slice(name).get_shape()), shape, stored.get_slice(name).get_dtype())
    missing = [name for name in expected if name not in where]
    if missing:
        raise WeightsError(directory, f"lacks {_some(missing)}", "fetch all files, or " + _MATCH_REMEDY)
    if extra:
        raise WeightsError(directory, f"has {_some(extra)}, which this model does not use", _MATCH_REMEDY)
    return where


def _check_tensor(path: Path, name: str, shape: Shape, expected: Shape, dtype: str) -> None:
    if shape != expected:
        raise WeightsError(path, f"{name} has shape {list(shape)}, config.json implies {list(expected)}", _MATCH_REMEDY)
    if dtype not in _STORED_DTYPES:
        remedy = "use a checkpoint that is not quantized"
        raise WeightsError(path, f"{name} is stored as {dtype}; readable: {', '.join(_STORED_DTYPES)}", remedy)


def _some(names: list[str]) -> str:
    """Up to three names and how many more."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
