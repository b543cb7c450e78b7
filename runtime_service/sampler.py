"""Choosing tokens from logits: bias, penalties, minimum length; then the greatest, or a draw with a seed for each request.

A draw must not depend on who else is in the batch, nor on how often the request was retracted. It therefore takes its random
numbers from a function of (seed, absolute position, token id) instead of from a generator with state: splitmix64 (Steele, Lea,
Flood, 2014) as a counter-based hash. It uses them as Gumbel noise: the token with the greatest `logit / temperature + noise` is
a draw from the softmax (Gumbel, 1954; Maddison et al., 2014). Noise that belongs to a token id, not to a rank or an interval,
also means that the last digits of logits, which do depend on the batch, change a draw only where two scores all but tie.

One number per row says what its request asked for, so a batch in which nobody asked for anything is one `max`.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.forward_batch import ForwardBatch
from runtime_service.logprobs import Logprobs, compute_logprobs
from runtime_service.ops import Int32Array, LeaseStart, SamplingParams
from runtime_service.penalties import PenaltyCounts
from runtime_service.upload import upload

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# Keeps logits / temperature finite in float32; far below the least difference between two logits that matters.
_MIN_TEMPERATURE = 1e-30

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]


def _mix64(x: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64, on the host."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def stream_keys(seeds: UInt64Array, positions: Int64Array) -> Int64Array:
    """One key per (seed, position) pair, int64 [N] with the bits of a uint64; all noise of a draw follows from its key."""
    golden = np.uint64(_GOLDEN)
    return _mix64(_mix64(seeds + golden) + positions.astype(np.uint64) * golden).view(np.int64)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of token ids: the splitmix64 stream that starts at the key, read at the token id.

    Args:
        keys: int64 [N] of `stream_keys`.
        token_ids: int64 [V], or [N, V] for other ids in each row.

    Returns:
        float64 [N, V], finite.
    """
    x = keys[:, None] + (token_ids + 1) * _signed(_GOLDEN)  # int64 products wrap, as the hash wants
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift_right(x, 31)
    # 52 bits, so that the half still fits into the 53 of a double: uniform is never 0 and never 1.
    uniform = (_shift_right(x, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift of int64 as if unsigned; torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class Feature(IntFlag):
    """What a row's request asks for besides the greatest logit."""

    RANDOM = 1
    BIAS = 2
    PENALTY = 4
    MINIMUM = 8
    LOGPROBS = 16

    @classmethod
    def of(cls, lease: LeaseStart) -> Feature:
        """What one lease asks for."""
        params = lease.sampling
        feature = cls(0)
        if params.temperature > 0:
            feature |= cls.RANDOM
        if params.logit_bias:
            feature |= cls.BIAS
        if params.has_penalty:
            feature |= cls.PENALTY
        if params.min_new_tokens and lease.stop_ids:
            feature |= cls.MINIMUM
        if params.num_logprobs is not None:
            feature |= cls.LOGPROBS
        return feature


class Sampler:
    """Sampling parameters of every row, and the choice of one token per row of a batch.

    Args:
        max_rows: row numbers are 1 ... max_rows.
        vocab_size: width of the logits.
        device: where they lie.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        size = max_rows + 1
        self._features: npt.NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
        self._temperature = np.zeros(size)
        self._top_k: Int64Array = np.zeros(size, dtype=np.int64)
        self._top_p = np.ones(size)
        self._min_p = np.zeros(size)
        self._seed: UInt64Array = np.zeros(size, dtype=np.uint64)
        # Position from which the row's stop ids may be sampled.
        self._stop_from: Int64Array = np.zeros(size, dtype=np.int64)
        self._stop_ids: dict[int, Int64Array] = {}
        self._bias: dict[int, tuple[Int64Array, npt.NDArray[np.float32]]] = {}  # token ids and what is added to their logits
        self._num_logprobs: Int64Array = np.full(size, -1, dtype=np.int64)
        self.penalties = PenaltyCounts(max_rows, vocab_size, device)
        """Holds no memory until a request has a penalty."""

    def start_leases(self, leases: list[LeaseStart]) -> None:
        """Takes the parameters of the requests that begin a lease."""
        for lease in leases:
            row, params = lease.req_pool_index, lease.sampling
            self._forget(row)
            feature = Feature.of(lease)
            self._features[row] = feature
            self._temperature[row] = params.temperature
            # Beyond any vocabulary where there is no limit.
            self._top_k[row] = np.iinfo(np.int64).max if params.top_k is None else params.top_k
            self._top_p[row] = params.top_p
            self._min_p[row] = params.min_p
            self._seed[row] = np.uint64(params.seed)
            self._num_logprobs[row] = -1 if params.num_logprobs is None else params.num_logprobs
            if feature & Feature.MINIMUM:
                self._stop_from[row] = lease.prompt_len + params.min_new_tokens
                self._stop_ids[row] = np.asarray(lease.stop_ids, dtype=np.int64)
            if feature & Feature.BIAS:
                self._bias[row] = _bias_columns(params)
        penalised = [lease for lease in leases if lease.sampling.has_penalty]
        if penalised:
            self.penalties.start_leases(penalised)

    def release_rows(self, rows: Int32Array) -> None:
        """Forgets these rows: they are greedy until their next lease."""
        if self._features[rows].any():
            for row in rows.tolist():
                self._forget(row)

    def reset(self) -> None:
        """Forgets all rows."""
        self._features[:] = 0
        self._stop_ids.clear()
        self._bias.clear()
        self.penalties.reset()

    def _forget(self, row: int) -> None:
        self._features[row] = 0
        self._stop_ids.pop(row, None)
        self._bias.pop(row, None)

    def count_inputs(self, batch: ForwardBatch) -> None:
        """Counts the known tokens that a step computes, for penalties; comes before the step's `choose`."""
        if batch.num_extend_rows:
            penalised = self._features[batch.host_rows[: batch.num_extend_rows]] & Feature.PENALTY != 0
            if penalised.any():
                self.penalties.count_inputs(batch, penalised)

    def sample(
        self, logits: torch.Tensor, rows: npt.NDArray[np.integer], positions: Int64Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`choose` without log probabilities."""
        tokens, finite, _ = self.choose(logits, rows, positions)
        return tokens, finite

    def choose(
        self, logits: torch.Tensor, rows: npt.NDArray[np.integer], positions: Int64Array
    ) -> tuple[torch.Tensor, torch.Tensor, Logprobs | None]:
        """Chooses one token for each row; rows are independent of each other, bit for bit given the same logits.

        Args:
            logits: float32 [N, vocab]; not changed.
            rows: row numbers [N].
            positions: int64 [N], the absolute position that the sampled token will have, which is also the number of tokens
                before it.

        Returns:
            Tokens int64 [N]; bool [N] whether all logits of the row were finite; and log probabilities, None when no row
            asked. What is said of a row that has logits that are not finite means nothing. Log probabilities are those of the
            logits after bias and penalties, before stop ids are left out and before temperature and truncation.
        """
        features = self._features[rows]
        present = int(np.bitwise_or.reduce(features)) if len(features) else 0
        given = logits
        # One pass for the greedy choice (the first of equal ones) and half of the check: on a CPU `argmax` and `aminmax` take
        # several times as long each. Both bounds are not-a-number where any logit is.
        high, greatest = logits.max(dim=-1)
        finite = torch.isfinite(high) & torch.isfinite(logits.amin(dim=-1))
        if present & Feature.BIAS:
            logits = self._with_bias(logits, rows, np.flatnonzero(features & Feature.BIAS))
        penalised = np.flatnonzero(features & Feature.PENALTY) if present & Feature.PENALTY else None
        if penalised is not None:
            index = upload(penalised, logits.device)
            changed = self.penalties.apply(logits[index], rows[penalised].astype(np.int64))
            logits = logits.index_copy(0, index, changed)
        model_logits = logits
        if present & Feature.MINIMUM:
            waiting = np.flatnonzero((features & Feature.MINIMUM != 0) & (positions < self._stop_from[rows]))
            if len(waiting):
                logits = self._without_stop_ids(logits, rows, waiting)
        tokens = greatest if logits is given else logits.argmax(dim=-1)
        if present & Feature.RANDOM:
            random = features & Feature.RANDOM != 0
            truncated = (self._top_k[rows] < logits.shape[1]) | (self._top_p[rows] < 1)
            for group in (np.flatnonzero(random & ~truncated), np.flatnonzero(random & truncated)):
                if len(group):
                    index = upload(group, logits.device)
                    tokens[index] = self._draw(logits[index], rows[group], positions[group], bool(truncated[group[0]]))
        if penalised is not None:
            index = upload(penalised, logits.device)
            self.penalties.count_sampled(rows[penalised].astype(np.int64), positions[penalised], tokens[index], finite[index])
        asking = np.flatnonzero(features & Feature.LOGPROBS) if present & Feature.LOGPROBS else None
        return tokens, finite, None if asking is None else self._logprobs(model_logits, tokens, rows, asking)

    def _with_bias(self, logits: torch.Tensor, rows: npt.NDArray[np.integer], biased: Int64Array) -> torch.Tensor:
        """A copy of the logits with the bias of the `biased` ones of the rows added."""
        columns = [self._bias[int(rows[i])] for i in biased]
        where = np.repeat(biased, [len(ids) for ids, _ in columns])
        index = upload(np.stack((where, np.concatenate([ids for ids, _ in columns]))), logits.device)
        values = upload(np.concatenate([bias for _, bias in columns]), logits.device)
        return logits.index_put((index[0], index[1]), logits[index[0], index[1]] + values)

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: npt.NDArray[np.integer], asking: Int64Array
    ) -> Logprobs:
        """Log probabilities of the `asking` ones of the rows."""
        num_top = self._num_logprobs[rows[asking]]
        index, device_num_top = upload(np.stack((asking, num_top)), logits.device)
        found = compute_logprobs(logits[index], tokens[index], device_num_top, int(num_top.max()))
        return found if len(asking) == len(rows) else found.spread(index, len(rows))

    def _without_stop_ids(self, logits: torch.Tensor, rows: npt.NDArray[np.integer], waiting: Int64Array) -> torch.Tensor:
        """A copy of the logits in which the `waiting` ones of the rows cannot choose a stop id."""
        stop_ids = [self._stop_ids[int(rows[i])] for i in waiting]
        where = np.repeat(waiting, [len(ids) for ids in stop_ids])
        index = upload(np.stack((where, np.concatenate(stop_ids))), logits.device)
        return logits.index_put((index[0], index[1]), logits.new_full((), -torch.inf))

    def _draw(
        self, logits: torch.Tensor, rows: npt.NDArray[np.integer], positions: Int64Array, truncated: bool
    ) -> torch.Tensor:
        """One random token per row, int64 [N]; `truncated`: some row has top-k or top-p, which need the logits in order."""
        device = logits.device
        keys = upload(stream_keys(self._seed[rows], positions), device)
        top_k = upload(self._top_k[rows], device)[:, None]
        with np.errstate(divide="ignore"):
            floats = np.stack(
                (np.maximum(self._temperature[rows], _MIN_TEMPERATURE), self._top_p[rows], np.log(self._min_p[rows]))
            )
        temperature, top_p, log_min_p = upload(floats, device)[:, :, None].unbind()
        # Relative to the best one, so that a small temperature cannot overflow; that is also what min-p is relative to.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.float()
        if not truncated:
            token_ids = torch.arange(logits.shape[1], device=device)
            scores = scaled + gumbel_noise(keys, token_ids)
            scores.masked_fill_(scaled < log_min_p, -torch.inf)
            return scores.argmax(dim=-1)
        scaled, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
        kept: torch.Tensor = torch.arange(logits.shape[1], device=device) < top_k
        probabilities = scaled.double().masked_fill_(~kept, -torch.inf).softmax(dim=-1)
        # A token stays when those before it do not reach top_p yet; 1 keeps all, whatever the rounding of the sum.
        kept &= (probabilities.cumsum(dim=-1) - probabilities < top_p) | (top_p >= 1)
        kept &= scaled >= log_min_p
        if device.type == "cpu":
            # What is kept is a prefix of each row; elsewhere, asking how long it is would wait for the device.
            longest = int(kept.sum(dim=-1).max())
            scaled, token_ids, kept = scaled[:, :longest], token_ids[:, :longest], kept[:, :longest]
        scores = (scaled + gumbel_noise(keys, token_ids)).masked_fill_(~kept, -torch.inf)
        return token_ids.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]


def _bias_columns(params: SamplingParams) -> tuple[Int64Array, npt.NDArray[np.float32]]:
    """Token ids int64 and biases float32 of a request."""
    ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
    return ids, np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
