"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


def make_console() -> Console:
    """A console as wide as the terminal, or wide enough for the tables where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 150))
