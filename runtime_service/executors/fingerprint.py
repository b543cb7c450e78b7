"""The fingerprint model: an exact stand-in for attention that makes every wrong page visible.

Each KV cell holds the token id that was written there, and the next token of a sequence of n tokens is

    sum over i in [0, n) of (i + 1) * (tok_i + 1)   mod 997

with tok_i read through the mirror. A stale, aliased or missing page changes the number, where float attention would merely
drift. Two wrong pages can still add up to a right sum, so each cell also stores a chained hash of its position and prefix:

    h_i = h_(i-1) + splitmix64(i * 2^32 + tok_i)   mod 2^64,   h_(-1) = 0

(splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). Every read compares the hashes it
finds with the *row's own* chain, kept apart from the pages; a difference is a violation.

What that detects. Positions that the row computed itself in this lease are compared with a chain made from the row's input
tokens, so any cell that was not written by, or for, exactly this prefix at exactly this position is found: stale and aliased
entries, a right page at a wrong depth, overwritten and never written cells. Positions adopted from the prefix cache are known
to this executor only through the pages; their chain is made once, at the lease's first step, from the token ids found there.
From then on they are held to the same comparison, which finds unwritten cells, pages of different prefixes put together and
later overwriting. It cannot find that *all* of a cached prefix consistently belongs to another prompt: only the output does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.executors.base import ExecutionResult, ModelInfo
from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import NO_TOKEN, Int32Array, LeaseStart, RowStatus

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

VOCAB_SIZE = 997
POISON_TOKEN = -(1 << 30)
"""Content of a cell that was never written, or poisoned: no token, so reading it is always a violation."""
_POISON_HASH = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
MAX_VIOLATIONS = 1000
"""Texts kept in `violations`; `num_violations` counts on."""


class FingerprintExecutor:
    """Implements `ModelExecutor`. Cells lie on `device` and are written and read there; the arithmetic is done on the host.

    Memory: 12 bytes per cell on the device, 8 bytes on the host per position of the longest row times the number of rows.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        name: str = "fingerprint",
        *,
        short_steps: bool = False,
    ) -> None:
        """`short_steps`: see `ModelInfo`; not for a subclass whose steps wait."""
        self._page_size = page_size
        self._device = torch.device(device)
        self._tokens = torch.empty((num_pages + 1) * page_size, dtype=torch.int32, device=self._device)
        self._hashes = torch.empty((num_pages + 1) * page_size, dtype=torch.int64, device=self._device)
        # The same memory, one line per page.
        self._token_pages = self._tokens.view(-1, page_size)
        self._hash_pages = self._hashes.view(-1, page_size)
        self._info = ModelInfo(
            name, "fingerprint", VOCAB_SIZE, 0, (), None, str(self._device), "int32", greedy_only=True, short_steps=short_steps
        )
        # Per row number: tokens of its chain, and the chain itself in the shape of its pages, [rows, pages, page_size].
        self._chain_lens: Int64Array = np.zeros(0, dtype=np.int64)
        self._chains: UInt64Array = np.zeros((0, 0, page_size), dtype=np.uint64)
        # (i + 1) mod 997 of each position i, and i itself, in the same shape.
        self._weights: Int64Array = np.zeros((0, page_size), dtype=np.int64)
        self._request_ids: dict[int, str] = {}
        self.violations: list[str] = []
        self.num_violations = 0
        self.poison()

    @property
    def info(self) -> ModelInfo:
        return self._info

    def warm_up(self) -> None:
        """Nothing to compile."""

    def start_leases(self, leases: list[LeaseStart]) -> None:
        """Begin an empty chain for these rows."""
        for lease in leases:
            self._reserve(lease.req_pool_index + 1, 0)
            self._chain_lens[lease.req_pool_index] = 0
            self._request_ids[lease.req_pool_index] = lease.request_id

    def release_rows(self, rows: Int32Array) -> None:
        """Forget the chains of these rows; the cells stay."""
        for row in rows.tolist():
            if row < len(self._chain_lens):
                self._chain_lens[row] = 0
            self._request_ids.pop(row, None)

    def reset(self) -> None:
        """Forget every row; cells and violations stay."""
        self._chain_lens[:] = 0
        self._request_ids.clear()

    def poison(self) -> None:
        """Make every cell one that was never written: reading it before the next write is a violation."""
        self._tokens.fill_(POISON_TOKEN)
        self._hashes.fill_(int(_POISON_HASH.astype(np.int64)))

    def execute(self, batch: ForwardBatch) -> ExecutionResult:
        """Write the step's tokens into their cells, then read every row whole and compute its next token.

        Of masked rows nothing is read or written.
        """
        status = np.where(batch.clamped, np.uint8(RowStatus.CLAMPED), np.uint8(RowStatus.OK))
        if batch.masked is None or not (masked := _host(batch.masked)).any():
            return ExecutionResult(self._compute(batch), status)
        tokens: Int32Array = np.full(batch.num_rows, NO_TOKEN, dtype=np.int32)
        tokens[~masked] = self._compute(batch.select(np.flatnonzero(~masked)))
        return ExecutionResult(tokens, status)

    def _compute(self, batch: ForwardBatch) -> Int32Array:
        if batch.num_rows == 0:
            return np.empty(0, dtype=np.int32)
        rows = batch.host_rows
        seq_lens = _host(batch.seq_lens)
        num_row_pages = -(-seq_lens // self._page_size)
        self._reserve(int(rows.max()) + 1, int(num_row_pages.max()))
        self._adopt_prefixes(batch)
        self._write(batch)
        sums = self._read(batch, seq_lens, num_row_pages)
        return np.where(batch.sample & ~batch.clamped, sums, NO_TOKEN).astype(np.int32)

    def _reserve(self, num_rows: int, num_pages: int) -> None:
        """Make room for that many rows and pages per row; doubles, so that growth is rare."""
        old_rows, old_pages, _ = self._chains.shape
        if num_rows > old_rows or num_pages > old_pages:
            shape = (_grown(old_rows, num_rows), _grown(old_pages, num_pages), self._page_size)
            chains = np.zeros(shape, dtype=np.uint64)
            chains[:old_rows, :old_pages] = self._chains
            self._chains = chains
            self._chain_lens = np.concatenate((self._chain_lens, np.zeros(shape[0] - old_rows, dtype=np.int64)))
            self._weights = np.arange(1, shape[1] * self._page_size + 1).reshape(shape[1:]) % VOCAB_SIZE

    def _adopt_prefixes(self, batch: ForwardBatch) -> None:
        """Bring each row's chain to `num_computed` tokens before the step writes; those it lacks are read from their pages."""
        rows, page_size = batch.host_rows, self._page_size
        num_computed = np.minimum(batch.host_num_computed, batch.req_to_page.shape[1] * page_size)
        for i in np.flatnonzero(self._chain_lens[rows] < num_computed).tolist():
            row, begin, end = int(rows[i]), int(self._chain_lens[rows[i]]), int(num_computed[i])
            positions = np.arange(begin, end)
            pages = _host(batch.req_to_page[row]).astype(np.int64)
            tokens = _gather(self._tokens, pages[positions // page_size] * page_size + positions % page_size)
            chain = self._chains[row].reshape(-1)
            chain[begin:end] = np.cumsum(_mix(positions, tokens))
            if begin:
                chain[begin:end] += chain[begin - 1]
        # Also cuts a chain that is longer, where a lease goes on from fewer tokens than it had.
        self._chain_lens[rows] = num_computed

    def _write(self, batch: ForwardBatch) -> None:
        """Extend the chains by the step's tokens, and write tokens and hashes; what goes to the dummy page is not written."""
        rows = batch.host_rows
        positions, slots, input_ids = _host(batch.positions), _host(batch.out_cache_loc), _host(batch.input_ids)
        mixed = np.cumsum(_mix(positions, input_ids))
        if batch.num_rows == len(positions):  # one token a row, the steady decode step
            token_rows = np.arange(len(positions))
            firsts = token_rows
        else:
            token_rows = _host(batch.token_rows)
            firsts = _host(batch.query_indptr)[:-1]
        # The running sum over the whole batch, less what it had before the row's first token, plus the row's chain so far.
        bases = -np.where(firsts > 0, mixed[firsts - 1], np.uint64(0))
        chain_lens = self._chain_lens[rows]
        last_pages, last_offsets = np.divmod(np.maximum(chain_lens - 1, 0), self._page_size)
        bases += np.where(chain_lens > 0, self._chains[rows, last_pages, last_offsets], np.uint64(0))
        hashes = mixed + bases[token_rows]
        if batch.clamped.any():
            inside = positions < batch.req_to_page.shape[1] * self._page_size
            positions, slots, input_ids = positions[inside], slots[inside], input_ids[inside]
            hashes, token_rows = hashes[inside], token_rows[inside]
        self._chains[rows[token_rows], positions // self._page_size, positions % self._page_size] = hashes
        self._chain_lens[rows] = _host(batch.seq_lens)

        if slots.size and slots.min() < self._page_size:  # no page in the mirror: the read that follows reports it
            has_page = slots >= self._page_size
            slots, input_ids, hashes = slots[has_page], input_ids[has_page], hashes[has_page]
        _scatter(self._tokens, slots, input_ids.astype(np.int32))
        _scatter(self._hashes, slots, hashes.view(np.int64))

    def _read(self, batch: ForwardBatch, seq_lens: Int64Array, num_row_pages: Int64Array) -> Int64Array:
        """Sums of all rows, int64 [R], over the cells `[0, seq_len)` found through the mirror; notes rows whose hashes differ.

        Works on one entry per page of each row: gathering whole pages moves a page's cells as one block of memory.
        """
        page_begins = np.cumsum(num_row_pages) - num_row_pages
        owners = np.repeat(np.arange(len(seq_lens)), num_row_pages)
        logical_pages = np.arange(len(owners)) - page_begins[owners]
        table_rows = batch.host_rows[owners].astype(np.int64)
        pages = _gather(batch.req_to_page.view(-1), table_rows * batch.req_to_page.shape[1] + logical_pages).astype(np.int64)
        tokens = _gather(self._token_pages, pages)
        hashes = _gather(self._hash_pages, pages).view(np.uint64)

        readable = np.arange(self._page_size) < (seq_lens[owners] - logical_pages * self._page_size)[:, None]
        terms = (tokens.astype(np.int64) + 1) * self._weights[logical_pages]
        terms[~readable] = 0
        sums: Int64Array = np.add.reduceat(terms.sum(axis=1), page_begins) % VOCAB_SIZE

        differs = (hashes != self._chains[table_rows, logical_pages]) & readable
        if differs.any():
            self._report(batch, owners, logical_pages, pages, tokens, differs)
        return sums

    def _report(
        self,
        batch: ForwardBatch,
        owners: Int64Array,
        logical_pages: Int64Array,
        pages: Int64Array,
        tokens: Int32Array,
        differs: npt.NDArray[np.bool_],
    ) -> None:
        """Note, for each row that read wrong cells, the first of them and their number."""
        bad_pages, offsets = np.nonzero(differs)
        bad_rows, firsts, counts = np.unique(owners[bad_pages], return_index=True, return_counts=True)
        for i, first, count in zip(bad_rows.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            page, row = int(pages[bad_pages[first]]), int(batch.host_rows[i])
            position = int(logical_pages[bad_pages[first]]) * self._page_size + int(offsets[first])
            if page == 0:
                found = "the mirror has no page there"
            elif tokens[bad_pages[first], offsets[first]] == POISON_TOKEN:
                found = "the cell was never written"
            else:
                found = "the cell was written for another position or prefix"
            request_id = self._request_ids.get(row, "")
            self.num_violations += 1
            if len(self.violations) < MAX_VIOLATIONS:
                self.violations.append(
                    f"request {request_id!r} in row {row} reads position {position} from page {page}: {found} "
                    f"({count} wrong positions in this step)"
                )


def _host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor as a numpy array of its own dtype; on the CPU a view."""
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array


def _gather(source: torch.Tensor, index: Int64Array) -> npt.NDArray[Any]:
    """`source[index]` on the host; on the CPU by numpy, whose calls cost a third of torch's on arrays this small."""
    if source.device.type == "cpu":
        gathered: npt.NDArray[Any] = source.numpy()[index]
        return gathered
    return _host(source[torch.from_numpy(index).to(source.device)])


def _scatter(target: torch.Tensor, index: Int64Array, values: npt.NDArray[Any]) -> None:
    """`target[index] = values`, from the host."""
    if target.device.type == "cpu":
        target.numpy()[index] = values
    else:
        target[torch.from_numpy(index).to(target.device)] = torch.from_numpy(values).to(target.device)


def _grown(old: int, needed: int) -> int:
    return max(2 * old, needed, 1) if needed > old else max(old, 1)


def _mix(positions: Int64Array, tokens: npt.NDArray[np.int64]) -> UInt64Array:
    """splitmix64(position * 2^32 + token), elementwise; arithmetic wraps at 2^64."""
    x = ((positions << 32) + tokens).astype(np.uint64)
    x += np.uint64(0x9E37_79B9_7F4A_7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))
