"""Where one step's time goes: core, wire and runtime in one process, with a stopwatch around each stage.

    python benchmarks/_stages.py MODEL_FOLDER CASE

prints one JSON line: microseconds of each stage in a decode step (the median over the steps in which every request decodes) and
in all prefill steps together. A stage's time is its own: what a stage inside it takes is not counted twice. Streams, processes
and the event loop are not part of this; what they cost shows in the CPU seconds of the two-process run.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from _workload import MAX_ROWS, NUM_PAGES, THREADS, TOKEN_BUDGET, Case


class Stopwatch:
    """Own time of named stages that may lie inside one another, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]  # time of the stages inside each open one; the last is the innermost

    def run(self, stage: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call and count."""
        self._inner.append(0.0)
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            elapsed = time.perf_counter() - begin
            self.seconds[stage] += elapsed - self._inner.pop()
            self._inner[-1] += elapsed

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Count every later call of `owner.name`, a method or a function of a module."""
        function = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: self.run(stage, function, *args, **kwargs))

    def take(self) -> dict[str, float]:
        """The counts since the last call."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


def watch_runtime(watch: Stopwatch, runner: Any) -> None:
    """Put the stopwatch around the stages of a runtime's step."""
    from runtime_service.models import decoder  # where the name is looked up at each step

    executor = runner.executor
    watch.watch(runner, "run", "runtime: everything else")
    watch.watch(runner.session, "check", "runtime: check of the op")
    watch.watch(runner.mirror, "apply", "runtime: mirror")
    watch.watch(runner._builder, "build", "runtime: batch")
    watch.watch(executor.decoder, "forward", "model: projections, norms, MLP")
    watch.watch(executor.decoder, "logits", "model: logits")
    watch.watch(executor.sampler, "choose", "model: sampling")
    plan_attention = decoder.plan_attention
    watched: set[type] = set()

    def plan(*args: Any, **kwargs: Any) -> Any:
        made = plan_attention(*args, **kwargs)
        if type(made) not in watched:
            watched.add(type(made))
            watch.watch(type(made), "write", "model: KV write")
            watch.watch(type(made), "attend", "model: attention")
        return made

    decoder.plan_attention = lambda *args, **kwargs: watch.run("model: attention plan", plan, *args, **kwargs)


def measure(model: Path, case: Case) -> dict[str, Any]:
    """Run the case twice and look at the second time."""
    import torch

    from runtime_service.app import load
    from runtime_service.errors import Refusal
    from runtime_service.settings import load_settings
    from runtime_service.wire import op_from_proto, result_to_proto
    from scheduler_service.core.config import SchedulerConfig
    from scheduler_service.core.scheduler import Scheduler
    from scheduler_service.wire import op_to_proto, result_from_proto

    torch.set_num_threads(THREADS)
    settings = load_settings(model=str(model), device="cpu", num_pages=NUM_PAGES, max_rows=MAX_ROWS)
    runner, facts = load(settings)
    runner.open(1, 1, 0)
    limits = (facts.page_size, facts.num_pages, facts.max_rows, facts.max_pages_per_row, facts.model.vocab_size)
    scheduler = Scheduler(SchedulerConfig(*limits, token_budget=TOKEN_BUDGET, overlap_depth=0, prefix_cache=False))
    watch = Stopwatch()
    watch_runtime(watch, runner)
    decode_steps: list[dict[str, float]] = []
    prefill: dict[str, float] = defaultdict(float)
    num_prefill_steps = 0
    for is_timed in (False, True):
        for number, job in enumerate(case.jobs()):
            scheduler.submit(str(number), job.prompt, max_tokens=job.num_new)
        while scheduler.has_work:
            watch.take()
            op = watch.run("scheduler: plan", scheduler.plan)
            message = watch.run("wire: op out", op_to_proto, op)
            data = watch.run("wire: op out", message.SerializeToString)
            received = watch.run("wire: op in", type(message).FromString, data)
            received = watch.run("wire: op in", op_from_proto, received)
            answer = runner.run(received)
            if isinstance(answer, Refusal):
                raise SystemExit(f"the runtime refused a step: {answer}")
            reply = watch.run("wire: result out", result_to_proto, answer)
            data = watch.run("wire: result out", reply.SerializeToString)
            reply = watch.run("wire: result in", type(reply).FromString, data)
            result = watch.run("wire: result in", result_from_proto, reply.result, op.num_rows)
            watch.run("scheduler: complete", scheduler.complete, result)
            watch.run("scheduler: complete", scheduler.take_outputs)
            seconds = watch.take()
            if not is_timed:
                continue
            if op.num_extend_rows == 0 and op.num_rows == case.num_requests:
                decode_steps.append(seconds)
            elif op.num_extend_rows:
                num_prefill_steps += 1
                for stage, value in seconds.items():
                    prefill[stage] += value
    stages = sorted({stage for step in decode_steps for stage in step} | set(prefill))
    return {
        "case": case.name,
        "num_decode_steps": len(decode_steps),
        "num_prefill_steps": num_prefill_steps,
        "decode_step_us": {stage: round(median(step.get(stage, 0.0) for step in decode_steps) * 1e6, 1) for stage in stages},
        "prefill_us": {stage: round(prefill.get(stage, 0.0) * 1e6, 1) for stage in stages},
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), Case.parse(sys.argv[2]))), flush=True)
