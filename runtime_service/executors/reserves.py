"""Memory of a GPU that is neither weights nor KV pages: what the largest step needs for a moment, and what graphs keep.

Before a model is loaded these are estimates, from the shapes that a step goes through. After loading, the largest step is run
once on the dummy page and its peak is measured (`profiling`); that of the graphs stays an estimate: they are captured last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime_service.executors.decode_graphs import default_buckets
from runtime_service.models.config import ModelConfig
from runtime_service.settings import RuntimeSettings

GATHER_NBYTES = 128 << 20
"""What the `torch` attention backend gathers at a time, and its mask: twice the limit of one gather."""

# Per launch of a captured step: its node and parameters, on the device and in the driver.
_GRAPH_NODE_NBYTES = 8 << 10
_LAUNCHES_PER_LAYER = 12
_LAUNCHES_PER_STEP = 10
# Of the sampler per logit of a row: scaled logits, sorted ones and their ids, probabilities and noise in float64.
_SAMPLER_NBYTES_PER_LOGIT = 4 + 4 + 8 + 3 * 8


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes that are kept free beside weights and KV pages."""

    activations: int
    graphs: int
    num_graphs: int
    measured: bool = False
    """Whether `activations` is the peak of a step that was run."""

    @property
    def nbytes(self) -> int:
        """Both together."""
        return self.activations + self.graphs


def estimate_reserve(
    settings: RuntimeSettings, config: ModelConfig, dtype: torch.dtype, device: torch.device, attention_backend: str
) -> Reserve:
    """Reserve of a model that is not loaded: a step of `max_step_tokens` tokens in as many rows as may be."""
    num_tokens = settings.max_step_tokens
    num_rows = min(settings.max_rows, num_tokens)
    activations = num_tokens * _nbytes_per_token(config, dtype)
    activations += num_rows * config.vocab_size * (dtype.itemsize + 4 + _SAMPLER_NBYTES_PER_LOGIT)
    if attention_backend == "torch":
        activations += GATHER_NBYTES
    buckets = graph_buckets(settings, device, attention_backend)
    graphs = 0
    if buckets:
        num_launches = _LAUNCHES_PER_LAYER * config.num_layers + _LAUNCHES_PER_STEP
        graphs = len(buckets) * num_launches * _GRAPH_NODE_NBYTES + buckets[-1] * _nbytes_per_token(config, dtype)
    return Reserve(activations, graphs, len(buckets))


def graph_buckets(settings: RuntimeSettings, device: torch.device, attention_backend: str) -> tuple[int, ...]:
    """Numbers of rows for which decode steps are captured; none where graphs are off or cannot be used.

    The `torch` backend gathers as many pages as the longest row has, which it asks the host: no captured step can.
    """
    if not settings.graphs or device.type != "cuda" or attention_backend != "triton":
        return ()
    return settings.graph_buckets or default_buckets(settings.max_rows)


def _nbytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of the layer that is being computed: residual, normed input, heads before and after rotation, MLP."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    elements = 3 * config.hidden_size + 2 * heads + config.num_heads * config.head_dim + 3 * config.intermediate_size
    return elements * dtype.itemsize + 2 * config.hidden_size * 4  # norms are computed in float32
