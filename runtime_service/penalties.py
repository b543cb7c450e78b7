"""Which tokens each row has seen, and what that takes from their logits.

A row is counted only while a request with a penalty holds it. Its tokens come from three places: `LeaseStart.history`, which
has those that no op of the lease computes; the inputs of its extend rows; and what is sampled for it. Each position counts
once, so the counts are those of the text itself, whatever chunks, cached prefixes, retractions and resumes it went through.

Everything is done on the device: a step's penalties see the token that the step before sampled without the host's help.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import BoolArray, LeaseStart
from runtime_service.upload import upload

Int64Array = npt.NDArray[np.int64]

BYTES_PER_TOKEN_ID = 5
"""Of each row and token id: whether it is in the prompt (1 byte), how often it is in the output (4 bytes)."""


class PenaltyCounts:
    """Counts and penalties of every row.

    Memory: none before the first penalty; then `BYTES_PER_TOKEN_ID * vocab_size` on the device for each row number up to the
    highest that had one, rounded up to a power of two. For a vocabulary of 49,152 that is 240 KiB a row, 60 MiB at 256 rows.
    `reset` gives it back.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        size = max_rows + 1
        self._max_size = size
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._in_prompt: torch.Tensor | None = None  # bool [rows, vocab]
        self._in_output: torch.Tensor | None = None  # int32 [rows, vocab]
        # repetition, presence, frequency; float32, in which the wire states them
        self._penalties = np.tile(np.array([[1.0], [0.0], [0.0]], dtype=np.float32), size)
        self._prompt_lens: Int64Array = np.zeros(size, dtype=np.int64)
        self._counted: Int64Array = np.zeros(size, dtype=np.int64)  # tokens [0, counted) are counted

    @property
    def num_bytes(self) -> int:
        """Device memory held; 0 until a penalty was on."""
        return sum(t.numel() * t.element_size() for t in (self._in_prompt, self._in_output) if t is not None)

    def start_leases(self, leases: list[LeaseStart]) -> None:
        """Begins to count rows whose requests have a penalty."""
        rows = np.array([lease.req_pool_index for lease in leases], dtype=np.int64)
        in_prompt, in_output = self._reserve(int(rows.max()) + 1)
        device_rows = self._to_device(rows)
        in_prompt.index_fill_(0, device_rows, False)
        in_output.index_fill_(0, device_rows, 0)
        for lease in leases:
            params = lease.sampling
            values = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            self._penalties[:, lease.req_pool_index] = values
        self._prompt_lens[rows] = [lease.prompt_len for lease in leases]
        self._counted[rows] = 0
        lens = np.array([len(lease.history) // 4 for lease in leases], dtype=np.int64)
        if lens.any():
            tokens = np.frombuffer(b"".join(lease.history for lease in leases), dtype="<i4").astype(np.int64)
            self._count(np.repeat(rows, lens), _ranges(lens), self._to_device(tokens))
        self._counted[rows] = lens

    def count_inputs(self, batch: ForwardBatch, penalised: BoolArray) -> None:
        """Counts what this step computes of known tokens.

        Args:
            batch: the step.
            penalised: bool [num_extend_rows], its extend rows that are counted.
        """
        num_extend = batch.num_extend_rows
        rows = batch.host_rows[:num_extend].astype(np.int64)
        lens = batch.host_input_lens[:num_extend].astype(np.int64)
        begins = batch.host_num_computed[:num_extend].astype(np.int64)
        positions = _ranges(lens) + np.repeat(begins, lens)
        token_rows = np.repeat(rows, lens)
        wanted = np.flatnonzero(np.repeat(penalised, lens) & (positions >= self._counted[token_rows]))
        self._count(token_rows[wanted], positions[wanted], batch.input_ids[self._to_device(wanted)])
        ends = begins + lens
        self._counted[rows[penalised]] = np.maximum(self._counted[rows[penalised]], ends[penalised])

    def count_sampled(self, rows: Int64Array, positions: Int64Array, tokens: torch.Tensor, finite: torch.Tensor) -> None:
        """Counts tokens as soon as they are chosen; one that is not `finite` is none.

        Args:
            rows: row numbers [M], each with a penalty.
            positions: int64 [M], the absolute positions of the tokens.
            tokens: int64 [M].
            finite: bool [M].
        """
        assert self._in_output is not None
        self._in_output.index_put_((self._to_device(rows), tokens), finite.to(torch.int32), accumulate=True)
        self._counted[rows] = positions + 1

    def apply(self, logits: torch.Tensor, rows: Int64Array) -> torch.Tensor:
        """Logits float32 [M, vocab] of rows with a penalty after repetition, frequency and presence penalty, in this order.

        They stay finite where they were finite: what would overflow becomes the greatest or least float32.
        """
        assert self._in_prompt is not None
        assert self._in_output is not None
        device_rows = self._to_device(rows)
        repetition, presence, frequency = self._to_device(self._penalties[:, rows])[:, :, None].unbind()
        counts = self._in_output[device_rows]
        in_output = counts > 0
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self._in_prompt[device_rows] | in_output, penalised, logits)
        logits = logits - frequency * counts - presence * in_output
        limits = torch.finfo(torch.float32)
        return logits.clamp_(limits.min, limits.max)

    def counts(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one row: bool [vocab] which ids are in its prompt, int32 [vocab] how often each is in its output."""
        assert self._in_prompt is not None
        assert self._in_output is not None
        return self._in_prompt[row], self._in_output[row]

    def reset(self) -> None:
        """Forgets all rows and gives the memory back."""
        self._in_prompt = self._in_output = None

    def _reserve(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes room for row numbers below `num_rows`, keeping what is there."""
        old_prompt, old_output = self._in_prompt, self._in_output
        if old_prompt is not None and old_output is not None and len(old_prompt) >= num_rows:
            return old_prompt, old_output
        shape = (min(1 << (num_rows - 1).bit_length(), self._max_size), self._vocab_size)
        in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        in_output = torch.zeros(shape, dtype=torch.int32, device=self._device)
        if old_prompt is not None and old_output is not None:
            in_prompt[: len(old_prompt)] = old_prompt
            in_output[: len(old_output)] = old_output
        self._in_prompt, self._in_output = in_prompt, in_output
        return in_prompt, in_output

    def _count(self, rows: Int64Array, positions: Int64Array, tokens: torch.Tensor) -> None:
        """Counts tokens int64 [T], each with its row number and its absolute position."""
        assert self._in_prompt is not None
        assert self._in_output is not None
        of_output = positions >= self._prompt_lens[rows]
        prompt, output = np.flatnonzero(~of_output), np.flatnonzero(of_output)
        if len(prompt):
            where = (self._to_device(rows[prompt]), tokens[self._to_device(prompt)])
            self._in_prompt.index_put_(where, torch.ones((), dtype=torch.bool, device=self._device))
        if len(output):
            where = (self._to_device(rows[output]), tokens[self._to_device(output)])
            self._in_output.index_put_(where, torch.ones((), dtype=torch.int32, device=self._device), accumulate=True)

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return upload(values, self._device)


def _ranges(lens: Int64Array) -> Int64Array:
    """0, 1, …, len - 1 for each of the lengths, concatenated."""
    return np.arange(int(lens.sum())) - np.repeat(np.cumsum(lens) - lens, lens)
