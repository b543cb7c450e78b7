"""What the next op says if every row goes on: prepared between two ops, while nobody waits for an answer.

A run of decode steps names the same rows again and again, and all of an op but its new pages follows from the op before it. An
op whose columns are, byte for byte, those that were foreseen has kept every rule about them, because they were made from rows
that did; what is left to look at are its pages. Its batch is ready but for the slots of these.

Any other op is looked at as if nothing had been foreseen. Only for a mirror on the CPU: elsewhere a kernel makes the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import NO_ROWS, ForwardOp, Int32Array
from runtime_service.req_to_page import ReqToPage

Int64Array = npt.NDArray[np.int64]

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Columns:
    """The bytes of the columns of an op; those that are not here are empty in it."""

    req_pool_indices: bytes
    row_generations: bytes
    row_lens: bytes
    begins: bytes
    sizes: bytes
    full_refresh: bytes
    num_computed: bytes
    input_lens: bytes
    sample: bytes


@dataclass(slots=True)
class NextStep:
    """An op that may come. Its `occupied_pages`, and the slots of these, are filled in when it does."""

    op: ForwardOp
    columns: Columns
    rows: npt.NDArray[np.intp]  # [R]
    growing: npt.NDArray[np.intp]  # index of the rows that get a page
    batch: ForwardBatch
    slots: Int64Array  # [R], the memory of `batch.out_cache_loc`

    def take_pages(self, mirror: ReqToPage) -> None:
        """The op has come, and its pages are what they should be: write them into the mirror, and set their slots."""
        if len(growing := self.growing):
            pages = self.op.occupied_pages
            mirror.append(self.rows.take(growing), pages)
            self.slots[growing] = pages.astype(np.int64) * mirror.page_size  # at the page's first slot


def foresee(
    last: ForwardBatch, op: ForwardOp, rows: npt.NDArray[np.intp], tokens: Int32Array, mirror: ReqToPage
) -> NextStep | None:
    """The op that follows if all rows of `op` go on with a token each, and no page before one is needed.

    Args:
        last: the batch of `op`, of decode rows alone, none of which is clamped or masked.
        op: it has been applied to the mirror.
        rows: its row numbers.
        tokens: int32 [R], what the rows sampled, each of them.
        mirror: holds what `op` says.

    None: a row is at the end of the mirror's width, or the mirror is not on the CPU.
    """
    page_size, width = mirror.page_size, mirror.max_pages_per_row
    row_lens, num_computed = op.row_lens, op.num_computed + np.int32(1)
    if mirror.host_table is None or row_lens.max() > width or width * page_size > _MAX_INT32:
        return None
    positions = num_computed.astype(np.int64)
    pages = positions // page_size
    grows = pages >= row_lens
    growing = grows.nonzero()[0]
    sizes = grows.astype(np.int32)
    if len(growing):
        row_lens = row_lens + sizes
        if row_lens.max() > width:
            return None
    slots = positions - pages * page_size
    pages += rows * width
    slots += mirror.host_table.reshape(-1).take(pages) * np.int64(page_size)
    full_refresh = np.zeros(len(rows), dtype=np.bool_)
    next_op = ForwardOp(
        session_no=op.session_no,
        step=op.step + 1,
        req_pool_indices=op.req_pool_indices,
        row_generations=op.row_generations,
        row_lens=row_lens,
        begins=op.row_lens,
        sizes=sizes,
        full_refresh=full_refresh,
        occupied_pages=NO_ROWS,
        num_computed=num_computed,
        num_extend_rows=0,
        input_lens=op.input_lens,
        input_ids=NO_ROWS,
        sample=op.sample,
        released_rows=NO_ROWS,
    )
    batch = ForwardBatch(
        req_to_page=mirror.table,
        page_size=page_size,
        rows=last.rows,
        num_computed=torch.from_numpy(positions),
        input_lens=last.input_lens,
        seq_lens=torch.from_numpy(positions + 1),
        query_indptr=last.query_indptr,
        input_ids=torch.from_numpy(tokens.astype(np.int64)),
        positions=torch.from_numpy(positions.copy()),
        token_rows=last.token_rows,
        out_cache_loc=torch.from_numpy(slots),
        num_extend_rows=0,
        host_rows=op.req_pool_indices,
        host_num_computed=num_computed,
        host_input_lens=op.input_lens,
        sample=op.sample,
        clamped=last.clamped,
    )
    columns = Columns(
        req_pool_indices=op.req_pool_indices.tobytes(),
        row_generations=op.row_generations.tobytes(),
        row_lens=row_lens.tobytes(),
        begins=op.row_lens.tobytes(),
        sizes=sizes.tobytes(),
        full_refresh=full_refresh.tobytes(),
        num_computed=num_computed.tobytes(),
        input_lens=op.input_lens.tobytes(),
        sample=op.sample.tobytes(),
    )
    return NextStep(next_op, columns, rows, growing, batch, slots)
