"""First part of the demonstration: the worked example, moment by moment, with its words as tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scheduler_service.core.config import RefreshPolicy
from scheduler_service.demo_engine import RowView, RuntimeProcess, StepView, stepped_engine

WORDS = {1: "You", 2: "are", 3: "a", 4: "helpful", 5: "assistant", 6: ".", 7: "Hi", 9: "robot"}
PROMPT_A = [1, 2, 3, 4, 5, 6, 7]
PROMPT_B = [1, 2, 3, 4, 9]
RIGHT_TOKEN, WRONG_TOKEN = 254, 776
PAGE_SIZE = 4


@dataclass(slots=True)
class Moment:
    """One line of the table."""

    what: str
    scheduler: list[int]
    mirror: list[int]
    told: str = ""
    token: str = ""


@dataclass(slots=True)
class ExampleRun:
    """The five moments under one policy."""

    moments: list[Moment] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_rows: int = 0
    num_equal: int = 0

    def note(self, step: StepView) -> RowView:
        """Count a step and its rows; returns the view of request A."""
        self.num_steps += 1
        self.num_rows += len(step.rows)
        self.num_equal += sum(view.equal for view in step.rows)
        self.output += [t for r, t in zip(*step.outputs.columns, strict=True) if r.request_id == "A"]
        return next(view for view in step.rows if view.request.request_id == "A")


async def run_example(runtime: RuntimeProcess, policy: RefreshPolicy) -> ExampleRun:
    """Run the worked example; the runtime has pages of four tokens and runs the fingerprint model."""
    run = ExampleRun()
    async with stepped_engine(runtime, policy) as engine:
        scheduler = engine.scheduler
        scheduler.submit("A", PROMPT_A, max_tokens=3)
        scheduler.submit("B", PROMPT_B, max_tokens=1)
        cold = run.note(await _step(engine.step()))
        run.moments.append(
            Moment("A runs cold, and B beside it, on the same first page of words", cold.scheduler, cold.mirror,
                   _told(cold, full=policy is not RefreshPolicy.TAIL_ONLY, begin=0), str(run.output[-1]))
        )  # fmt: skip
        cached = int(scheduler.placement.cache.match_prefix(cold.request.token_slice(0, PAGE_SIZE)).pages[0])
        run.moments.append(
            Moment(f"B has ended and published its first page: {cached} is the cached copy", cold.scheduler, cold.mirror)
        )
        scheduler.retract("A")
        while (step := await engine.step()) is None:
            pass
        resumed = run.note(step)
        run.moments.append(
            Moment(f"A is retracted and resumes on page {cached}; its own page {cold.scheduler[0]} was freed",
                   resumed.scheduler, resumed.mirror, _told_by(step), str(run.output[-1]))
        )  # fmt: skip
        step = await _step(engine.step())
        grown = run.note(step)
        run.moments.append(
            Moment(f"A grows, and the pool hands page {grown.scheduler[-1]} out again",
                   grown.scheduler, grown.mirror, _told_by(step))
        )  # fmt: skip
        run.moments.append(
            Moment("the model reads A's row through the mirror", grown.scheduler, grown.mirror, token=str(run.output[-1]))
        )
    return run


def show_example(console: Console, run: ExampleRun, policy: RefreshPolicy) -> None:
    """Print the table of one run; entries of the mirror that are not the scheduler's, or are there twice, carry a `!`."""
    right = run.output[-1] == RIGHT_TOKEN
    table = Table(title=f"refresh_policy: {policy.value}", title_style="bold", title_justify="left")
    for header in ("", "what happens", "told to the runtime", "scheduler row", "mirror row", "A's next token"):
        table.add_column(header)
    for number, moment in enumerate(run.moments, start=1):
        last = number == len(run.moments)
        token = Text(moment.token, style=("bold green" if right else "bold red") if last else "")
        if last and not right:
            token.append(f"  wrong, {RIGHT_TOKEN} is right")
        elif last:
            token.append("  right")
        table.add_row(
            str(number), moment.what, moment.told, _row(moment.scheduler), _mirror_row(moment.mirror, moment.scheduler), token
        )
    console.print(table)
    aliased = sorted({page for page in run.moments[-1].mirror if run.moments[-1].mirror.count(page) > 1})
    for page in aliased:
        places = [str(i) for i, entry in enumerate(run.moments[-1].mirror) if entry == page]
        console.print(
            f"  Page {page} is aliased: logical pages {' and '.join(places)} of A are one physical page, so writing the last "
            f"word overwrote {' '.join(WORDS[token] for token in PROMPT_A[:1])!r}.",
            style="red",
        )


def show_words(console: Console) -> None:
    """Print which token stands for which word."""
    a = " ".join(f"{WORDS[token]}={token}" for token in PROMPT_A[:PAGE_SIZE])
    rest = " ".join(f"{WORDS[token]}={token}" for token in PROMPT_A[PAGE_SIZE:])
    b = " ".join(f"{WORDS[token]}={token}" for token in PROMPT_B[PAGE_SIZE:])
    console.print(f"  prompt A: [bold]{a}[/] | {rest}        prompt B: [bold]{a}[/] | {b}        (a page holds 4 tokens)")
    console.print(
        "  The model is a sum over every token it reads through the mirror, so one wrong page changes the next token.\n"
    )


async def _step(pending: object) -> StepView:
    step = await pending  # type: ignore[misc]
    assert isinstance(step, StepView)  # something can always run here
    return step


def _told(view: RowView, *, full: bool, begin: int) -> str:
    sent = view.scheduler if full else view.scheduler[begin:]
    return f"begin={begin} size={len(view.scheduler) - begin} full_refresh={int(full)} {sent}"


def _told_by(step: StepView) -> str:
    index = [request.request_id for request in step.op.requests].index("A")
    view = next(view for view in step.rows if view.request.request_id == "A")
    return _told(view, full=bool(step.op.full_refresh[index]), begin=int(step.op.begins[index]))


def _row(pages: list[int]) -> str:
    return " ".join(f"{page:>2} " for page in pages)


def _mirror_row(mirror: list[int], scheduler: list[int]) -> Text:
    text = Text()
    for i, page in enumerate(mirror):
        wrong = i >= len(scheduler) or scheduler[i] != page or mirror.count(page) > 1
        text.append(f"{page:>2}{'!' if wrong else ' '} ", style="bold red" if wrong else "green")
    return text
