"""The Llama decoder in plain torch: RMSNorm, rotary embedding, grouped-query attention over KV pages, SwiGLU.

Follows "LLaMA: Open and Efficient Foundation Language Models" (Touvron et al., 2023), "RoFormer" (Su et al., 2021) for the
rotary embedding in its half-split form, and the frequency scaling that Meta published with Llama 3.1. Rounding steps are
placed where transformers places them, so that logits agree with its in float32 to about 1e-5.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import linear, rms_norm, silu

from runtime_service.forward_batch import ForwardBatch
from runtime_service.kv_cache import PagedKVCache
from runtime_service.models.attention import attend, plan_attention
from runtime_service.models.config import ModelConfig, RopeConfig
from runtime_service.models.weights import LlamaWeights


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of elements of a head, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        # 0 at the longest wavelength that is still scaled whole, 1 at the shortest one that is left alone.
        low, high = rope.low_freq_factor, rope.high_freq_factor
        blend = ((rope.original_max_position / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies


class LlamaDecoder:
    """A decoder with its weights.

    Attributes:
        config: its shape.
        weights: of one dtype, on one device; KV caches given to `forward` are of the same.
    """

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self.weights = weights
        self._frequencies = rope_frequencies(config.rope, config.head_dim).to(weights.embedding.device)

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """Computes one step and writes its keys and values.

        Args:
            batch: T tokens of R rows.
            cache: read and written at slots of the batch's pages only.

        Returns:
            Hidden states [T, hidden_size] after the final norm, in the weights' dtype.
        """
        config, weights = self.config, self.weights
        num_rotated = config.num_heads + config.num_kv_heads
        plan = plan_attention(batch)
        cos, sin = self._rotation(batch.positions, weights.embedding.dtype)
        hidden = weights.embedding[batch.input_ids]
        for index, layer in enumerate(weights.layers):
            qkv = linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
            heads = qkv.view(len(qkv), -1, config.head_dim)  # [T, query, key and value heads, head_dim]
            rotated = _rotate(heads[:, :num_rotated], cos, sin)
            cache.write(index, batch.out_cache_loc, rotated[:, config.num_heads :], heads[:, num_rotated:])
            mixed = attend(plan, cache, index, rotated[:, : config.num_heads])
            hidden = hidden + linear(mixed, layer.out, layer.out_bias)
            gate, up = linear(self._norm(hidden, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer.down, layer.down_bias)
        return self._norm(hidden, weights.final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states `[N, hidden_size]`, float32 [N, vocab_size]."""
        return linear(hidden, self.weights.head).float()

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if hidden.dtype == torch.float32:
            return rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)
        # The published model rounds before the weight is applied, not after.
        return weight * rms_norm(hidden.float(), weight.shape, None, self.config.rms_norm_eps).to(hidden.dtype)

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for these positions, each [T, 1, head_dim] (the half repeated)."""
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `[T, heads, head_dim]`: element i is paired with element i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
