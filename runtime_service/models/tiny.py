"""`--model tiny`: a seeded two-layer Llama over bytes. It needs no file and no download, and has no knowledge whatever.

For tests and for trying the engine out: token ids 0 ... 255 are bytes, then three specials. Its text is noise, but every
token depends on all tokens before it, so a stale or foreign page changes the output.
"""

from __future__ import annotations

import torch

from runtime_service.models.config import ModelConfig
from runtime_service.models.weights import DecoderWeights, assemble, expected_tensors

BEGIN_ID, END_ID, PAD_ID = 256, 257, 258
"""Special tokens after the 256 bytes. Their logits are 0, far below the best byte's: greedy decoding never samples them."""

TINY_CONFIG = ModelConfig(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=4096,
    stop_ids=(END_ID,),
    dtype="float32",
)

# Standard deviations of weights, times 1 / sqrt(inputs). Above 1 for queries and keys, so that attention picks tokens out
# instead of averaging over all of them, and the sequence does not settle on one token.
_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 4.0}


def tiny_tensors(config: ModelConfig = TINY_CONFIG, seed: int = 20) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint of this shape, float32, the same for the same seed.

    Works for any configuration; specials are silenced only in that of `TINY_CONFIG`'s vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.1 * noise
        elif name.endswith(".bias"):
            tensors[name] = 0.1 * noise
        elif name.startswith("model.embed_tokens"):
            tensors[name] = noise
        else:
            gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
            tensors[name] = noise * (gain / shape[1] ** 0.5)
    if config is TINY_CONFIG:
        tensors["lm_head.weight"][BEGIN_ID:] = 0.0
    return tensors


def tiny_weights(*, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> DecoderWeights:
    """Weights of `TINY_CONFIG`."""
    tensors = tiny_tensors()
    return assemble(TINY_CONFIG, lambda name: tensors[name].to(device=device, dtype=dtype))
