"""One step in the shape in which a model wants it: every token with its row, its position and its KV slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.ops import BoolArray, Int32Array


@dataclass(slots=True)
class ForwardBatch:
    """R rows and T tokens, rows in the order of the op (extend rows, then decode rows), tokens concatenated in row order.

    Tensors lie on the executor's device. Index tensors are int64. A *slot* is `page * page_size + offset`; slots below
    `page_size` are those of the dummy page 0, which nobody reads.
    """

    req_to_page: torch.Tensor  # int32 [max_rows + 1, max_pages_per_row], the mirror itself; entries past a row's pages are 0
    page_size: int
    rows: torch.Tensor  # int64 [R], row numbers in req_to_page; 0, the padding sink, for a masked row
    num_computed: torch.Tensor  # int64 [R], tokens whose KV was written by earlier steps
    input_lens: torch.Tensor  # int64 [R], tokens computed in this step
    seq_lens: torch.Tensor  # int64 [R], num_computed + input_len, cut to max_pages_per_row * page_size
    query_indptr: torch.Tensor  # int64 [R + 1], tokens of row i are [query_indptr[i], query_indptr[i + 1])
    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], absolute
    token_rows: torch.Tensor  # int64 [T], index into the R rows of each token
    out_cache_loc: torch.Tensor  # int64 [T], slot of each token, read through the mirror; past its width a dummy slot
    num_extend_rows: int
    # The same facts on the host, of this op's own snapshot.
    host_rows: Int32Array  # [R]
    host_num_computed: Int32Array  # [R]
    host_input_lens: Int32Array  # [R]
    sample: BoolArray  # [R], rows that want a token
    clamped: BoolArray  # [R], rows with tokens past the mirror's width: no token for them, whatever `sample` says
    # bool [R], rows of which the mirror is not what it should be; None: none is. They are computed like padding, on the
    # dummy page, and what is said of them is dropped.
    masked: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.host_rows)

    def select(self, index: npt.NDArray[np.int64]) -> ForwardBatch:
        """The batch of some of the rows, by ascending index. Waits for the device unless that is the host."""
        lens = self.host_input_lens
        kept = np.zeros(self.num_rows, dtype=np.bool_)
        kept[index] = True
        rows, tokens = (
            torch.from_numpy(which).to(self.rows.device) for which in (index, np.flatnonzero(np.repeat(kept, lens)))
        )
        indptr = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lens[index], dtype=np.int64)))
        token_rows = np.repeat(np.arange(len(index)), lens[index])
        return replace(
            self,
            rows=self.rows[rows],
            num_computed=self.num_computed[rows],
            input_lens=self.input_lens[rows],
            seq_lens=self.seq_lens[rows],
            query_indptr=torch.from_numpy(indptr).to(self.rows.device),
            input_ids=self.input_ids[tokens],
            positions=self.positions[tokens],
            token_rows=torch.from_numpy(token_rows).to(self.rows.device),
            out_cache_loc=self.out_cache_loc[tokens],
            num_extend_rows=int((index < self.num_extend_rows).sum()),
            host_rows=self.host_rows[index],
            host_num_computed=self.host_num_computed[index],
            host_input_lens=lens[index],
            sample=self.sample[index],
            clamped=self.clamped[index],
            masked=None if self.masked is None else self.masked[rows],
        )
