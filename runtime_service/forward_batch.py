"""One step in the shape in which a model wants it: every token with its row, its position and its KV slot."""

from __future__ import annotations

from dataclasses import dataclass

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
    rows: torch.Tensor  # int64 [R], row numbers in req_to_page
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

    @property
    def num_rows(self) -> int:
        return len(self.host_rows)
