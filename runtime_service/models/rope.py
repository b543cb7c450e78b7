"""Rotary position embedding: the frequencies of the supported scalings, and the rotation."""

from __future__ import annotations

import math

import torch

from runtime_service.models.config import RopeConfig


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


def rotation(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions int64 [T], each [T, 1, head_dim / 2]; the angle is computed in float32."""
    angles = (positions[:, None].float() * frequencies)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates heads `[T, heads, head_dim]` in place: element i is paired with element i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    first_sin, second_sin = first * sin, second * sin
    first.mul_(cos).sub_(second_sin)
    second.mul_(cos).add_(first_sin)
