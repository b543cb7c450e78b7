"""Reading safetensors: every tensor of the model and no other, from one file or several, whatever dtype it is stored in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runtime_service.models import weights as weights_module
from runtime_service.models.config import ModelConfig
from runtime_service.models.errors import WeightsError
from runtime_service.models.tiny import tiny_tensors
from runtime_service.models.weights import DecoderWeights, assemble, expected_tensors, load_weights

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position=32,
)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def all_tensors(weights: DecoderWeights) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        found += [getattr(layer, name) for name in layer.__slots__]
    return found


def assert_same(left: DecoderWeights, right: DecoderWeights) -> None:
    for one, other in zip(all_tensors(left), all_tensors(right), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return tiny_tensors(CONFIG)


def test_expected_names_and_shapes() -> None:
    """Names are those of the published checkpoints; head_dim, not hidden_size, sets the width of attention."""
    expected = expected_tensors(CONFIG)
    assert expected[Q_PROJ] == (24, 8)
    assert expected["model.layers.0.self_attn.k_proj.weight"] == (12, 8)
    assert expected["model.layers.0.self_attn.o_proj.weight"] == (8, 24)
    assert expected["model.layers.1.mlp.down_proj.weight"] == (8, 12)
    assert expected["lm_head.weight"] == (11, 8)
    assert len(expected) == 3 + 2 * 9
    assert "lm_head.weight" not in expected_tensors(replace(CONFIG, tie_word_embeddings=True))
    biased = expected_tensors(replace(CONFIG, qkv_bias=True, out_bias=True, mlp_bias=True))
    assert {name for name in biased if name.startswith("model.layers.0.") and name.endswith("bias")} == {
        f"model.layers.0.{part}.bias"
        for part in (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }


def test_assembled_layout(tensors: dict[str, torch.Tensor]) -> None:
    """Query, key and value are stacked in this order, gate before up; a tied head is the embedding itself."""
    weights = assemble(CONFIG, tensors.__getitem__)
    layer = weights.layers[1]
    assert layer.qkv.shape == (48, 8)
    assert torch.equal(layer.qkv[24:36], tensors["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(layer.gate_up[:12], tensors["model.layers.1.mlp.gate_proj.weight"])
    assert layer.qkv_bias is None
    tied = assemble(replace(CONFIG, tie_word_embeddings=True), tensors.__getitem__)
    assert tied.head is tied.embedding


def test_one_file_and_several(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """An index and its files give the same weights as one file, and stray files beside an index are not looked at."""
    (tmp_path / "one").mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    several = tmp_path / "several"
    several.mkdir()
    names = list(tensors)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:8], "c.safetensors": names[8:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, several / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (several / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (several / "consolidated.safetensors").write_bytes(b"not looked at")
    expected = assemble(CONFIG, tensors.__getitem__)
    assert_same(load_weights(tmp_path / "one", CONFIG), expected)
    assert_same(load_weights(several, CONFIG), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path: Path, tensors: dict[str, torch.Tensor], stored: torch.dtype, wanted: torch.dtype) -> None:
    """Whatever float the checkpoint is stored in, the weights come in the dtype asked for."""
    rounded = {name: tensor.to(stored) for name, tensor in tensors.items()}
    save_file(rounded, tmp_path / "model.safetensors")
    weights = load_weights(tmp_path, CONFIG, dtype=wanted)
    assert {tensor.dtype for tensor in all_tensors(weights) if tensor is not None} == {wanted}
    assert torch.equal(weights.layers[0].out, rounded["model.layers.0.self_attn.o_proj.weight"].to(wanted))


def test_tensors_that_are_no_weights(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Stored rotary frequencies are passed over; a stored head is taken beside tied embeddings when it is the same."""
    tied = replace(CONFIG, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load_weights(tmp_path, tied)
    assert weights.head is weights.embedding
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs .* tie_word_embeddings to false"):
        load_weights(tmp_path, tied)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[Q_PROJ], tensors["model.norm.weight"]


def drop_many(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "layers.1" in name]:
        del tensors[name]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(12, 8)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q_PROJ] = torch.zeros(8, 24)


def quantize(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop, f"lacks {Q_PROJ}, model.norm.weight. What to do: fetch all files"),
        (drop_many, "and 6 more"),
        (add, "has model.layers.2.mlp.up_proj.weight, which this model does not use. What to do: use the config.json"),
        (reshape, f"{Q_PROJ} has shape [8, 24], config.json implies [24, 8]"),
        (quantize, f"{Q_PROJ} is stored as I8; readable: F32, BF16, F16. What to do: use a checkpoint that is not quantized"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, tensors: dict[str, torch.Tensor], change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    """A tensor that is missing, extra, of another shape or no float is named, with the remedy."""
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        load_weights(tmp_path, CONFIG)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """No weights, other formats, a Git LFS pointer and bad indices are told apart."""
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors nor .*What to do: fetch the safetensors"):
        load_weights(tmp_path, CONFIG)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"it has pytorch_model\.bin"):
        load_weights(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(WeightsError, match=r"model\.safetensors: is no safetensors file .*git lfs pull"):
        load_weights(tmp_path, CONFIG)
    index = tmp_path / "model.safetensors.index.json"
    for content, words in (
        ("{}", "is no index"),
        (
            '{"weight_map": {"x": "../model.safetensors"}}',
            r"names '\.\./model\.safetensors', which is no file of this directory",
        ),
        ('{"weight_map": {"x": "gone.safetensors"}}', r"has no gone\.safetensors, which model\.safetensors\.index\.json names"),
    ):
        index.write_text(content)
        with pytest.raises(WeightsError, match=words):
            load_weights(tmp_path, CONFIG)
    for name in ("a.safetensors", "b.safetensors"):
        save_file(tensors, tmp_path / name)
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(WeightsError, match=r"is in a\.safetensors as well"):
        load_weights(tmp_path, CONFIG)


def test_read_once_and_to_the_device(tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are opened for the device that computes, and each tensor is read from them once, when its layer is assembled."""
    save_file(tensors, tmp_path / "model.safetensors")
    opened: list[tuple[str, str]] = []
    read: list[str] = []

    class Recorder:
        def __init__(self, path: Path, framework: str, device: str) -> None:
            opened.append((path.name, device))
            self._file = safe_open(path, framework=framework, device="cpu")

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(weights_module, "safe_open", Recorder)
    load_weights(tmp_path, CONFIG, device="cuda:1")
    assert opened == [("model.safetensors", "cpu"), ("model.safetensors", "cuda:1")]
    assert read == list(expected_tensors(CONFIG))
