"""From an op to the batch a model takes: positions, page lookups and input tokens of every row, in one staged copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.forward_batch import ForwardBatch
from runtime_service.kernels.decode_inputs import decode_inputs
from runtime_service.ops import ForwardOp, Int32Array
from runtime_service.req_to_page import ReqToPage
from runtime_service.staging import StagingRing

Int64Array = npt.NDArray[np.int64]


class BatchBuilder:
    """Builds the `ForwardBatch` of an op that was checked and whose pages are already in the mirror.

    Args:
        mirror: page rows.
        device: where batches lie.
        decode_kernel: have positions, lengths and slots of a step of decode rows alone worked out on the device, in one launch
            (`kernels.decode_inputs`); only row numbers and lengths are copied there then. None: on a GPU; a CPU has a short way
            of its own for them.
    """

    def __init__(self, mirror: ReqToPage, device: str | torch.device, *, decode_kernel: bool | None = None) -> None:
        self._mirror = mirror
        self._entries = mirror.table.view(-1)
        device = torch.device(device)
        self._staging = StagingRing(device, torch.int64)
        self._decode_kernel = device.type == "cuda" if decode_kernel is None else decode_kernel
        self._host_entries: Int32Array | None = None
        if decode_kernel is None and device.type == "cpu":
            self._host_entries = self._entries.numpy()
            self._host_counts = np.arange(mirror.max_rows + 1)
            self._host_ones = np.ones(mirror.max_rows + 1, dtype=np.int32).tobytes()
        # For the kernel: what each row has computed, as of its last step, and columns that are the same for every step.
        size = mirror.max_rows + 1
        self._lengths = torch.zeros(size, dtype=torch.int64, device=device)
        self._ones = torch.ones(size, dtype=torch.int64, device=device)
        self._counts = torch.arange(size + 1, device=device)
        self._num_ready = 0
        self._ready = (self._ones[:0], self._counts[:1], self._counts[:0])  # the same for so many rows

    def build(self, op: ForwardOp, last_tokens: torch.Tensor, masked: torch.Tensor | None = None) -> ForwardBatch:
        """Make the batch of `op`; `last_tokens` is int64 [max_rows + 1] on the device, the last sampled token of each row.

        `masked`, bool [R] on the device, are rows that must not be used: they get row 0, and slot 0, of the dummy page.
        Decode rows compute `last_tokens[row]`, extend rows their `input_ids`. Positions past the mirror's width get a slot of
        the dummy page 0 and mark their row as clamped: clamping the lookup into the last page instead would overwrite live KV.
        Raises ValueError when `input_ids` or `input_lens` do not fit the rows.
        """
        mirror, page_size = self._mirror, self._mirror.page_size
        num_rows, num_extend_rows = op.num_rows, op.num_extend_rows
        if (
            self._host_entries is not None
            and num_extend_rows == 0
            and masked is None
            and op.input_lens.tobytes() == self._host_ones[: 4 * num_rows]
            and not len(op.input_ids)
        ):
            return self._build_decode_on_host(op, last_tokens, self._host_entries)
        rows = op.req_pool_indices.astype(np.int64)
        num_computed = op.num_computed.astype(np.int64)
        input_lens = op.input_lens.astype(np.int64)
        query_indptr = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(input_lens, out=query_indptr[1:])
        num_tokens, num_extend_tokens = int(query_indptr[-1]), int(query_indptr[num_extend_rows])
        if len(op.input_ids) != num_extend_tokens:
            raise ValueError(f"{len(op.input_ids)} input ids for {num_extend_tokens} tokens of {num_extend_rows} extend rows")
        if num_tokens - num_extend_tokens != num_rows - num_extend_rows:
            raise ValueError(f"{num_rows - num_extend_rows} decode rows compute {num_tokens - num_extend_tokens} tokens")

        if self._host_entries is not None and masked is None:
            known = rows, num_computed, input_lens, query_indptr
            return self._build_on_host(op, known, last_tokens, self._host_entries)
        if num_extend_rows == 0 and num_rows and self._decode_kernel:
            return self._build_decode(op, rows, num_computed, last_tokens, masked)

        ends = num_computed + input_lens
        width_tokens = mirror.max_pages_per_row * page_size
        clamped = ends > width_tokens
        token_rows = np.repeat(np.arange(num_rows), input_lens)
        positions = np.arange(num_tokens) + (num_computed - query_indptr[:-1])[token_rows]
        logical_pages, offsets = np.divmod(positions, page_size)
        entries = rows[token_rows] * mirror.max_pages_per_row + logical_pages
        if clamped.any():
            entries[positions >= width_tokens] = 0  # an entry of row 0, the padding sink, which always names page 0

        seq_lens = np.minimum(ends, width_tokens)
        columns = (rows, num_computed, input_lens, seq_lens, query_indptr, token_rows, positions, entries, offsets)
        num_packed = sum(map(len, columns)) + num_tokens
        packed = self._staging.begin(num_packed)
        np.concatenate(columns, out=packed[: num_packed - num_tokens])
        input_ids_at = num_packed - num_tokens
        packed[input_ids_at : input_ids_at + num_extend_tokens] = op.input_ids
        packed[input_ids_at + num_extend_tokens :] = 0  # decode rows: filled in on the device
        parts = torch.split(self._staging.upload(), [*map(len, columns), num_tokens])
        d_rows, d_num_computed, d_input_lens, d_seq_lens, d_indptr, d_token_rows, d_positions, d_entries, d_offsets, d_ids = (
            parts
        )

        out_cache_loc = torch.add(d_offsets, self._entries[d_entries], alpha=page_size)
        if masked is not None:
            d_rows = d_rows.masked_fill(masked, 0)
            out_cache_loc.masked_fill_(masked[d_token_rows], 0)
        if num_extend_rows < num_rows:
            d_ids[num_extend_tokens:] = last_tokens[d_rows[num_extend_rows:]]
        return ForwardBatch(
            req_to_page=mirror.table,
            page_size=page_size,
            rows=d_rows,
            num_computed=d_num_computed,
            input_lens=d_input_lens,
            seq_lens=d_seq_lens,
            query_indptr=d_indptr,
            input_ids=d_ids,
            positions=d_positions,
            token_rows=d_token_rows,
            out_cache_loc=out_cache_loc,
            num_extend_rows=num_extend_rows,
            host_rows=op.req_pool_indices,
            host_num_computed=op.num_computed,
            host_input_lens=op.input_lens,
            sample=op.sample,
            clamped=clamped,
            masked=masked,
        )

    def _build_decode(
        self,
        op: ForwardOp,
        rows: Int64Array,
        num_computed: Int64Array,
        last_tokens: torch.Tensor,
        masked: torch.Tensor | None,
    ) -> ForwardBatch:
        mirror, num_rows = self._mirror, op.num_rows
        width_tokens = mirror.max_pages_per_row * mirror.page_size
        packed = self._staging.begin(2 * num_rows)
        packed[:num_rows], packed[num_rows : 2 * num_rows] = rows, num_computed
        d_rows, d_num_computed = torch.split(self._staging.upload(), num_rows)
        self._lengths.index_copy_(0, d_rows, d_num_computed)  # the op is authoritative
        if masked is not None:
            d_rows = d_rows.masked_fill(masked, 0)  # padding, as the kernel takes it
        positions, seq_lens, out_cache_loc = decode_inputs(
            mirror.table, d_rows, self._lengths, mirror.page_size, width_tokens=width_tokens
        )
        if masked is not None:
            out_cache_loc.masked_fill_(masked, 0)  # whatever row 0 says
        return ForwardBatch(
            req_to_page=mirror.table,
            page_size=mirror.page_size,
            rows=d_rows,
            num_computed=d_num_computed,
            input_lens=self._ones[:num_rows],
            seq_lens=seq_lens,
            query_indptr=self._counts[: num_rows + 1],
            input_ids=last_tokens[d_rows],
            positions=positions,
            token_rows=self._counts[:num_rows],
            out_cache_loc=out_cache_loc,
            num_extend_rows=0,
            host_rows=op.req_pool_indices,
            host_num_computed=op.num_computed,
            host_input_lens=op.input_lens,
            sample=op.sample,
            clamped=num_computed >= width_tokens,
            masked=masked,
        )

    def _build_on_host(
        self,
        op: ForwardOp,
        known: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
        last_tokens: torch.Tensor,
        entries: Int32Array,
    ) -> ForwardBatch:
        """Any op, on a CPU: what is staged elsewhere is what the batch is made of."""
        mirror, page_size, num_extend_rows = self._mirror, self._mirror.page_size, op.num_extend_rows
        rows, num_computed, input_lens, query_indptr = known
        width_tokens = mirror.max_pages_per_row * page_size
        seq_lens = num_computed + input_lens
        clamped = seq_lens > width_tokens
        token_rows = np.repeat(self._host_counts[: len(rows)], input_lens)
        positions = np.arange(len(token_rows))
        positions += (num_computed - query_indptr[:-1]).take(token_rows)
        pages = positions // page_size
        offsets = positions - pages * page_size
        pages += (rows * mirror.max_pages_per_row).take(token_rows)
        if np.count_nonzero(clamped):
            pages[positions >= width_tokens] = 0  # an entry of row 0, the padding sink, which always names page 0
            np.minimum(seq_lens, width_tokens, out=seq_lens)
        offsets += entries.take(pages) * np.int64(page_size)
        input_ids = np.concatenate((op.input_ids, last_tokens.numpy().take(rows[num_extend_rows:])))
        return ForwardBatch(
            req_to_page=mirror.table,
            page_size=page_size,
            rows=torch.from_numpy(rows),
            num_computed=torch.from_numpy(num_computed),
            input_lens=torch.from_numpy(input_lens),
            seq_lens=torch.from_numpy(seq_lens),
            query_indptr=torch.from_numpy(query_indptr),
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            token_rows=torch.from_numpy(token_rows),
            out_cache_loc=torch.from_numpy(offsets),
            num_extend_rows=num_extend_rows,
            host_rows=op.req_pool_indices,
            host_num_computed=op.num_computed,
            host_input_lens=op.input_lens,
            sample=op.sample,
            clamped=clamped,
        )

    def _build_decode_on_host(self, op: ForwardOp, last_tokens: torch.Tensor, entries: Int32Array) -> ForwardBatch:
        mirror, num_rows, page_size = self._mirror, op.num_rows, self._mirror.page_size
        width_tokens = mirror.max_pages_per_row * page_size
        rows, positions = op.req_pool_indices.astype(np.int64), op.num_computed.astype(np.int64)
        seq_lens = positions + 1
        clamped = seq_lens > width_tokens
        pages = positions // page_size
        offsets = positions - pages * page_size
        pages += rows * mirror.max_pages_per_row
        if np.count_nonzero(clamped):
            pages[clamped] = 0  # an entry of row 0, the padding sink, which always names page 0
            np.minimum(seq_lens, width_tokens, out=seq_lens)
        offsets += entries.take(pages) * np.int64(page_size)
        if num_rows != self._num_ready:  # a slice costs more than a column worked out above
            self._num_ready = num_rows
            self._ready = (self._ones[:num_rows], self._counts[: num_rows + 1], self._counts[:num_rows])
        input_lens, query_indptr, token_rows = self._ready
        return ForwardBatch(
            req_to_page=mirror.table,
            page_size=page_size,
            rows=torch.from_numpy(rows),
            num_computed=torch.from_numpy(positions.copy()),
            input_lens=input_lens,
            seq_lens=torch.from_numpy(seq_lens),
            query_indptr=query_indptr,
            input_ids=torch.from_numpy(last_tokens.numpy().take(rows)),
            positions=torch.from_numpy(positions),
            token_rows=token_rows,
            out_cache_loc=torch.from_numpy(offsets),
            num_extend_rows=0,
            host_rows=op.req_pool_indices,
            host_num_computed=op.num_computed,
            host_input_lens=op.input_lens,
            sample=op.sample,
            clamped=clamped,
        )
