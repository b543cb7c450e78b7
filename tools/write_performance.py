"""Write docs/performance.md and the pages in docs/performance/ from the benchmarks' JSON reports, or check that they are fresh.

    python tools/write_performance.py build/bench-generate.json build/bench-scheduler.json

A report says itself which benchmark it is of; those that are not given stay as they are. Reports are kept beside the pages:
every figure can be traced, and `--check` needs nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import generate_page
import mirror_page
import performance_page
import scheduler_page
import streaming_page
import wire_page
from page_parts import Report

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "performance"
BENCHMARKS = ("scheduler", "scaling", "wire", "streaming", "mirror", "generate")
REPORTS = {name: FOLDER / f"{name}.json" for name in BENCHMARKS}
"""Where the report of each benchmark is kept."""


def pages() -> dict[Path, str]:
    """Every page as the kept reports give it."""
    kept: dict[str, Report] = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in REPORTS.items()}
    return {
        DOCS / "performance.md": performance_page.render(kept),
        FOLDER / "scheduler.md": scheduler_page.render(kept["scheduler"], kept["scaling"]),
        FOLDER / "wire.md": wire_page.render(kept["wire"]),
        FOLDER / "streaming.md": streaming_page.render(kept["streaming"]),
        FOLDER / "mirror.md": mirror_page.render(kept["mirror"]),
        FOLDER / "generate.md": generate_page.render(kept["generate"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the pages about performance from the benchmarks' reports.")
    parser.add_argument("reports", type=Path, nargs="*", help="JSON of benchmarks  [default: those kept in docs/]")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a page is not what the kept JSON gives"
    )
    options = parser.parse_args()
    if options.check:
        stale = [page for page, text in pages().items() if not page.exists() or page.read_text(encoding="utf-8") != text]
        for page in stale:
            print(f"{page.name} is not what its JSON gives: run tools/write_performance.py", file=sys.stderr)
        return 1 if stale else 0
    for file in options.reports:
        report: Report = json.loads(file.read_text(encoding="utf-8"))
        if report["benchmark"] not in REPORTS:
            parser.error(f"{file} is of the benchmark {report['benchmark']!r}, which no page is about")
        if report["quick"]:
            print(f"note: {file.name} is of a quick run", file=sys.stderr)
        REPORTS[report["benchmark"]].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
