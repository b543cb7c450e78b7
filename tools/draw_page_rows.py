"""Draw docs/images/worked-example.svg: request A's page row at the moments of examples/worked_example.yaml, on both sides.

Each moment shows the scheduler's row, the mirror that was told appended tails only, and the mirror that was told
`full_refresh`. The rows are data here; a test compares them with what `pagemirror simulate` prints.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


@dataclass(frozen=True)
class Moment:
    """One line of the picture; rows are page ids by logical index, empty when A holds no row."""

    step: int
    title: str
    note: str
    row: tuple[int, ...]
    tail_only: tuple[int, ...]
    refreshed: tuple[int, ...]


MOMENTS = (
    Moment(0, "A is admitted", "cold: both pages are its own", (1, 2), (1, 2), (1, 2)),
    Moment(0, "B ends", "page 3, same four tokens, enters the tree", (1, 2), (1, 2), (1, 2)),
    Moment(1, "A is retracted", "its page 1 duplicates page 3 and is freed", (), (), ()),
    Moment(2, "A resumes", "logical 0 is page 3; nothing was appended", (3, 2), (1, 2), (3, 2)),
    Moment(3, "A grows", "the pool grants page 1 again", (3, 2, 1), (1, 2, 1), (3, 2, 1)),
)

COLOURS = {1: "#f4b183", 2: "#9dc3e6", 3: "#a9d18e"}
CELL, LINE, TOP, LEFT = 44, 74, 78, 300
COLUMNS = (("scheduler row", LEFT), ("mirror, tails only", LEFT + 200), ("mirror, full_refresh", LEFT + 400))
WIDTH, HEIGHT = LEFT + 600, TOP + LINE * len(MOMENTS) + 56


def text(x: int, y: int, words: str, *, size: int = 14, weight: str = "normal", fill: str = "#1f2328") -> str:
    """One line of text, its left end at x and its baseline at y."""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{fill}">{escape(words)}</text>'


def cells(x: int, y: int, pages: tuple[int, ...], right: tuple[int, ...]) -> list[str]:
    """A row of boxes; an entry that differs from the scheduler's has a thick red frame."""
    if not pages:
        return [text(x, y + 28, "no row", fill="#6e7781")]
    drawn = []
    for index, page in enumerate(pages):
        wrong = page != right[index]
        stroke, width = ("#cf222e", 4) if wrong else ("#57606a", 1)
        left = x + index * (CELL + 4)
        drawn.append(
            f'<rect x="{left}" y="{y}" width="{CELL}" height="{CELL}" rx="5" fill="{COLOURS[page]}" stroke="{stroke}"'
            f' stroke-width="{width}"/>'
        )
        drawn.append(text(left + 18, y + 28, str(page), size=17, weight="bold"))
    return drawn


def draw() -> str:
    """The whole picture."""
    words = "Page row of request A at five moments: scheduler, a mirror told tails only, a mirror told full_refresh"
    frame = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, Arial, sans-serif"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img" aria-label="{escape(words)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
        text(24, 36, "Request A, page by page", size=18, weight="bold"),
    ]
    lines += [text(x, 62, name, weight="bold") for name, x in COLUMNS]
    for number, moment in enumerate(MOMENTS):
        y = TOP + number * LINE
        lines.append(f'<line x1="24" y1="{y - 4}" x2="{WIDTH - 24}" y2="{y - 4}" stroke="#d0d7de"/>')
        lines.append(text(24, y + 24, f"step {moment.step}: {moment.title}", weight="bold"))
        lines.append(text(24, y + 44, moment.note, size=12, fill="#57606a"))
        for pages, (_, x) in zip((moment.row, moment.tail_only, moment.refreshed), COLUMNS, strict=True):
            lines += cells(x, y + 10, pages, moment.row)
    y = TOP + len(MOMENTS) * LINE + 20
    lines.append(text(24, y, "A's token of step 3", weight="bold"))
    lines.append(text(COLUMNS[0][1], y, "254 by definition", size=12))
    lines.append(text(COLUMNS[1][1], y, "776: logical 0 and 2 are one page", fill="#cf222e", size=12))
    lines.append(text(COLUMNS[2][1], y, "254: right", fill="#1a7f37", size=12))
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder to write into")
    path = parser.parse_args().out / "worked-example.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(), encoding="utf-8")
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
