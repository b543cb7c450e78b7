"""How to see the KV cells of a session that is over."""

from __future__ import annotations

from fuzz_columns import pack
from fuzz_model import RuntimeModel

from pagemirror.v1 import forward_pb2


def reading_op(model: RuntimeModel) -> forward_pb2.ForwardOp | None:
    """An op that reads, through new leases, every cell of the present rows that is known: none may have changed."""
    size, room = model.shape.page_size, model.shape.width * model.shape.page_size
    rows, lens, pages, computed, ids = [], [], [], [], []
    for row, lease in model.leases.items():
        tokens: list[int] = []
        for i in range(min(len(lease.pages) * size, room)):
            token = model.cells.get(lease.pages[i // size] * size + i % size)
            if token is None:
                break
            tokens.append(token)
        if tokens and 0 <= tokens[-1] < model.shape.vocab_size:
            rows.append(row)
            lens.append(-(-len(tokens) // size))
            pages += lease.pages[: lens[-1]]
            computed.append(len(tokens) - 1)
            ids.append(tokens[-1])
    if not rows:
        return None
    count = len(rows)
    starts = [forward_pb2.LeaseStart(req_pool_index=row, request_id="probe") for row in rows]
    return forward_pb2.ForwardOp(
        req_pool_indices=pack(rows),
        row_generations=pack([1] * count),
        row_lens=pack(lens),
        begins=pack([0] * count),
        sizes=pack(lens),
        full_refresh=b"\1" * count,
        occupied_pages=pack(pages),
        num_computed=pack(computed),
        num_extend_rows=count,
        input_lens=pack([1] * count),
        input_ids=pack(ids),
        sample=b"\1" * count,
        lease_starts=starts,
    )
