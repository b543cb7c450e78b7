"""The parties of the benchmark. Each runs in a process of its own:

    python benchmarks/_parties.py PARTY MODEL_FOLDER CASE ...

which prints a JSON line for each timed run of a case: what it took from the first request going in to the last token coming
out, and the tokens, so that the parent can compare them. An untimed run goes before; loading is not part of the time either.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _workload import MAX_ROWS, NUM_PAGES, THREADS, TOKEN_BUDGET, Case, Job

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

_STEP_LIMIT_S = 120.0
RUNS = (False, True, True, True)  # of each case: whether it is timed

Tokens = list[list[int]]


# --- ours ------------------------------------------------------------------------------------------------------------------


async def serve_generate(model: Path, cases: list[Case]) -> None:
    """The product as users run it: `pagemirror up`, one `Generate` stream a request, all at once, from one client process."""
    from serving import served

    from scheduler_service.client import Client

    options = ("--model", str(model), "--num-pages", str(NUM_PAGES), "--max-rows", str(MAX_ROWS))
    # Every round has the same prompts, and nobody's prompts are to be cached.
    async with served(*options, "--no-prefix-cache", "--token-budget", str(TOKEN_BUDGET)) as target, Client(target) as client:

        async def one(job: Job) -> list[int]:
            tokens: list[int] = []
            async for piece in client.generate(job.prompt, max_tokens=job.num_new, ignore_default_stop_ids=True):
                tokens += piece.tokens
            return tokens

        for case in cases:
            jobs = case.jobs()
            for is_timed in RUNS:
                clock = Clock()
                outputs = await asyncio.gather(*map(one, jobs))
                clock.stop()
                if is_timed:
                    say(case, clock, outputs)


async def drive_execute(model: Path, cases: list[Case]) -> None:
    """The runtime alone: the scheduler's core in this process drives one `Execute` stream; no client streams."""
    from scheduler_service.core.config import SchedulerConfig
    from scheduler_service.core.scheduler import Scheduler
    from scheduler_service.demo_engine import runtime_process
    from scheduler_service.up import socket_base
    from scheduler_service.wire import StepRefusal

    options = ("--model", str(model), "--num-pages", str(NUM_PAGES), "--max-rows", str(MAX_ROWS), "--log-level", "warning")
    wake = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="pagemirror-", dir=socket_base()) as folder:
        async with runtime_process(Path(folder), "runtime", *options) as runtime:
            link, facts = await runtime.session(wake.set)
            limits = (facts.page_size, facts.num_pages, facts.max_rows, facts.max_pages_per_row, facts.vocab_size)
            config = SchedulerConfig(*limits, facts.max_context, TOKEN_BUDGET, overlap_depth=1, prefix_cache=False)
            scheduler = Scheduler(config, session_no=runtime.session_no)
            for case in cases:
                jobs = case.jobs()
                for is_timed in RUNS:
                    clock = Clock()
                    outputs: Tokens = [[] for _ in jobs]
                    for number, job in enumerate(jobs):
                        scheduler.submit(str(number), job.prompt, max_tokens=job.num_new)
                    while scheduler.has_work:
                        while scheduler.num_in_flight <= config.overlap_depth and (op := scheduler.plan()) is not None:
                            link.send(op)
                        async with asyncio.timeout(_STEP_LIMIT_S):
                            while not link.answers and link.broken is None:
                                wake.clear()
                                await wake.wait()
                        while link.answers:
                            outcome = link.answers.popleft().outcome
                            if isinstance(outcome, StepRefusal):
                                raise SystemExit(f"the runtime refused a step: {outcome}")
                            scheduler.complete(outcome)
                        if link.broken is not None:
                            raise link.broken
                        for request, token in zip(*scheduler.take_outputs().columns, strict=True):
                            outputs[int(request.request_id)].append(token)
                    clock.stop()
                    if is_timed:
                        say(case, clock, outputs)
            await link.close()


# --- peers -----------------------------------------------------------------------------------------------------------------


