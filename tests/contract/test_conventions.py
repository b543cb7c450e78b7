"""Rules for tests that a linter has no rule for."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

LONGEST_PAUSE_S = 0.1


@pytest.fixture(scope="module")
def trees(project_root: Path) -> dict[str, ast.Module]:
    """Every file of tests/, parsed, by its path below tests/."""
    tests = project_root / "tests"
    return {str(path.relative_to(tests)): ast.parse(path.read_text(), str(path)) for path in sorted(tests.rglob("*.py"))}


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that pytest collects, those of classes included."""
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    while scopes:
        for node in scopes.pop().body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                scopes.append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield node


def _sleeps(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of time.sleep, and of asyncio.sleep with a number longer than a yield to the event loop."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
            module = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            number = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else 0
            if module == "time" or (module == "asyncio" and isinstance(number, int | float) and number > LONGEST_PAUSE_S):
                yield node


def test_every_test_says_what_it_is_about(trees: dict[str, ast.Module]) -> None:
    """Each test has a docstring of one paragraph that ends like a sentence."""
    wordless = []
    for file, tree in trees.items():
        for test in _tests(tree):
            words = ast.get_docstring(test) or ""
            if not words.endswith((".", "?", "!")) or "\n\n" in words:
                wordless.append(f"{file}:{test.lineno} {test.name}")
    assert wordless == []


def test_no_test_sleeps(trees: dict[str, ast.Module]) -> None:
    """Tests wait for conditions, with a timeout; a pause for good luck is slow on fast machines and too short on slow ones."""
    asleep = [f"{file}:{call.lineno}" for file, tree in trees.items() for call in _sleeps(tree)]
    assert asleep == []


def test_file_names_are_unique(trees: dict[str, ast.Module]) -> None:
    """A file name alone says which test failed."""
    names = Counter(Path(file).name for file in trees if Path(file).name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
