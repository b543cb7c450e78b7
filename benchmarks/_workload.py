"""What every party of the benchmark is given: one seeded model on disk, and seeded requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

THREADS = 2
NUM_PAGES = 2048
MAX_ROWS = 64
TOKEN_BUDGET = 2048
VOCAB_SIZE = 4096
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
}
LENGTHS = ("equal", "mixed")
EQUAL_PROMPT, EQUAL_NEW = 128, 64
MIXED_PROMPT, MIXED_NEW = (32, 128), (8, 64)  # inclusive


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt and how many tokens it is to return."""

    prompt: list[int]
    num_new: int


@dataclass(frozen=True, slots=True)
class Case:
    """One workload of the benchmark."""

    lengths: str
    num_requests: int

    @property
    def name(self) -> str:
        return f"{self.lengths}-{self.num_requests}"

    def jobs(self) -> list[Job]:
        """The same requests in every process: drawn from a seed that depends on the case alone."""
        rng = np.random.default_rng([LENGTHS.index(self.lengths), self.num_requests])  # noqa: TID251  (seeded data, not the product)
        jobs = []
        for _ in range(self.num_requests):
            if self.lengths == "equal":
                prompt_len, num_new = EQUAL_PROMPT, EQUAL_NEW
            else:
                prompt_len = int(rng.integers(MIXED_PROMPT[0], MIXED_PROMPT[1], endpoint=True))
                num_new = int(rng.integers(MIXED_NEW[0], MIXED_NEW[1], endpoint=True))
            jobs.append(Job(rng.integers(0, VOCAB_SIZE, prompt_len).tolist(), num_new))
        return jobs

    @classmethod
    def parse(cls, name: str) -> Case:
        lengths, _, num_requests = name.partition("-")
        return cls(lengths, int(num_requests))


def make_model(folder: Path) -> None:
    """Write a Llama with seeded random weights as a Hugging Face directory. No token ends an output."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False, dtype="float32")
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    model.save_pretrained(folder)
