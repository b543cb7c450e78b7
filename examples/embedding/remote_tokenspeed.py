"""Generate text with somebody else's scheduler in this process and our runtime in another, by nothing but the protocol.

    python examples/embedding/remote_tokenspeed.py [MODEL_DIR]

It does what inprocess_tokenspeed.py does, and imports only the messages of `proto/`: whatever is written here in Python can be
written in Go, Rust or C++ from the same .proto files. A scheduler must keep, for each row number, what it has told of it
(`Told`), and send in each step's op, for each row: a new lease and the whole row where the request is new there; the whole row
with full_refresh where pages below its end have changed; the tail where not.
"""

from __future__ import annotations

import queue
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tokenspeed_scheduler as ts
from tokenizers import Tokenizer

from pagemirror.v1 import forward_pb2, runtime_pb2, runtime_pb2_grpc

PAGE_SIZE, NUM_PAGES, MAX_ROWS, MAX_TOKENS = 4, 95, 8, 16
FACTS = "The sky is blue. Grass is green. Snow is white. Coal is black. "
PROMPTS = [FACTS + question for question in ("The capital of France is", "The opposite of hot is", "Two plus two is")]


def int32(values: Sequence[int]) -> bytes:
    """A column: little-endian int32, one after the other."""
    return np.array(values, dtype="<i4").tobytes()


@dataclass
class Told:
    """What the runtime knows of one row number."""

    name: str
    generation: int
    pages: list[int]
    end: int  # tokens computed so far


