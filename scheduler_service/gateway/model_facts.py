"""What a gateway is told of the model, and what a request gets for parameters that it leaves out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from scheduler_service.gateway.engine import EngineInfo
from scheduler_service.gateway.tokenizer_files import TokenizerFiles
from scheduler_service.settings import GREEDY_ONLY_ARCHITECTURE

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`defaults` are sampling parameters that the model's own files name, or that it needs."""

    tokenizer_path: str
    vocab_size: int
    default_stop_ids: tuple[int, ...]
    model_type: str
    architectures: list[str]
    pad_token_id: int
    bos_token_id: int
    dtype: str
    defaults: dict[str, float]

    @property
    def defaults_json(self) -> str:
        """For a gateway, which fills them in; empty where there are none."""
        return json.dumps(self.defaults) if self.defaults else ""


async def read_facts(info: EngineInfo, files: TokenizerFiles) -> ModelFacts:
    """From what the runtime says and what lies beside the tokenizer, if that is on this machine."""
    config = await files.config(info.tokenizer_path, "config.json")
    generation = await files.config(info.tokenizer_path, "generation_config.json")
    defaults = {name: generation[name] for name in _SAMPLING if _is_number(generation.get(name))}
    if info.architecture == GREEDY_ONLY_ARCHITECTURE:
        defaults = {"temperature": 0.0}
    architectures = config.get("architectures")
    return ModelFacts(
        tokenizer_path=files.path(info.tokenizer_path),
        vocab_size=info.vocab_size,
        default_stop_ids=info.default_stop_ids,
        model_type=str(config.get("model_type", "")),
        architectures=[str(name) for name in architectures] if isinstance(architectures, list) else [info.architecture],
        pad_token_id=_token(config.get("pad_token_id")),
        bos_token_id=_token(config.get("bos_token_id")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        defaults=defaults,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _token(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else 0
