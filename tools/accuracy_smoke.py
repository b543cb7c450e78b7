"""Accuracy smoke: does a real model still answer right when its requests lose their pages and get others?

    python tools/accuracy_smoke.py [--limit 8] [--json build/accuracy-smoke.json]

Short questions are answered greedily three times: each alone by `pagemirror up` on an empty cache; all at once by
`pagemirror up` with a pool that holds a few of them, while a third of them is retracted again and again through the Retract
call; and the same under the broken `tail_only` policy, which no scheduler serves: there the core is stepped in this process,
against a runtime whose checks are off.

The gate: at least MIN_ALONE of the questions right when served alone (below that the next figure says nothing), and at least
MIN_SHARE of that under pressure. It is not "the same answers": a prompt that is computed again in one piece rounds differently
from one that was computed token by token, and a near tie may fall the other way. `tail_only` is reported, not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from accuracy_quiz import PAGE_SIZE, Column, Question, Quiz, Reply, judge, print_table, report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from serving import ServingError, project_root, served

from scheduler_service.client import Client, RpcFailedError
from scheduler_service.core.config import RefreshPolicy
from scheduler_service.core.errors import PagemirrorError
from scheduler_service.demo_engine import runtime_process, stepped_engine
from scheduler_service.up import socket_base

RETRACT_AT = (3, 9)  # output tokens after which a request is retracted …
RETRACT_EVERY = 3  # … if its number is a multiple of this

Advance = Callable[[], None]


async def serve_alone(model: Path, quiz: Quiz, advance: Advance) -> Column:
    """One request at a time, each on an empty prefix cache, through both processes."""
    column = Column()
    async with served("--model", str(model), "--page-size", str(PAGE_SIZE)) as target, Client(target) as client:
        for question in quiz.questions:
            await client.reset_prefix_cache()
            column.replies.append(await _ask(client, quiz, question, str(len(column.replies)), (), column))
            advance()
    return column


async def serve_under_pressure(model: Path, quiz: Quiz, advance: Advance) -> Column:
    """All requests at once in a small pool, some of them retracted while they stream, through both processes."""
    column = Column()
    pool = ("--page-size", str(PAGE_SIZE), "--num-pages", str(quiz.tight_pool))
    async with served("--model", str(model), *pool, "--check") as target, Client(target) as client:

        async def ask(number: int, question: Question) -> Reply:
            reply = await _ask(client, quiz, question, str(number), _retract_at(number), column)
            advance()
            return reply

        column.replies = await asyncio.gather(*(ask(*item) for item in enumerate(quiz.questions)))
    return column


async def _ask(
    client: Client, quiz: Quiz, question: Question, request_id: str, retract_at: tuple[int, ...], column: Column
) -> Reply:
    tokens: list[int] = []
    num_retractions = 0
    left = list(retract_at)
    async for piece in client.generate(question.prompt, max_tokens=quiz.max_tokens, request_id=request_id):
        tokens += piece.tokens
        if piece.ending is not None:
            num_retractions = piece.ending.num_retractions
        elif left and len(tokens) >= left[0]:
            left.pop(0)
            # It may have lost its row, or have ended, before the call arrives.
            with contextlib.suppress(RpcFailedError):
                await client.retract(request_id)
                column.num_forced += 1
    return quiz.reply(question, tokens, num_retractions)


async def serve_tail_only(model: Path, quiz: Quiz, advance: Advance) -> Column:
    """The same pressure under the broken policy: the core is stepped here, the runtime is a process with its checks off."""
    column = Column(stale_rows=0)
    outputs: list[list[int]] = [[] for _ in quiz.questions]
    retractions = [0] * len(quiz.questions)
    left = {str(number): list(_retract_at(number)) for number in range(len(quiz.questions))}
    arguments = ("--model", str(model), "--page-size", str(PAGE_SIZE), "--num-pages", str(quiz.tight_pool))
    with tempfile.TemporaryDirectory(prefix="pagemirror-", dir=socket_base()) as folder:
        async with (
            runtime_process(Path(folder), "tail", *arguments, "--demonstrate-tail-only") as runtime,
            stepped_engine(runtime, RefreshPolicy.TAIL_ONLY) as engine,
        ):
            stop_ids = engine.facts.default_stop_ids
            scheduler = engine.scheduler
            for number, question in enumerate(quiz.questions):
                scheduler.submit(str(number), question.prompt, max_tokens=quiz.max_tokens, stop_ids=stop_ids)
            while scheduler.has_work:
                step = await engine.step()
                if step is None:
                    continue
                column.stale_rows = (column.stale_rows or 0) + sum(not view.equal for view in step.rows)
                for request, token in zip(*step.outputs.columns, strict=True):
                    outputs[int(request.request_id)].append(token)
                for request in step.outputs.finished:
                    retractions[int(request.request_id)] = request.num_retractions
                    advance()
                for request in list(scheduler.requests.values()):
                    when = left[request.request_id]
                    if when and request.num_output >= when[0] and request.state.holds_row:
                        when.pop(0)
                        scheduler.retract(request.request_id)
                        column.num_forced += 1
    column.replies = [
        quiz.reply(question, tokens, count)
        for question, tokens, count in zip(quiz.questions, outputs, retractions, strict=True)
    ]
    return column


def _retract_at(number: int) -> tuple[int, ...]:
    return RETRACT_AT if number % RETRACT_EVERY == 0 else ()


async def run(model: Path, quiz: Quiz, console: Console) -> dict[str, Column]:
    """All columns, one after the other; progress goes to `console`."""
    parts = {"alone": serve_alone, "transition": serve_under_pressure, "tail_only": serve_tail_only}
    columns = {}
    bar = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console, disable=not console.is_terminal) as progress:
        for name, serve in parts.items():
            task = progress.add_task(name, total=len(quiz.questions))
            begin = time.monotonic()
            columns[name] = await serve(model, quiz, lambda task=task: progress.advance(task))  # type: ignore[misc]
            columns[name].seconds = time.monotonic() - begin
            if not console.is_terminal:
                console.print(f"{name}: {columns[name].accuracy:.3f} in {columns[name].seconds:.0f} s", highlight=False)
    return columns


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer short questions alone and under page pressure, and compare.")
    parser.add_argument("--model", type=Path, default=project_root() / "models" / "smollm2-135m-instruct")
    parser.add_argument("--questions", type=Path, default=project_root() / "tests" / "smoke" / "questions.yaml")
    parser.add_argument("--limit", type=int, default=40, help="take only the first of the questions")
    parser.add_argument(
        "--json", type=Path, default=project_root() / "build" / "accuracy-smoke.json", help="where the report goes"
    )
    options = parser.parse_args()
    if not (options.model / "model.safetensors").is_file():
        print(f"error: no model in {options.model}: run `make model`", file=sys.stderr)
        return 2
    if options.limit < 1:
        parser.error(f"--limit: at least 1 question, not {options.limit}")
    quiz = Quiz(options.questions, options.model, options.limit)
    try:
        columns = asyncio.run(run(options.model, quiz, Console(stderr=True)))
    except (PagemirrorError, ServingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    problems = judge(columns)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(report(options.model, quiz, columns, problems), indent=2, ensure_ascii=False)
    options.json.write_text(content + "\n", encoding="utf-8")
    print_table(Console(width=None if sys.stdout.isatty() else 160), quiz, columns)
    print(f"report: {options.json}")
    for problem in problems:
        print(f"gate: {problem}")
    print("gate: failed" if problems else "gate: passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
