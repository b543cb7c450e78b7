"""Tokens per second on a CPU: pagemirror through its two processes, beside transformers on the same weights.

    python benchmarks/bench_generate.py [--json] [--quick] [--output build/bench-generate.json]

The model is a Llama with seeded random weights (`_workload.py`), small enough that what an engine adds to the mathematics
shows. Two workloads, with 16 and with 64 requests that all arrive at once:

    equal   prompts of 128 tokens, 64 new ones: a static batch wastes nothing
    mixed   prompts of 32 to 128 tokens, 8 to 64 new ones: only tokens that were asked for count

Parties:

    generate    pagemirror: `pagemirror up`, one Generate stream a request, one client process
    execute     pagemirror's runtime alone: the scheduler's core drives one Execute stream, without clients
    static      transformers `generate` on one padded batch
    continuous  transformers' continuous batching (paged KV)

Each party runs in processes of its own while no other party is alive, in an order that turns with every round; figures are
medians over all timed runs, of which a round has three (of continuous batching one). All have two threads and
OMP_WAIT_POLICY=PASSIVE: idle OpenMP threads otherwise spin, and on few cores that slows down whoever else has work. Outputs,
all greedy, are compared: nobody is fast by computing something else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from _report import machine, progress
from _workload import EQUAL_NEW, EQUAL_PROMPT, LENGTHS, MIXED_NEW, MIXED_PROMPT, MODEL, THREADS, Case, make_model

HERE = Path(__file__).resolve().parent
OURS = ("generate", "execute")
PEERS = ("static", "continuous")
PARTIES = (*OURS, *PEERS)
MAIN_CASE = "equal-64"
LIMIT_S = 900
# case, ours, peer, factor
AIMS = (
    ("equal-64", "generate", "static", 0.85),
    ("mixed-64", "generate", "static", 1.3),
    ("equal-64", "execute", "static", 0.95),
    ("equal-64", "generate", "continuous", 3.0),
)

Sample = dict[str, Any]


def child(script: str, *arguments: str) -> list[Sample]:
    """Run a script of this folder to its end; the JSON lines it printed. Raises CalledProcessError."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(THREADS)
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, [script, *arguments], done.stdout, done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(model: Path, cases: list[Case], parties: list[str], rounds: int) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Samples by "party case", and parties that failed with the last line they wrote."""
    samples: dict[str, list[Sample]] = {}
    failed: dict[str, str] = {}
    for number in range(rounds):
        turn = number % len(parties)
        for party in parties[turn:] + parties[:turn]:
            if party in failed:
                continue
            begin = time.monotonic()
            try:
                found = child("_parties.py", party, str(model), *(case.name for case in cases))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
                failed[party] = lines[-1] if lines else str(error)
                progress(f"round {number + 1} of {rounds}: {party} failed: {failed[party]}")
                continue
            rates: dict[str, list[float]] = {}
            for sample in found:
                sample["tokens_per_second"] = sum(map(len, sample["outputs"])) / sample["seconds"]
                samples.setdefault(f"{party} {sample['case']}", []).append(sample)
                rates.setdefault(sample["case"], []).append(sample["tokens_per_second"])
            said = ", ".join(f"{case} {median(values):,.0f}" for case, values in rates.items())
            progress(f"round {number + 1} of {rounds}: {party:<10} {said} tokens/s ({time.monotonic() - begin:.0f} s)")
    return samples, failed


def summarize(case: Case, parties: list[str], samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """One case: a row per party, and ratios of ours to the peers'."""
    jobs = case.jobs()
    reference = samples.get(f"static {case.name}") or next(iter(samples.values()))
    rows: dict[str, Any] = {}
    for party in parties:
        taken = samples.get(f"{party} {case.name}")
        if not taken:
            continue
        lengths = [len(output) for output in taken[-1]["outputs"]]
        if lengths != [job.num_new for job in jobs]:
            raise SystemExit(f"{party} returned {lengths} tokens in {case.name}: not what was asked for")
        pairs = zip(taken[-1]["outputs"], reference[-1]["outputs"], strict=True)
        rates = [sample["tokens_per_second"] for sample in taken]
        rows[party] = {
            "tokens_per_second": round(median(rates), 1),
            "samples": [round(rate, 1) for rate in rates],
            "cpu_seconds": {name: round(median(s["cpu_seconds"][name] for s in taken), 3) for name in taken[0]["cpu_seconds"]},
            "cpu_us_per_token": round(median(sum(s["cpu_seconds"].values()) for s in taken) / sum(lengths) * 1e6, 1),
            "same_output_as_static": sum(ours == theirs for ours, theirs in pairs) / len(jobs),
        }
    peers = {party: rows[party]["tokens_per_second"] for party in PEERS if party in rows}
    summary = {
        "lengths": case.lengths,
        "num_requests": case.num_requests,
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "useful_tokens": sum(job.num_new for job in jobs),
        "parties": rows,
        "ratios": {
            f"{party}/{peer}": round(rows[party]["tokens_per_second"] / rate, 3)
            for party in OURS
            if party in rows
            for peer, rate in peers.items()
        },
    }
    if "generate" in rows and peers:
        summary["ratio_vs_best_peer"] = round(rows["generate"]["tokens_per_second"] / max(peers.values()), 3)
    return summary


