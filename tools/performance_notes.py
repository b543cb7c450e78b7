"""Why aims are missed where they are: a few sentences each, shown on the pages only while the reports say "missed"."""

from __future__ import annotations

NOTES: dict[str, str] = {
    # "BENCHMARK: AIM" as in the report → Markdown. The keys, besides those of reports that word their aims themselves:
    # "scheduler: LINE / PARTY", "scheduler: LINE / whole step", "scheduler: LINE / encode + decode",
    # "scaling: LINE", "generate: CASE / PARTY/PEER".
}
