"""Generate text with somebody else's scheduler and our runtime, in one process.

    python examples/embedding/inprocess_tokenspeed.py [MODEL_DIR]

The scheduler is tokenspeed-scheduler 0.1.0 (`pip install tokenspeed-scheduler==0.1.0`), the model SmolLM2 (`make model`). What
lies between the two is one adapter: it makes a `ForwardOp` of a forward op of the scheduler, full_refresh included, which that
scheduler does not have. After each step the rows of the mirror are compared with the scheduler's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tokenspeed_scheduler as ts
from tokenizers import Tokenizer

from runtime_service import Refusal, RuntimeSettings, StepRunner, TokenSpeedAdapter, open_runner

PAGE_SIZE, NUM_PAGES, MAX_ROWS, MAX_TOKENS = 4, 95, 8, 16
FACTS = "The sky is blue. Grass is green. Snow is white. Coal is black. "
PROMPTS = [FACTS + question for question in ("The capital of France is", "The opposite of hot is", "Two plus two is")]


def make_scheduler() -> ts.Scheduler:
    """A small pool, and prompts that are published while their requests run: that is what makes rows change below their end."""
    config = ts.SchedulerConfig()
    config.page_size, config.num_device_pages, config.disable_l2_cache = PAGE_SIZE, NUM_PAGES + 1, True
    config.max_batch_size, config.max_scheduled_tokens, config.decode_input_tokens = MAX_ROWS, 16, 1
    config.enable_mamba, config.mamba_pool_total_chunks, config.mamba_cache_chunk_size = True, 256, PAGE_SIZE
    return ts.Scheduler(config)


def serve(scheduler: ts.Scheduler, runner: StepRunner, prompts: dict[str, list[int]]) -> tuple[dict[str, list[int]], int, int]:
    """Run all prompts; their tokens, the rows compared, and how many of those were stale."""
    adapter, compared, stale = TokenSpeedAdapter(MAX_ROWS), 0, 0
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    specs = []
    for name, prompt in prompts.items():
        spec = ts.RequestSpec()
        spec.request_id, spec.tokens = name, prompt
        specs.append(spec)
    scheduler.submit_requests(specs)
    while any(len(output) < MAX_TOKENS for output in tokens.values()):
        event, over = ts.ExecutionEvent(), []
        for batch in scheduler.next_execution_plan().forward:
            if not batch.request_ids:
                continue
            result = runner.run(adapter.forward_op(batch))
            if isinstance(result, Refusal):
                raise result
            for i, (name, row, token) in enumerate(
                zip(batch.request_ids, batch.request_pool_indices, result.tokens, strict=True)
            ):
                compared += 1
                stale += runner.mirror.row(row).tolist() != list(batch.occupied_pages[i])
                if token < 0:  # a chunk that leaves prompt tokens
                    continue
                extend = ts.ForwardEvent.ExtendResult()
                extend.request_id, extend.tokens = name, [int(token)]
                event.add_event(extend)
                tokens[name].append(int(token))
                if len(tokens[name]) == MAX_TOKENS:
                    finish = ts.ForwardEvent.Finish()
                    finish.request_id = name
                    event.add_event(finish)
                    over.append(name)
        scheduler.advance(event)
        for name in over:
            adapter.finish(name)
    return tokens, compared, stale


def main() -> None:
    model = Path(sys.argv[1] if len(sys.argv) > 1 else "models/smollm2-135m-instruct")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    settings = RuntimeSettings(model=str(model), page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_rows=MAX_ROWS, device="cpu")
    runner = open_runner(settings)
    runner.open(scheduler_epoch=1, session_no=1, overlap_depth=0)
    prompts = {f"r{i}": tokenizer.encode(prompt).ids for i, prompt in enumerate(PROMPTS)}
    tokens, compared, stale = serve(make_scheduler(), runner, prompts)
    for name, prompt in zip(prompts, PROMPTS, strict=True):
        print(f"{prompt.removeprefix(FACTS)}|{tokenizer.decode(tokens[name])!r}")
    print(f"{compared} rows compared, {stale} stale rows")


if __name__ == "__main__":
    main()
