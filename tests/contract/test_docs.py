"""The written part of the project: links lead somewhere, generated parts are fresh, examples load, no machine leaks in."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from runtime_service.settings import RuntimeSettings
from scheduler_service.settings import SchedulerSettings

# Folders that are made by tools and never checked in.
BUILT = {".git", ".venv", "models", "dist", "build", "__pycache__", ".hypothesis"}
TEXT = {".md", ".py", ".pyi", ".toml", ".yaml", ".yml", ".proto", ".txt", ".svg", ".cfg", ".sh", ".json", ""}
# Homes and working folders of particular machines, "user" being nobody in particular. In pieces, so as not to find itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.~-])/(?:" + "|".join(["ho" + "me", "ro" + "ot", "wo" + "rk", "Us" + "ers"]) + r")/(?!user\b)\w"
)


def _sources(root: Path) -> list[Path]:
    """Text files of the tree that are ours."""
    found: list[Path] = []
    todo = [root]
    while todo:
        for path in sorted(todo.pop().iterdir()):
            if path.is_dir():
                if path.name not in BUILT and not path.name.endswith(("_cache", ".egg-info")):
                    todo.append(path)
            elif path.suffix in TEXT:
                found.append(path)
    return found


def _pages(root: Path) -> list[Path]:
    return [path for path in _sources(root) if path.suffix == ".md"]


def _without_code(text: str) -> str:
    """Markdown without fenced blocks, whose brackets are not links."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """The fragments that a Markdown viewer makes of a page's headings."""
    heads = re.findall(r"^#+ +(.+)$", _without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.fixture(scope="module")
def diagram(project_root: Path) -> ModuleType:
    """tools/generate_state_diagram.py as a module; tools/ is no package."""
    path = project_root / "tools" / "generate_state_diagram.py"
    spec = importlib.util.spec_from_file_location("generate_state_diagram", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_state_diagram_is_fresh(diagram: ModuleType, project_root: Path) -> None:
    """The diagram and the table of docs/state-machine.md are those of the transition table."""
    page = (project_root / "docs/state-machine.md").read_text()
    assert diagram.render(page) == page


def test_state_diagram_notices_a_changed_page(diagram: ModuleType, project_root: Path) -> None:
    """An edited line between the markers does not survive, and a page without markers is an error."""
    page = (project_root / "docs/state-machine.md").read_text()
    assert diagram.render(page.replace("Decoding --> Retracted : Retract", "Decoding --> Finished : Retract")) == page
    with pytest.raises(ValueError, match="markers"):
        diagram.render(page.replace(diagram.END, ""))


def test_links_lead_somewhere(project_root: Path) -> None:
    """Every relative link of every page names an existing file, and every fragment a heading of it."""
    broken = []
    for page in _pages(project_root):
        for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
            if "://" in target:
                continue
            name, _, fragment = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists() or (fragment and fragment not in _anchors(file.read_text())):
                broken.append(f"{page.relative_to(project_root)}: {target}")
    assert broken == []


def test_files_named_by_the_design_exist(project_root: Path) -> None:
    """The tables of parts in docs/design.md name files and folders that are there."""
    page = (project_root / "docs/design.md").read_text()
    for service in ("scheduler", "runtime"):
        _, _, part = page.partition(f"## Parts of the {service}\n")
        cells = re.findall(r"^\| (`.+?) \|", part.partition("\n## ")[0], re.MULTILINE)
        names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
        assert len(names) >= 8
        assert [name for name in names if not (project_root / f"{service}_service" / name).exists()] == []


def test_refusal_codes_are_documented_as_the_wire_has_them(project_root: Path) -> None:
    """docs/protocol.md lists every refusal code, in order, with the gRPC status that runtime.proto puts beside it."""
    proto = (project_root / "proto/pagemirror/v1/runtime.proto").read_text()
    body = re.search(r"^enum RefusalCode \{(.*?)^\}", proto, re.MULTILINE | re.DOTALL)
    assert body
    codes = re.findall(r"\[([A-Z_]+)\]\s+REFUSAL_CODE_(\w+) = \d+;", body[1])
    page = (project_root / "docs/protocol.md").read_text()
    assert len(codes) == 19
    assert re.findall(r"^\| ([A-Z_]+) \| .+ \| ([A-Z_]+) \|$", page, re.MULTILINE) == [(code, like) for like, code in codes]


def test_settings_in_the_readme_are_those_of_the_code(project_root: Path) -> None:
    """Every option of the two tables exists, and a default that is a plain value is the one stated."""
    readme = (project_root / "README.md").read_text()
    for service, settings in (("scheduler", SchedulerSettings), ("runtime", RuntimeSettings)):
        fields = settings.model_fields
        _, _, table = readme.partition(f"| {service} | default | |\n")
        options = re.findall(r"^\| (`--.+?) \| (.+?) \|", table.partition("\n\n")[0], re.MULTILINE)
        assert len(options) >= 7
        for cell, stated in options:
            for option in re.findall(r"`--([a-z-]+)`", cell):
                default = fields[option.replace("-", "_")].default
                if isinstance(default, str | int | float) and not isinstance(default, bool):
                    assert stated == f"{default:g}" if isinstance(default, float) else stated == str(default), option


def test_every_page_can_be_reached_from_the_readme(project_root: Path) -> None:
    """No page of docs/ is an orphan."""
    seen: set[Path] = set()
    todo = [project_root / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)\s#]+\.md)(?:#[^)\s]*)?\)", _without_code(page.read_text()))
        todo += [(page.parent / target).resolve() for target in targets if "://" not in target]
    assert set((project_root / "docs").rglob("*.md")) <= seen


def test_no_path_of_a_particular_machine(project_root: Path) -> None:
    """Nothing that is checked in names somebody's home or working folder."""
    found = [
        f"{path.relative_to(project_root)}:{number}: {line.strip()}"
        for path in _sources(project_root)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_yaml_in_the_pages_is_yaml(project_root: Path) -> None:
    """Every fenced block marked `yaml` parses."""
    blocks = 0
    for page in _pages(project_root):
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            assert yaml.safe_load(block), page
            blocks += 1
    assert blocks >= 1


def test_images_of_the_pages_are_fresh(project_root: Path, tmp_path: Path) -> None:
    """The pictures are what their script draws."""
    script = project_root / "tools" / "draw_page_rows.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True, timeout=60)
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn
    for image in drawn:
        assert image.read_bytes() == (project_root / "docs" / "images" / image.name).read_bytes()