def _load_peer(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()


def generate_static(folder: Path, cases: list[Case]) -> None:
    """Static batching of transformers: one batch, padded on the left; every row runs as long as the longest needs."""
    import torch
    from transformers import GenerationConfig

    model = _load_peer(folder)
    for case in cases:
        jobs = case.jobs()
        width = max(len(job.prompt) for job in jobs)
        ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in jobs])
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs])
        longest = max(job.num_new for job in jobs)
        config = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=longest, min_new_tokens=longest)
        for is_timed in RUNS:
            clock = Clock()
            with torch.inference_mode():
                output = model.generate(ids, attention_mask=mask, generation_config=config)
            rows = output[:, width:].tolist()
            clock.stop()
            if is_timed:
                say(case, clock, [row[: job.num_new] for row, job in zip(rows, jobs, strict=True)])


def generate_continuous(folder: Path, cases: list[Case]) -> None:
    """Continuous batching of transformers: each request by itself, paged KV. Its manager stays up between rounds."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _load_peer(folder)
    config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1)
    # One page a request, and no more pages than requests: of those tried, what its CPU path is fastest with.
    paging = ContinuousBatchingConfig(page_size=256, num_blocks=MAX_ROWS, max_batch_tokens=512)
    for case in cases:
        jobs = case.jobs()
        manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=paging)
        manager.start()
        try:
            # One short untimed round: a whole one would take minutes.
            for timed_jobs, is_timed in (([Job(jobs[0].prompt, 2)], False), (jobs, True)):
                clock = Clock()
                for number, job in enumerate(timed_jobs):
                    manager.add_request(job.prompt, request_id=f"{is_timed}-{number}", max_new_tokens=job.num_new)
                outputs: Tokens = [[] for _ in timed_jobs]
                left = len(timed_jobs)
                while left:
                    result = manager.get_result(timeout=60)
                    if result is None or result.error is not None:
                        raise RuntimeError(f"continuous batching stopped: {result.error if result else 'no result for 60 s'}")
                    if result.is_finished():
                        outputs[int(result.request_id.partition("-")[2])] = list(result.generated_tokens)
                        left -= 1
                clock.stop()
                if is_timed:
                    say(case, clock, outputs)
        finally:
            manager.stop(block=True)


# --- the process -------------------------------------------------------------------------------------------------------------


class Clock:
    """Wall time and CPU time of one round, in seconds: runs from when it is made until `stop`."""

    def __init__(self) -> None:
        self._cpu = cpu_seconds_by_process()
        self._begin = time.perf_counter()
        self.seconds = 0.0
        self.cpu_seconds: dict[str, float] = {}

    def stop(self) -> None:
        """Take both."""
        self.seconds = time.perf_counter() - self._begin
        self.cpu_seconds = {name: round(value - self._cpu[name], 3) for name, value in cpu_seconds_by_process().items()}


def cpu_seconds_by_process() -> dict[str, float]:
    """CPU seconds so far of this process and of ours that it has started; of this one alone where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        return {"party": time.process_time()}
    found = {"party": os.getpid()}
    for child in _descendants(os.getpid()):
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"runtime_service" in words:
            found["runtime"] = child
        elif b"scheduler" in words:
            found["scheduler"] = child
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = {}
    for name, pid in found.items():
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        seconds[name] = (int(fields[11]) + int(fields[12])) / ticks
    return seconds


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            yield int(child)
            yield from _descendants(int(child))


def say(case: Case, clock: Clock, outputs: Tokens) -> None:
    """One line for the parent."""
    line = {"case": case.name, "seconds": clock.seconds, "cpu_seconds": clock.cpu_seconds, "outputs": outputs}
    print(json.dumps(line), flush=True)


def main() -> None:
    party, model, cases = sys.argv[1], Path(sys.argv[2]), [Case.parse(name) for name in sys.argv[3:]]
    if party == "generate":
        asyncio.run(serve_generate(model, cases))
    elif party == "execute":
        asyncio.run(drive_execute(model, cases))
    elif party == "static":
        generate_static(model, cases)
    elif party == "continuous":
        generate_continuous(model, cases)
    else:
        raise SystemExit(f"no party {party!r}")


if __name__ == "__main__":
    main()
