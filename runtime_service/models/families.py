"""The supported families, as data: what a decoder of each does differently from the others, and what their defaults are.

Defaults are those of the families' published configuration classes, for keys that config.json leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from runtime_service.models.config_reader import ConfigReader


class Window(Enum):
    """When a family's `sliding_window` counts."""

    NEVER = "never"  # the family knows none
    STATED = "stated"  # wherever it is not null
    SWITCHED = "switched"  # where use_sliding_window is true, for layers from max_window_layers on


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of config.json."""

    architecture: str
    model_type: str
    max_position: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool = False  # query, key and value projections always have a bias
    stated_bias: bool = False  # attention_bias and mlp_bias of config.json count, the former for the output projection as well
    qk_norm: bool = False  # query and key heads are normalised before rotation
    window: Window = Window.NEVER


FAMILIES = (
    Family("LlamaForCausalLM", "llama", 2048, stated_bias=True),  # Llama 2, 3, 3.x, SmolLM2
    Family("MistralForCausalLM", "mistral", 131072, window=Window.STATED),
    Family("Qwen2ForCausalLM", "qwen2", 32768, qkv_bias=True, window=Window.SWITCHED),  # Qwen2, Qwen2.5
    Family("Qwen3ForCausalLM", "qwen3", 32768, head_dim=128, stated_bias=True, qk_norm=True, window=Window.SWITCHED),
)
DEFAULT_WINDOW = 4096
_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_kind(reader: ConfigReader) -> Family:
    """The family of a description; refuses whatever would compute something else than it.

    Raises:
        UnsupportedModelError: another architecture, activation, or a quantized checkpoint.
    """
    architectures = reader.get("architectures")
    if architectures is None:
        key, value, name = "model_type", reader.get("model_type"), "model_type"
        known = [family.model_type for family in FAMILIES]
    else:
        key, value, name = "architectures", architectures, "architecture"
        known = [family.architecture for family in FAMILIES]
    wanted = value[0] if isinstance(value, list) and len(value) == 1 else value
    if wanted not in known:
        raise reader.unsupported(key, value, ", ".join(known))
    if reader.get("hidden_act", "silu") != "silu":
        raise reader.unsupported("hidden_act", reader.get("hidden_act"), "silu")
    if reader.get("quantization_config") is not None:
        method = reader.section("quantization_config")
        value = method.get("quant_method", "?") if method else "?"
        raise reader.unsupported("quantization_config", value, "weights in float32, bfloat16 or float16")
    return next(family for family in FAMILIES if getattr(family, name) == wanted)


def sliding_window(reader: ConfigReader, family: Family, num_layers: int) -> int | None:
    """How many tokens back, itself included, a token sees in some layer; None where all layers see everything.

    Raises:
        UnsupportedModelError: a window in a family that has none, or another kind of layer.
    """
    stated = reader.get("sliding_window")
    if family.window is Window.NEVER:
        if stated is not None:
            raise reader.unsupported("sliding_window", stated, "attention over the whole sequence")
        return None
    if family.window is Window.STATED:
        # A null means none; a key that is left out means the default.
        return reader.integer("sliding_window", DEFAULT_WINDOW) if "sliding_window" not in reader.data or stated else None
    if not reader.boolean("use_sliding_window", False):
        return None
    window = reader.integer("sliding_window", DEFAULT_WINDOW)
    layer_types = reader.get("layer_types")
    if layer_types is not None:
        unknown = [kind for kind in layer_types if kind not in _LAYER_TYPES] if isinstance(layer_types, list) else layer_types
        if unknown:
            raise reader.unsupported("layer_types", unknown, ", ".join(_LAYER_TYPES))
        return window if "sliding_attention" in layer_types else None
    return window if int(reader.get("max_window_layers", 28)) < num_layers else None
