"""Log probabilities of sampled tokens and of the most probable ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime_service.ops import Float32Array, Int32Array

NO_TOP_TOKEN = -1
"""Entry of `top_tokens` beyond what a row asked for."""


@dataclass(slots=True)
class Logprobs:
    """One entry per row of a batch of N, on the device; not-a-number and `NO_TOP_TOKEN` where a row did not ask."""

    logprobs: torch.Tensor  # float32 [N]
    top_tokens: torch.Tensor  # int32 [N, K], most probable first
    top_logprobs: torch.Tensor  # float32 [N, K]

    def spread(self, index: torch.Tensor, num_rows: int) -> Logprobs:
        """The same for a batch of `num_rows` of which these rows are the ones at `index`, int64 [N]; the others did not ask."""
        width = self.top_tokens.shape[1]
        logprobs = self.logprobs.new_full((num_rows,), torch.nan)
        top_tokens = self.top_tokens.new_full((num_rows, width), NO_TOP_TOKEN)
        top_logprobs = self.top_logprobs.new_full((num_rows, width), torch.nan)
        logprobs[index], top_tokens[index], top_logprobs[index] = self.logprobs, self.top_tokens, self.top_logprobs
        return Logprobs(logprobs, top_tokens, top_logprobs)

    def to_host(self) -> tuple[Float32Array, Int32Array, Float32Array]:
        """The three columns as they are in `StepResult`; waits for the device."""
        return self.logprobs.cpu().numpy(), self.top_tokens.cpu().numpy(), self.top_logprobs.cpu().numpy()


def compute_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: torch.Tensor, width: int) -> Logprobs:
    """Log-softmax of the logits, at the tokens and at the most probable ids; of equal ones the smaller id comes first.

    Args:
        logits: float32 [N, vocab], finite.
        tokens: int64 [N].
        num_top: int64 [N], entries wanted of each row, 0 and more.
        width: K, at least the largest of `num_top`.
    """
    values = logits.log_softmax(dim=-1)
    own = values.gather(1, tokens[:, None])[:, 0]
    top_tokens = torch.full((len(logits), width), NO_TOP_TOKEN, dtype=torch.int32, device=logits.device)
    top_logprobs = torch.full((len(logits), width), torch.nan, device=logits.device)
    count = min(width, logits.shape[1])
    if count:
        ids = _most_probable(logits, count)
        beyond = torch.arange(count, device=logits.device) >= num_top[:, None]
        top_tokens[:, :count] = ids.to(torch.int32).masked_fill(beyond, NO_TOP_TOKEN)
        top_logprobs[:, :count] = values.gather(1, ids).masked_fill(beyond, torch.nan)
    return Logprobs(own, top_tokens, top_logprobs)


def _most_probable(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids int64 [N, count] of the greatest logits, a tie going to the smaller id; `topk` alone leaves ties open.

    Each float32 becomes the integer of the same order, with the id below it: all keys differ.
    """
    bits = (logits + 0.0).view(torch.int32)  # the sum makes -0 and 0 one
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logits.shape[1] - 1
    keys = (ordered << 32) + (last - torch.arange(logits.shape[1], device=logits.device))
    return last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