def aims(cases: dict[str, Any]) -> list[dict[str, Any]]:
    """The ratios that are aimed at, and whether they were reached."""
    found = []
    for case, ours, peer, aim in AIMS:
        value = cases.get(case, {}).get("ratios", {}).get(f"{ours}/{peer}")
        if value is not None:
            found.append({"case": case, "ratio": f"{ours}/{peer}", "aim": aim, "value": value, "reached": value >= aim})
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object."""
    names = [f"{lengths}-{number}" for lengths in LENGTHS for number in options.requests]
    cases = [Case.parse(name) for name in names]
    report: dict[str, Any] = {
        "benchmark": "generate",
        "quick": options.quick,
        "rounds": options.rounds,
        "threads": THREADS,
        "machine": machine("torch", "transformers", "grpcio", "numpy", "pagemirror"),
        "model": {"architecture": "LlamaForCausalLM", "dtype": "float32", **MODEL},
        "workload": {
            "equal": {"prompt": EQUAL_PROMPT, "new": EQUAL_NEW},
            "mixed": {"prompt": MIXED_PROMPT, "new": MIXED_NEW},
        },
    }
    with tempfile.TemporaryDirectory(prefix="pagemirror-bench-") as folder:
        model = Path(folder)
        subprocess.run([sys.executable, __file__, "--make-model", folder], check=True, capture_output=True)
        samples, failed = measure(model, cases, options.parties, options.rounds)
        report["failed"] = failed
        report["cases"] = {case.name: summarize(case, options.parties, samples) for case in cases}
        if "generate" in options.parties and not options.no_stages:
            progress("stages of a step")
            report["stages"] = child("_stages.py", str(model), f"equal-{max(options.requests)}")[0]
    report["aims"] = aims(report["cases"])
    main_case = report["cases"].get(MAIN_CASE) or next(iter(report["cases"].values()))
    report["ratio_vs_best_peer"] = main_case.get("ratio_vs_best_peer")
    return report


def print_report(report: dict[str, Any]) -> None:
    """The figures for a reader."""
    for name, case in report["cases"].items():
        print(f"{name}: {case['useful_tokens']:,} tokens asked for, after {case['prompt_tokens']:,} of prompts")
        for party, row in case["parties"].items():
            ratio = case["ratios"].get(f"{party}/static")
            beside = f"  {ratio:.2f} x static" if ratio is not None else ""
            cpu = f"{row['cpu_us_per_token']:>6,.0f} CPU µs a token"
            print(f"    {party:<10} {row['tokens_per_second']:>8,.0f} tokens/s, {cpu}{beside}")
    for party, why in report["failed"].items():
        print(f"{party} did not run: {why}")
    for aim in report["aims"]:
        reached = "" if aim["reached"] else ", NOT REACHED"
        print(f"{aim['case']} {aim['ratio']}: {aim['value']:.2f}, aimed at {aim['aim']}{reached}")
    print(f"ratio_vs_best_peer: {report['ratio_vs_best_peer']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON on stdout")
    parser.add_argument("--output", type=Path, help="write the JSON report to this file, too")
    parser.add_argument("--quick", action="store_true", help="one round of 64 requests, without continuous batching")
    parser.add_argument("--rounds", type=int, help="rounds, 1 or more  [default: 3, with --quick 1]")
    parser.add_argument("--requests", type=int, nargs="+", help="requests at once  [default: 16 64]")
    parser.add_argument("--parties", nargs="+", choices=PARTIES, help="only these  [default: all]")
    parser.add_argument("--no-stages", action="store_true", help="leave out the stages of a step")
    parser.add_argument("--make-model", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make_model:  # in a process of its own, so that this one never loads torch
        make_model(Path(options.make_model))
        return 0
    if options.rounds is None:
        options.rounds = 1 if options.quick else 3
    options.requests = options.requests or ([64] if options.quick else [16, 64])
    options.parties = options.parties or [party for party in PARTIES if not (options.quick and party == "continuous")]
    if options.rounds < 1 or min(options.requests) < 1:
        parser.error("--rounds and --requests take numbers from 1")
    report = run(options)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
