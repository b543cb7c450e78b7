"""docs/performance/generate.md, and the section of docs/performance.md that leads to it, from the report of
benchmarks/bench_generate.py.
"""

from __future__ import annotations

from page_parts import Aim, Report, aims_table, heading, machine_line, notes, prose, table

PARTIES = {
    "generate": "pagemirror, `Generate` streams",
    "execute": "pagemirror, runtime alone on `Execute`",
    "static": "transformers `generate`, static batch",
    "continuous": "transformers, continuous batching",
}
PROCESSES = {"party": "client", "scheduler": "scheduler", "runtime": "runtime"}


def method(report: Report) -> list[str]:
    """What was measured, and on what."""
    model, workload = report["model"], report["workload"]
    rounds = f"{report['rounds']} round{'s' if report['rounds'] > 1 else ''}"
    return [
        "## How it was measured",
        "",
        *prose(
            f"""A Llama with seeded random weights (hidden {model["hidden_size"]} × {model["num_hidden_layers"]} layers,
            {model["num_attention_heads"]} heads, {model["num_key_value_heads"]} KV heads, intermediate
            {model["intermediate_size"]}, vocabulary {model["vocab_size"]:,}, {model["dtype"]}) is written as a Hugging Face
            directory that every party loads. It is small on purpose: what an engine adds to the mathematics is a large part of
            its time. All requests arrive at once. *Equal*: prompts of {workload["equal"]["prompt"]} tokens,
            {workload["equal"]["new"]} new ones. *Mixed*: prompts of {_range(workload["mixed"]["prompt"])} tokens,
            {_range(workload["mixed"]["new"])} new ones; a static batch pads them to the longest and runs until the last one
            ends, and only tokens that were asked for count. Decoding is greedy; the outputs of all parties are compared."""
        ),
        *prose(
            f"""Each party runs in processes of its own while no other is alive, in {rounds} whose order turns; figures are
            medians of the timed runs, of which a round has three (of continuous batching one), after an untimed one. Everyone
            has {report["threads"]} threads and `OMP_WAIT_POLICY=PASSIVE`. Loading a model is not counted. The `Generate`
            figures of pagemirror include its scheduler process and one client process with a stream for each request, on the
            same cores as the model."""
        ),
        *prose(machine_line(report)),
    ]


def _range(pair: list[int]) -> str:
    return f"{pair[0]} to {pair[1]}"


def _present(report: Report) -> list[str]:
    return [party for party in PARTIES if any(party in case["parties"] for case in report["cases"].values())]


def rates(report: Report) -> list[str]:
    """Tokens per second of all parties in all cases."""
    cases = report["cases"].values()
    rows = []
    for party in _present(report):
        cells = []
        for case in cases:
            row, ratio = case["parties"].get(party), case["ratios"].get(f"{party}/static")
            beside = f" ({ratio:.2f}×)" if ratio is not None else ""
            cells.append(f"{row['tokens_per_second']:,.0f}{beside}" if row else "–")
        rows.append([PARTIES[party], *cells])
    return [*table(("", *map(_title, cases)), rows), "In brackets: the ratio to the static batch.", ""]


def throughput(report: Report) -> list[str]:
    """Tokens per second, CPU time per token, and who did not run."""
    cases = report["cases"].values()
    costs = []
    for party in _present(report):
        rows = [case["parties"].get(party) for case in cases]
        costs.append([PARTIES[party], *(f"{row['cpu_us_per_token']:,.0f}" if row else "–" for row in rows)])
    lines = ["## Tokens per second", "", *rates(report)]
    for party, why in report["failed"].items():
        lines += prose(f"{PARTIES[party]} did not run: {why}")
    lines += [
        *prose(
            """CPU microseconds per token, over all processes of a party, say less about speed and more about work: they change
            little when the machine has other things to do."""
        ),
        *table(("", *map(_title, cases)), costs),
        *aims_table(aims(report)),
        *notes(aims(report)),
        _agreement(report),
        "",
    ]
    if "continuous" in _present(report):
        lines += prose(
            """Continuous batching of transformers runs with pages of 256 tokens and as many of them as there are requests, the
            fastest of the settings tried: on a CPU it attends to its whole cache at once."""
        )
    return lines


def aims(report: Report) -> list[Aim]:
    """What was aimed at."""
    found = []
    for aim in report["aims"]:
        ours, peer = aim["ratio"].split("/")
        what = f"{_title(report['cases'][aim['case']])}: tokens/s of {PARTIES[ours]} / {PARTIES[peer]}"
        key = f"generate: {aim['case']} / {aim['ratio']}"
        found.append(Aim(key, what, f"≥ {aim['aim']:g}", f"{aim['value']:.2f}", aim["reached"]))
    return found


