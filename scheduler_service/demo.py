"""`pagemirror demo`: see a stale page table happen and not happen, then real text under page pressure.

The scheduler is in this process, the runtimes are processes of their own, and every step goes over gRPC.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from rich.markup import escape

from scheduler_service.console import make_console
from scheduler_service.core.config import RefreshPolicy
from scheduler_service.core.errors import PagemirrorError
from scheduler_service.demo_engine import RuntimeProcess, runtime_process
from scheduler_service.demo_example import (
    PAGE_SIZE,
    RIGHT_TOKEN,
    WRONG_TOKEN,
    run_example,
    show_example,
    show_words,
)
from scheduler_service.demo_text import PAGE_SIZE as TEXT_PAGE_SIZE
from scheduler_service.demo_text import Questions, serve_alone, serve_together

DEFAULT_MODEL = Path("models/smollm2-135m-instruct")
BROKEN = "--demonstrate-tail-only"
"""Hidden option of the runtime: the checks that refuse a tail-only scheduler are off."""


def main(model: Path | None = None) -> int:
    """Run both parts; returns the exit status, 0 only if every mirror row was the scheduler's."""
    folder = model or DEFAULT_MODEL
    if not (folder / "config.json").is_file():
        print(f"error: no model in {folder}; `make model` fetches one, --model names another", file=sys.stderr)
        return 2
    try:
        return asyncio.run(_demo(folder.resolve()))
    except PagemirrorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _demo(model: Path) -> int:
    console = make_console()
    text_args = ("--model", str(model), "--page-size", str(TEXT_PAGE_SIZE), "--num-pages", "256", "--max-rows", "8")
    example_args = ("--model", "fingerprint", "--page-size", str(PAGE_SIZE), "--num-pages", "16", "--max-rows", "8")
    with tempfile.TemporaryDirectory(prefix="pagemirror-demo-") as name:
        folder = Path(name)
        async with (
            runtime_process(folder, "example", *example_args) as example,
            runtime_process(folder, "example-broken", *example_args, BROKEN) as example_broken,
            runtime_process(folder, "text", *text_args) as text,
            runtime_process(folder, "text-broken", *text_args, BROKEN) as text_broken,
        ):
            console.rule("[bold]1. The worked example", align="left")
            show_words(console)
            with console.status("starting the runtimes"):
                wrong = await run_example(example_broken, RefreshPolicy.TAIL_ONLY)
                right = await run_example(example, RefreshPolicy.TRANSITION)
            show_example(console, wrong, RefreshPolicy.TAIL_ONLY)
            show_example(console, right, RefreshPolicy.TRANSITION)

            console.rule("[bold]2. Real text under page pressure", align="left")
            with console.status(f"loading {model.name}"):
                questions = await _questions(text, model)
            size = f"{questions.tight_pool} pages of {TEXT_PAGE_SIZE} tokens"
            console.print(
                f"  {escape(model.name)}: {len(questions.prompts)} prompts with one system prompt, and {size}, too few for "
                "all: requests lose their rows and resume while they stream\n"
            )
            alone = await serve_alone(console, text, questions)
            together = await serve_together(console, text, questions, RefreshPolicy.TRANSITION)
            same = together.same_as(alone)
            console.print(
                f"  transition: {same} of {len(questions.prompts)} texts equal those served alone; "
                f"rows were lost {together.num_retractions} times\n"
            )
            broken = await serve_together(console, text_broken, questions, RefreshPolicy.TAIL_ONLY)
            console.print(
                f"  tail_only:  {broken.same_as(alone)} of {len(questions.prompts)} texts equal those served alone; "
                f"{broken.num_rows - broken.num_equal} of {broken.num_rows} mirror rows were stale\n"
            )
    steps = right.num_steps + alone.num_steps + together.num_steps
    rows = right.num_rows + alone.num_rows + together.num_rows
    equal = right.num_equal + alone.num_equal + together.num_equal
    if equal != rows or right.output[-1] != RIGHT_TOKEN or wrong.output[-1] != WRONG_TOKEN:
        console.print(
            f"FAILED: {rows - equal} of {rows} mirror rows were not the scheduler's; A's last token {right.output[-1]}"
        )
        return 1
    console.print(f"OK: {steps} steps, {rows} rows compared, mirror == scheduler rows", highlight=False)
    return 0


async def _questions(runtime: RuntimeProcess, model: Path) -> Questions:
    link, facts = await runtime.session(lambda: None)
    await link.close()
    return Questions(model, facts.default_stop_ids)
