"""Second part of the demonstration: real prompts under page pressure, beside the same prompts served alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from scheduler_service.core.config import RefreshPolicy
from scheduler_service.demo_engine import RuntimeProcess, SteppedEngine, stepped_engine
from scheduler_service.text import HuggingFaceCodec, TextDecoder

PAGE_SIZE = 16
MAX_TOKENS = 40
SYSTEM_PROMPT = (
    "You are a friendly tour guide. You know the cities of the world, their history, their food and their buildings, and you "
    "answer every question in plain words, with one or two interesting details."
)
QUESTIONS = (
    "Tell me about Paris.",
    "Tell me about Vienna.",
    "What should I see in Rome?",
    "What do people eat in Tokyo?",
    "Why is Venice famous?",
    "What is the weather like in Cairo?",
)
RETRACT_AFTER = {6: 0, 20: 1}
"""Step → which request an operator retracts then, on top of those that the pool's pressure retracts."""


@dataclass(slots=True)
class Answer:
    """One request's text so far."""

    question: str
    prompt: list[int]
    decoder: TextDecoder
    text: str = ""
    num_retractions: int = 0
    is_over: bool = False

    @property
    def one_line(self) -> str:
        return " ".join(self.text.split())


@dataclass(slots=True)
class TextRun:
    """All requests of one run."""

    answers: list[Answer]
    num_steps: int = 0
    num_rows: int = 0
    num_equal: int = 0

    @property
    def num_retractions(self) -> int:
        return sum(answer.num_retractions for answer in self.answers)

    def same_as(self, alone: TextRun) -> int:
        """How many texts equal those of `alone`."""
        return sum(a.text == b.text for a, b in zip(self.answers, alone.answers, strict=True))


class Questions:
    """The prompts, in the model's own chat format."""

    def __init__(self, model: Path, stop_ids: tuple[int, ...]) -> None:
        self._codec = HuggingFaceCodec(model)
        self.stop_ids = stop_ids
        self.prompts = []
        for question in QUESTIONS:
            messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
            self.prompts.append(self._codec.encode_messages(messages))

    def new_answers(self) -> list[Answer]:
        return [
            Answer(question, prompt, self._codec.decoder(prompt))
            for question, prompt in zip(QUESTIONS, self.prompts, strict=True)
        ]

    @property
    def tight_pool(self) -> int:
        """Pages for the longest request and five more: enough for any one, too few for all."""
        longest = max(len(prompt) for prompt in self.prompts) + MAX_TOKENS
        return -(-longest // PAGE_SIZE) + 5


async def serve_alone(console: Console, runtime: RuntimeProcess, questions: Questions) -> TextRun:
    """Each prompt by itself on a cold cache: the texts that the others are compared with."""
    run = TextRun(questions.new_answers())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(run.answers))
        for number, answer in enumerate(run.answers, start=1):
            _say(console, progress, task, f"served alone: {number} of {len(run.answers)}")
            async with stepped_engine(runtime, RefreshPolicy.TRANSITION) as engine:
                await _serve(engine, run, [answer], questions.stop_ids)
            progress.advance(task)
    return run


async def serve_together(console: Console, runtime: RuntimeProcess, questions: Questions, policy: RefreshPolicy) -> TextRun:
    """All prompts at once in a pool too small for them, with a few retractions on top; texts are shown as they come."""
    run = TextRun(questions.new_answers())
    async with stepped_engine(runtime, policy, num_pages=questions.tight_pool) as engine:
        # A terminal shows all texts growing; a log gets each when it is complete.
        with Live(console=console, refresh_per_second=8) if console.is_terminal else nullcontext() as live:

            def show(over: list[Answer]) -> None:
                if live is not None:
                    live.update(_table(run))
                for answer in over if live is None else ():
                    lost = f"lost its row {answer.num_retractions}x" if answer.num_retractions else "never lost its row"
                    line = f"  step {run.num_steps}: {answer.question} ({lost}) {answer.one_line}"
                    console.print(line, markup=False, highlight=False, soft_wrap=True)

            await _serve(engine, run, run.answers, questions.stop_ids, RETRACT_AFTER, show)
    return run


async def _serve(
    engine: SteppedEngine,
    run: TextRun,
    answers: list[Answer],
    stop_ids: tuple[int, ...],
    retract_after: dict[int, int] | None = None,
    show: Callable[[list[Answer]], None] = lambda over: None,
) -> None:
    """Serve `answers` to the end; `show` is called after each step with those that ended in it."""
    scheduler = engine.scheduler
    by_id = {str(index): answer for index, answer in enumerate(answers)}
    for request_id, answer in by_id.items():
        scheduler.submit(request_id, answer.prompt, max_tokens=MAX_TOKENS, stop_ids=stop_ids)
    while scheduler.has_work:
        request = scheduler.requests.get(str((retract_after or {}).get(run.num_steps)))
        if request is not None and request.state.holds_row:
            scheduler.retract(request.request_id)
        step = await engine.step()
        run.num_steps += 1
        if step is None:
            continue
        run.num_rows += len(step.rows)
        run.num_equal += sum(view.equal for view in step.rows)
        for request, token in zip(*step.outputs.columns, strict=True):
            answer = by_id[request.request_id]
            answer.text += answer.decoder.push([token])
        for request in (*scheduler.requests.values(), *step.outputs.finished):
            by_id[request.request_id].num_retractions = request.num_retractions
        over = [by_id[request.request_id] for request in step.outputs.finished]
        for answer in over:
            answer.text += answer.decoder.finish()
            answer.is_over = True
        show(over)


def _say(console: Console, progress: Progress, task: TaskID, what: str) -> None:
    progress.update(task, description=what)
    if not console.is_terminal:
        console.print(f"  {what}", highlight=False)


def _table(run: TextRun) -> Table:
    table = Table(show_lines=False)
    table.add_column("prompt", max_width=34)
    table.add_column("lost its row", justify="right")
    table.add_column("answer", ratio=1, overflow="fold")
    for answer in run.answers:
        shown = escape(answer.one_line) + ("" if answer.is_over else " ▌")
        table.add_row(escape(answer.question), str(answer.num_retractions), shown)
    return table
