"""The scheduler core as a library: no gRPC, no torch, one process. Run it: `python examples/embed_scheduler.py`.

You bring the model. Each step the core hands you a ForwardOp, columns of numpy; you bring your copy of the page rows up to
date, compute, and answer with one token per row that asks for one. Here the "model" is a sum over the tokens, read through
the copied rows, so a wrong row would show at once.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.ops import NO_TOKEN, ForwardOp, StepResult
from scheduler_service.core.scheduler import Scheduler

PAGE_SIZE, NUM_PAGES, VOCAB = 4, 8, 997


class ToyRuntime:
    """A mirror of the page rows, a KV cache that remembers tokens, and a model that adds them up."""

    def __init__(self) -> None:
        self.mirror: dict[int, list[int]] = {}  # row number → page ids
        self.cells = np.zeros((NUM_PAGES + 1, PAGE_SIZE), dtype=np.int64)
        self.last_token: dict[int, int] = {}

    def run(self, op: ForwardOp) -> StepResult:
        """Apply one op and compute it."""
        for row in op.released_rows.tolist():
            self.mirror.pop(row, None)
        tokens = np.full(op.num_rows, NO_TOKEN, dtype=np.int32)
        page_at = token_at = 0
        for i, row in enumerate(op.req_pool_indices.tolist()):
            # The row: all of it where full_refresh is set, also when size is 0; otherwise the pages appended.
            begin = 0 if op.full_refresh[i] else int(op.begins[i])
            num_sent = int(op.row_lens[i]) - begin
            self.mirror[row] = self.mirror.get(row, [])[:begin] + op.occupied_pages[page_at : page_at + num_sent].tolist()
            page_at += num_sent

            # The input: given for extend rows; a decode row goes on from its own last token.
            input_len = int(op.input_lens[i])
            if i < op.num_extend_rows:
                inputs = op.input_ids[token_at : token_at + input_len].tolist()
                token_at += input_len
            else:
                inputs = [self.last_token[row]]
            start = int(op.num_computed[i])
            for position, token in enumerate(inputs, start):
                self.cells[self.mirror[row][position // PAGE_SIZE], position % PAGE_SIZE] = token

            if op.sample[i]:
                known = self.cells[self.mirror[row]].reshape(-1)[: start + input_len]
                tokens[i] = int((np.arange(1, len(known) + 1) * (known + 1)).sum() % VOCAB)
                self.last_token[row] = int(tokens[i])
        return StepResult(session_no=op.session_no, step=op.step, tokens=tokens)


def main() -> None:
    config = SchedulerConfig(
        page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_rows=4, max_pages_per_row=8, vocab_size=VOCAB, overlap_depth=0
    )
    scheduler, runtime = Scheduler(config), ToyRuntime()
    system = [1, 2, 3, 4]
    scheduler.submit("first", [*system, 5, 6, 7], max_tokens=3)
    scheduler.submit("second", [*system, 9], max_tokens=1)

    outputs: dict[str, list[int]] = {}
    late = False
    while scheduler.has_work:
        op = scheduler.plan()
        if op is not None:
            scheduler.complete(runtime.run(op))
        news = scheduler.take_outputs()
        for request, token in zip(news.requests, news.tokens, strict=True):
            outputs.setdefault(request.request_id, []).append(token)
        for request in news.finished:
            print(
                f"{request.request_id}: {outputs[request.request_id]} ({request.finish_reason}), cached {request.cached_tokens}"
            )
        if not late:
            # Comes when the others have computed the shared beginning: it is taken from the cache.
            scheduler.submit("third", [*system, 5, 6], max_tokens=2)
            late = True


if __name__ == "__main__":
    main()
