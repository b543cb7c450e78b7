"""The Python of docs/embedding.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_examples_of_the_page_run(project_root: Path) -> None:
    """All blocks, one after the other, in a process of their own."""
    blocks = re.findall(r"^```python\n(.*?)^```", (project_root / "docs/embedding.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
