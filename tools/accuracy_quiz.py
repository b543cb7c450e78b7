"""The questions of the accuracy smoke, what counts as a right answer, and the report on them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scheduler_service.text import HuggingFaceCodec

MIN_ALONE = 0.6
MIN_SHARE = 0.75
PAGE_SIZE = 4
SPARE_PAGES = 8  # beyond what the longest request needs alone: room for about two at once


@dataclass(slots=True)
class Question:
    """One question as text and as tokens."""

    ask: str
    accept: list[str]
    prompt: list[int]

    def is_answered_by(self, text: str) -> bool:
        """Whether an accepted answer stands in the text, as whole words, in any case."""
        return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) for answer in self.accept)


@dataclass(slots=True)
class Reply:
    """What one request returned, and how often it lost its row."""

    text: str
    is_right: bool
    num_retractions: int


@dataclass(slots=True)
class Column:
    """One way of serving all questions."""

    replies: list[Reply] = field(default_factory=list)
    num_forced: int = 0  # retractions that this tool asked for; the others are the pool's
    stale_rows: int | None = None  # rows found different from the mirror's; None where nobody looked
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        return self.num_right / len(self.replies)

    @property
    def num_right(self) -> int:
        return sum(reply.is_right for reply in self.replies)

    @property
    def num_retractions(self) -> int:
        return sum(reply.num_retractions for reply in self.replies)


def load_questions(file: Path) -> dict[str, Any]:
    """The file's content: `system`, `max_tokens` and `questions`, a list of `ask` and `accept`."""
    content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content


class Quiz:
    """The questions in the model's chat format, and the pool that is too small for all of them."""

    def __init__(self, file: Path, model: Path, limit: int) -> None:
        content = load_questions(file)
        self.codec = HuggingFaceCodec(model)
        self.max_tokens: int = content["max_tokens"]
        self.questions = []
        for entry in content["questions"][:limit]:
            messages = [{"role": "system", "content": content["system"]}, {"role": "user", "content": entry["ask"]}]
            self.questions.append(Question(entry["ask"], entry["accept"], self.codec.encode_messages(messages)))
        longest = max(len(question.prompt) for question in self.questions) + self.max_tokens
        self.tight_pool = -(-longest // PAGE_SIZE) + SPARE_PAGES

    def reply(self, question: Question, tokens: list[int], num_retractions: int) -> Reply:
        """Judge one output."""
        decoder = self.codec.decoder(question.prompt)
        text = " ".join((decoder.push(tokens) + decoder.finish()).split())
        return Reply(text, question.is_answered_by(text), num_retractions)


def judge(columns: dict[str, Column]) -> list[str]:
    """Why the gate does not hold; empty when it does."""
    alone, pressure = columns["alone"], columns["transition"]
    problems = []
    if alone.accuracy < MIN_ALONE:
        problems.append(
            f"served alone {alone.accuracy:.3f} of the answers are right, below {MIN_ALONE}: nothing to compare with"
        )
    if pressure.num_right < MIN_SHARE * alone.num_right:  # whole numbers: a share of exactly MIN_SHARE passes
        limit = MIN_SHARE * alone.accuracy
        problems.append(
            f"under pressure {pressure.accuracy:.3f} of the answers are right, below {MIN_SHARE} x alone = {limit:.3f}"
        )
    if pressure.num_forced == 0 or pressure.num_retractions <= pressure.num_forced:
        problems.append(f"no pressure: {pressure.num_retractions} retractions, {pressure.num_forced} of them by request")
    return problems


def report(model: Path, quiz: Quiz, columns: dict[str, Column], problems: list[str]) -> dict[str, Any]:
    """The whole outcome as one JSON object."""
    return {
        "model": model.name,
        "num_questions": len(quiz.questions),
        "page_size": PAGE_SIZE,
        "num_pages_under_pressure": quiz.tight_pool,
        "gate": {"min_alone": MIN_ALONE, "min_share_of_alone": MIN_SHARE, "passed": not problems, "problems": problems},
        "columns": {
            name: {
                "accuracy": round(column.accuracy, 4),
                "right": column.num_right,
                "same_text_as_alone": sum(
                    a.text == b.text for a, b in zip(column.replies, columns["alone"].replies, strict=True)
                ),
                "retractions": column.num_retractions,
                "forced_retractions": column.num_forced,
                "stale_rows": column.stale_rows,
                "seconds": round(column.seconds, 1),
            }
            for name, column in columns.items()
        },
        "questions": [
            {"ask": question.ask, "accept": question.accept}
            | {name: asdict(column.replies[number]) for name, column in columns.items()}
            for number, question in enumerate(quiz.questions)
        ],
    }


def print_table(console: Console, quiz: Quiz, columns: dict[str, Column]) -> None:
    """Every answer, and under them the accuracies."""
    table = Table(title=f"{len(quiz.questions)} questions, pool of {quiz.tight_pool} pages of {PAGE_SIZE} under pressure")
    table.add_column("question", ratio=2)
    for name in columns:
        table.add_column(name if name == "alone" else f"under pressure, {name}", ratio=3)
    for number, question in enumerate(quiz.questions):
        cells = []
        for column in columns.values():
            reply = column.replies[number]
            lost = f" [{reply.num_retractions}x retracted]" if reply.num_retractions else ""
            cells.append(Text.assemble(("✓ ", "green") if reply.is_right else ("✗ ", "red"), reply.text, (lost, "dim")))
        table.add_row(question.ask, *cells)
    table.add_section()
    row = [
        f"{column.accuracy:.3f}, {column.num_retractions} retractions ({column.num_forced} forced)"
        for column in columns.values()
    ]
    table.add_row("accuracy", *row, style="bold")
    console.print(table)
