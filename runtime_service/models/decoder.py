"""The decoder of all supported families in plain torch: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Follows "LLaMA: Open and Efficient Foundation Language Models" (Touvron et al., 2023), "RoFormer" (Su et al., 2021) for the
rotary embedding in its half-split form, and the frequency scaling that Meta published with Llama 3.1. What a family does
differently is data: biases (Qwen2) and norms of query and key heads (Qwen3) are weights that others do not have. Rounding steps
are placed where transformers places them, so that logits agree with its in float32 to about 1e-5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import rms_norm, silu

from runtime_service.forward_batch import ForwardBatch
from runtime_service.kv_cache import PagedKVCache
from runtime_service.models.attention import plan_attention
from runtime_service.models.config import ModelConfig
from runtime_service.models.rope import rope_frequencies, rotate_, rotation
from runtime_service.models.weights import DecoderWeights

if TYPE_CHECKING:
    from runtime_service.kernels.decode_attention import DecodeWorkspace


class Scratch:
    """Memory for intermediate results of a step on a CPU, used again by every layer and step.

    Fresh memory of a prefill's size comes from the system page by page, which costs as much as the product that fills it. On a
    GPU nothing is kept: its allocator keeps memory itself, and captured graphs must not share any with other steps.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._keep = device.type == "cpu"
        self._dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor | None:
        """A matrix of undefined content, the same memory each time for one name; None where the operation should allocate."""
        if not self._keep:
            return None
        size = num_rows * num_columns
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype)
        return buffer[:size].view(num_rows, num_columns)


class Decoder:
    """A decoder with its weights.

    Attributes:
        config: its shape.
        weights: of one dtype, on one device; KV caches given to `forward` are of the same.
        attention_backend: one of `runtime_service.models.attention.BACKENDS`.
        workspace: memory of the decode kernel for captured launches, or None.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, attention_backend: str = "torch") -> None:
        self.config = config
        self.weights = weights
        self.attention_backend = attention_backend
        self.workspace: DecodeWorkspace | None = None
        self._frequencies = rope_frequencies(config.rope, config.head_dim).to(weights.embedding.device)
        self._scratch = Scratch(weights.embedding.dtype, weights.embedding.device)

    def forward(self, batch: ForwardBatch, cache: PagedKVCache, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Computes one step and writes its keys and values.

        Args:
            batch: T tokens of R rows, R at least 1.
            cache: read and written at slots of the batch's pages only.
            wanted: int64 [N], the tokens whose hidden states are asked for; None: all of them.

        Returns:
            Hidden states [N or T, hidden_size] before the final norm, in the weights' dtype.
        """
        config, weights = self.config, self.weights
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        plan = plan_attention(batch, cache, self.attention_backend, self.workspace)
        cos, sin = rotation(batch.positions, self._frequencies, weights.embedding.dtype)
        hidden = weights.embedding.index_select(0, batch.input_ids)
        for index, layer in enumerate(weights.layers):
            qkv = self._linear("qkv", self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
            heads = qkv.view(len(qkv), -1, config.head_dim)  # [T, query, key and value heads, head_dim]
            if layer.query_norm is not None and layer.key_norm is not None:
                heads[:, :num_heads] = self._norm(heads[:, :num_heads], layer.query_norm)
                heads[:, num_heads:num_rotated] = self._norm(heads[:, num_heads:num_rotated], layer.key_norm)
            rotate_(heads[:, :num_rotated], cos, sin)
            plan.write(cache, index, heads[:, num_heads:num_rotated], heads[:, num_rotated:])
            mixed = plan.attend(cache, index, heads[:, :num_heads]).flatten(1)
            if wanted is not None and index == config.num_layers - 1:
                # The last layer's keys and values are written; nobody needs anything else of the other tokens.
                mixed, hidden = mixed.index_select(0, wanted), hidden.index_select(0, wanted)
            hidden += self._linear("out", mixed, layer.out, layer.out_bias)
            gate_up = self._linear("gate_up", self._norm(hidden, layer.post_norm), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, dim=-1)
            hidden += self._linear("down", silu(gate, inplace=True).mul_(up), layer.down, layer.down_bias)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states `[N, hidden_size]` of `forward`, float32 [N, vocab_size]."""
        normed = self._norm(hidden, self.weights.final_norm)
        return torch.mm(normed, self.weights.head.t()).float()

    def _linear(self, name: str, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`inputs @ weight.T + bias` in scratch memory, valid until the next call of the same name."""
        out = self._scratch.take(name, len(inputs), len(weight))
        if bias is None:
            return torch.mm(inputs, weight.t(), out=out)
        return torch.addmm(bias, inputs, weight.t(), out=out)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension."""
        eps = self.config.rms_norm_eps
        if hidden.device.type == "cpu":
            # There rms_norm is a sequence of whole-size operations; a norm needs no square of everything.
            floats = hidden.float()
            norm: torch.Tensor = torch.linalg.vector_norm(floats, dim=-1, keepdim=True)
            normed: torch.Tensor = floats * norm.square_().div_(len(weight)).add_(eps).rsqrt_()
        else:
            normed = rms_norm(hidden, weight.shape, None, eps)  # one kernel, which computes in float32
        # The published models round before the weight is applied, not after.
        return normed.to(hidden.dtype).mul_(weight)