class Runtime:
    """One session: an op goes out, its result comes back."""

    def __init__(self, address: str) -> None:
        self.stub = runtime_pb2_grpc.RuntimeServiceStub(grpc.insecure_channel(address))
        self.requests: queue.SimpleQueue[runtime_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self.responses = self.stub.Execute(iter(self.requests.get, None))
        hello = runtime_pb2.SchedulerHello(protocol_version=1, scheduler_epoch=secrets.randbits(63) | 1, session_no=1)
        self.requests.put(runtime_pb2.ExecuteRequest(hello=hello))
        self.info = self.answer().hello
        self.told: dict[int, Told] = {}
        self.released: list[int] = []
        self.step = 0

    def answer(self) -> Any:
        """The next message that is no heartbeat."""
        while (response := next(self.responses)).WhichOneof("message") == "heartbeat":
            pass
        return response

    def run(self, batch: Any) -> list[int]:
        """Execute one forward op of the scheduler; a token for each row, -1 where there is none."""
        self.step += 1
        op = forward_pb2.ForwardOp(session_no=1, step=self.step, num_extend_rows=batch.num_extends())
        op.released_rows, self.released = int32(self.released), []
        columns: dict[str, list[int]] = {name: [] for name in ("generation", "begin", "size", "full", "computed", "sample")}
        pages: list[int] = []
        for i, (name, row) in enumerate(zip(batch.request_ids, batch.request_pool_indices, strict=True)):
            occupied, is_extend = list(batch.occupied_pages[i]), i < batch.num_extends()
            told = self.told.get(row)
            computed = batch.extend_prefix_lens[i] if is_extend else told.end if told else -1
            is_new = told is None or told.name != name or told.end != computed
            if is_new or told is None:
                generation = told.generation + 1 if told else 1
                told = self.told[row] = Told(name, generation, [], computed)
                # Greedy; a temperature above 0 would need a seed.
                sampling = forward_pb2.SamplingParams(temperature=0.0)
                op.lease_starts.add(
                    req_pool_index=row,
                    request_id=name,
                    sampling=sampling,
                    prompt_len=batch.prefill_lengths[i] if is_extend else 0,
                )
            begin = min(len(told.pages), len(occupied))
            full = is_new or occupied[:begin] != told.pages
            pages += occupied if full else occupied[begin:]
            ends = not is_extend or computed + batch.input_lengths[i] >= batch.prefill_lengths[i]
            for column, value in zip(
                columns.values(), (told.generation, begin, len(occupied) - begin, full, computed, ends), strict=True
            ):
                column.append(int(value))
            told.pages, told.end = occupied, computed + batch.input_lengths[i]
        op.req_pool_indices, op.row_generations = int32(batch.request_pool_indices), int32(columns["generation"])
        op.row_lens = int32([len(row) for row in batch.occupied_pages])
        op.begins, op.sizes, op.occupied_pages = int32(columns["begin"]), int32(columns["size"]), int32(pages)
        op.full_refresh, op.sample = bytes(columns["full"]), bytes(columns["sample"])
        op.num_computed, op.input_lens, op.input_ids = (
            int32(columns["computed"]),
            int32(batch.input_lengths),
            int32(batch.input_ids),
        )
        self.requests.put(runtime_pb2.ExecuteRequest(op=op))
        answer = self.answer()
        if answer.WhichOneof("message") == "refusal":
            sys.exit(f"refused: {answer.refusal.detail}")
        return list(np.frombuffer(answer.result.tokens, dtype="<i4"))

    def release(self, name: str) -> None:
        """The request is over: say so with the next op."""
        for row, told in self.told.items():
            if told.name == name:
                told.name = ""
                self.released.append(row)

    def rows(self) -> dict[int, list[int]]:
        """The mirror's rows, read back."""
        answer = self.stub.ReadRows(runtime_pb2.ReadRowsRequest())
        rows, lens, pages = (np.frombuffer(column, "<i4") for column in (answer.rows, answer.valid_lens, answer.pages))
        return {int(row): part.tolist() for row, part in zip(rows, np.split(pages, np.cumsum(lens)[:-1]), strict=True)}


def make_scheduler() -> ts.Scheduler:
    """The same as in inprocess_tokenspeed.py."""
    config = ts.SchedulerConfig()
    config.page_size, config.num_device_pages, config.disable_l2_cache = PAGE_SIZE, NUM_PAGES + 1, True
    config.max_batch_size, config.max_scheduled_tokens, config.decode_input_tokens = MAX_ROWS, 16, 1
    config.enable_mamba, config.mamba_pool_total_chunks, config.mamba_cache_chunk_size = True, 256, PAGE_SIZE
    return ts.Scheduler(config)


def serve(runtime: Runtime, prompts: dict[str, list[int]]) -> tuple[dict[str, list[int]], int, int]:
    """Run all prompts; their tokens, the rows compared, and how many of those were stale."""
    scheduler, compared, stale = make_scheduler(), 0, 0
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
            result, mirror = runtime.run(batch), runtime.rows()
            for i, (name, row, token) in enumerate(zip(batch.request_ids, batch.request_pool_indices, result, strict=True)):
                compared += 1
                stale += mirror[row] != list(batch.occupied_pages[i])
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
            runtime.release(name)
    return tokens, compared, stale


def main() -> None:
    model = Path(sys.argv[1] if len(sys.argv) > 1 else "models/smollm2-135m-instruct")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/runtime.sock"
        shape = ("--page-size", str(PAGE_SIZE), "--num-pages", str(NUM_PAGES), "--max-rows", str(MAX_ROWS), "--device", "cpu")
        command = [sys.executable, "-m", "runtime_service", "--listen", address, "--model", str(model), *shape]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                if not process.stdout.readline():  # one line, once it serves
                    sys.exit("the runtime did not start")
                prompts = {f"r{i}": tokenizer.encode(prompt).ids for i, prompt in enumerate(PROMPTS)}
                tokens, compared, stale = serve(Runtime(address), prompts)
            finally:
                process.terminate()
    for name, prompt in zip(prompts, PROMPTS, strict=True):
        print(f"{prompt.removeprefix(FACTS)}|{tokenizer.decode(tokens[name])!r}")
    print(f"{compared} rows compared, {stale} stale rows")


if __name__ == "__main__":
    main()
