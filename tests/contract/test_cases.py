"""Every case has one test and one row in the table of docs/cases.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

CASES = [f"B{number:02}" for number in range(1, 70)]
ROW = re.compile(r"^\| (B\d\d) \|(?P<words>.*)\| `(?P<test>\w+)` \|$", re.MULTILINE)


def _functions(root: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Top-level test functions of tests/cases."""
    files = sorted((root / "tests" / "cases").rglob("test_*.py"))
    bodies = [node for path in files for node in ast.parse(path.read_text(), str(path)).body]
    functions = [node for node in bodies if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function for function in functions if function.name.startswith("test_")]


def test_every_case_has_one_test(project_root: Path) -> None:
    """Each id names exactly one function, which runs once, and whose sentence names the report."""
    functions = _functions(project_root)
    ids = Counter(function.name[5:8].upper() for function in functions)
    assert ids == Counter(CASES)
    decorated = {function.name: ast.dump(ast.Module(function.decorator_list, [])) for function in functions}
    assert [name for name, marks in decorated.items() if "parametrize" in marks] == []
    sources = {function.name: ast.get_docstring(function) or "" for function in functions}
    assert [name for name, words in sources.items() if not re.search(r"\w#\d+", words)] == []


def test_every_case_has_one_row(project_root: Path) -> None:
    """The table has each id once, in order, and names its test."""
    rows = list(ROW.finditer((project_root / "docs" / "cases.md").read_text()))
    assert [row[1] for row in rows] == CASES
    assert [row["test"] for row in rows] == sorted(function.name for function in _functions(project_root))
    assert [row[1] for row in rows if row["words"].count("|") != 1] == []