def _title(case: Report) -> str:
    return f"{case['num_requests']} {case['lengths']}"


def _agreement(report: Report) -> str:
    shares = [row["same_output_as_static"] for case in report["cases"].values() for row in case["parties"].values()]
    if min(shares) == 1:
        return "All parties returned the same tokens for every request."
    return f"Requests with the same tokens as from the static batch: at least {min(shares):.1%} in every case."


def stages(report: Report) -> list[str]:
    """Where a step's time goes."""
    found = report.get("stages")
    if not found:
        return []
    decode, prefill = found["decode_step_us"], found["prefill_us"]
    total, prefill_total = sum(decode.values()), sum(prefill.values())
    by_part: dict[str, float] = {}
    for stage, value in decode.items():
        part = stage.partition(":")[0]
        by_part[part] = by_part.get(part, 0.0) + value
    model = by_part.get("model", 0.0)
    rows = found["case"].partition("-")[2]
    lines = [
        "## Where the time goes",
        "",
        *prose(
            f"""One decode step of {rows} rows, all parts in one process with a stopwatch around each (`benchmarks/_stages.py`;
            the time of a stage excludes the stages inside it):"""
        ),
        f"| stage | µs a decode step | share | ms in {found['num_prefill_steps']} prefill steps |",
        "|---|---:|---:|---:|",
    ]
    for stage, value in sorted(decode.items(), key=lambda item: -item[1]):
        lines.append(f"| {stage} | {value:,.0f} | {value / total:.1%} | {prefill[stage] / 1000:,.1f} |")
    lines += [
        f"| **together** | **{total:,.0f}** | | **{prefill_total / 1000:,.0f}** |",
        "",
        *prose(
            f"""The model is {model / total:.0%} of a decode step. The scheduler plans and completes it in
            {by_part.get("scheduler", 0.0):,.0f} µs; the wire, both directions and both sides, takes
            {by_part.get("wire", 0.0):,.0f} µs; keeping the mirror, checking the op, building the batch and formatting the
            result take {by_part.get("runtime", 0.0):,.0f} µs. With `overlap_depth` 1 the scheduler plans the next step while
            the model computes this one."""
        ),
    ]
    return lines


def processes(report: Report) -> list[str]:
    """CPU time by process of the served runs."""
    served = {name: case["parties"]["generate"] for name, case in report["cases"].items() if "generate" in case["parties"]}
    if not all(len(row["cpu_seconds"]) == len(PROCESSES) for row in served.values()):
        return []
    lines = [
        *prose(
            """What is served in two processes adds streams to that: one gRPC message for each token and request, in the
            scheduler and in the client. CPU seconds of the processes during the timed round:"""
        ),
        "| | " + " | ".join(PROCESSES.values()) + " | µs of scheduler and client per token | static batch |",
        "|---|" + "---:|" * (len(PROCESSES) + 2),
    ]
    for name, row in served.items():
        case, cpu = report["cases"][name], row["cpu_seconds"]
        streams = (cpu["party"] + cpu["scheduler"]) / case["useful_tokens"] * 1e6
        static = case["parties"].get("static", {}).get("cpu_seconds", {}).get("party")
        cells = [f"{cpu[process]:.2f}" for process in PROCESSES]
        lines.append(
            f"| {_title(case)} | " + " | ".join(cells) + f" | {streams:.0f} | {'–' if static is None else f'{static:.2f}'} |"
        )
    lines += [
        "",
        *prose(
            """On few cores the streams take time from the model's threads: where `Generate` is slower than `Execute` in the
            table of tokens per second, this is why. With more cores, or with the model on a GPU, they run beside it."""
        ),
    ]
    return lines


def render(report: Report) -> str:
    """The whole page."""
    lines = [
        *heading("Performance of serving", "generate"),
        *prose(
            """`benchmarks/bench_generate.py` measured this; `make bench` repeats it. The rest is on
            [the page about performance](../performance.md)."""
        ),
        *throughput(report),
        *method(report),
        *stages(report),
        *processes(report),
    ]
    return "\n".join(lines).rstrip() + "\n"


def section(report: Report) -> list[str]:
    """What docs/performance.md says of it."""
    return [
        "## Serving a small model",
        "",
        *prose(
            """Tokens per second of a small Llama with random weights, all requests at once, beside transformers on the same
            weights and cores."""
        ),
        *rates(report),
        *prose(
            """[Performance of serving](performance/generate.md) says how, where a step's time goes, and what the streams
            cost."""
        ),
    ]
