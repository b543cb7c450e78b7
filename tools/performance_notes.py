"""Why aims are missed where they are: a few sentences each, shown on the pages only while the reports say "missed"."""

from __future__ import annotations

NOTES: dict[str, str] = {
    # "BENCHMARK: AIM" as in the report → Markdown. The keys, besides those of reports that word their aims themselves:
    # "scheduler: LINE / PARTY", "scheduler: LINE / whole step", "scheduler: LINE / encode + decode",
    # "scaling: LINE", "generate: CASE / PARTY/PEER".
    "scheduler: admit cold 1k / tokenspeed_0.1.0": (
        "An admission is many calls of 0.1 to 0.5 µs each, not one slow part. Of 55 µs: checking and queueing the request"
        " 11 (its prompt 3.6, a copy of its tokens 2.4, parameters, limits and the queue 3); the plan 44, of which the"
        " snapshots that let a plan that fails leave nothing behind 7, the match 2.3, row, pages, entries and locks 12.6,"
        " and the columns of the op 9.7."
    ),
    "scheduler: admit cold 1k / tokenspeed_0.1.42": (
        "Its admission takes 70 to 80 µs on machines of this kind; a quarter of that would be 20 µs, of which checking"
        " and queueing the request alone takes half here, as it does there."
    ),
    "scheduler: admit cached 1k / tokenspeed_0.1.42": (
        "The parts are those of a cold admission, but for the match: 9.6 µs, since 1,008 tokens are compared and a node"
        " is split (the last page of a prompt is never matched)."
    ),
    "wire: round trip of a step, no-op model / bare echo": (
        "Of the difference about a third is the runtime's work on the op where it was read: comparing it with the one"
        " that was expected, its pages, the model, the answer, 33 µs in a loop and two to three times that after a"
        " wake-up, when caches are cold. A fifth is reading the result and waking whoever waits for it. The rest is"
        " larger frames and a second layer of messages in each direction. The no-op model's steps run where the op was"
        " read; a real model's go to the execution thread, which is two hops more, hidden behind the model."
    ),
    "streaming: 256 streams behind a front end: CPU µs of the scheduler per token": (
        "What a step costs the scheduler's process (planning, the link to the runtime, one message to each front end,"
        " callbacks of gRPC) hardly depends on how many tokens it has, so the figure is that cost divided by the tokens"
        " of a step; it falls with more streams."
    ),
    "streaming: 256 streams, Generate, 20 ms a step: p99 of a step / without clients": (
        "Generate is one gRPC message a token in the scheduler's own event loop: 256 of them between two steps. That is"
        " what Session and front ends are for."
    ),
    "scheduler: 256 x 1k / encode + decode": (
        "At the line: an earlier quiet run had 9.4 µs. The machine has phases of different speed, and an absolute aim is"
        " met in one and missed in another."
    ),
    "mirror: 256 decode rows: write alone, µs": (
        "15 to 20 µs of a cold write are torch: wrapping the memory of numpy arrays, and the checks of the kernel's"
        " arguments. Other runs had 22 to 25 µs; the machine has phases of different speed."
    ),
    "mirror: 256 decode rows: decode + every check + write, µs": (
        "Other runs had 54 to 62 µs. A decode step that the runtime foresaw, which most are while serving, does not come"
        " this way: only its pages are checked, and 25 µs pass from its bytes to its result in a loop."
    ),
    "mirror: full refresh of 256 rows × 128 pages: per_row / mirror": "Between 9.6 and 13 in several runs.",
}
