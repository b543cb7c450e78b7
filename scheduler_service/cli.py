"""The command line `pagemirror`. Each command imports what it needs when it runs, so that help is there at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from scheduler_service import cli_events, cli_frontend, cli_serve, cli_up
from scheduler_service.cli_options import (
    DEFAULT_TARGET,
    AnyPolicy,
    AsJson,
    ClientInsecure,
    ClientTlsCa,
    ClientTlsCert,
    ClientTlsKey,
    ClientTlsName,
    ClientTokens,
    PrefixCache,
    Target,
    examples,
    need_runtime,
    security_options,
)

app = typer.Typer(
    name="pagemirror",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "LLM serving in two processes: a scheduler that owns KV pages, and a runtime that mirrors them and runs the model.\n\n"
        "\b\n"
        "  pagemirror up --model fingerprint --port 50051\n"
        "  pagemirror generate --target 127.0.0.1:50051 --tokens 1,2,3 --max-tokens 6"
    ),
)

app.command(
    epilog=examples(
        "pagemirror up --model fingerprint --port 50051",
        "pagemirror up --model models/smollm2-135m-instruct --http 8080",
        "pagemirror up --model tiny --num-pages 64 --refresh-policy diff --check",
        "pagemirror up --model tiny --host 0.0.0.0 --tls-cert llm.pem --tls-key llm.key --token-file tokens",
    )
)(cli_up.up)
app.command(
    epilog=examples(
        "pagemirror scheduler --runtime unix:/run/pagemirror/runtime.sock --metrics-port 9090",
        "pagemirror scheduler --listen 0.0.0.0:50051 --tls-cert llm.pem --tls-key llm.key --token-file tokens \\",
        "    --runtime gpu-host:50061 --runtime-tls-ca ca.pem --runtime-tls-cert llm.pem --runtime-tls-key llm.key",
    )
)(cli_serve.scheduler)
app.command(
    epilog=examples(
        "pagemirror frontend --scheduler unix:/run/pagemirror/scheduler.sock --listen 127.0.0.1:50051 --workers 4",
        "pagemirror frontend --scheduler 10.0.0.7:50051 --scheduler-tls-ca ca.pem --scheduler-token-file token \\",
        "    --listen 0.0.0.0:443 --tls-cert llm.pem --tls-key llm.key --token-file tokens --workers 4",
    )
)(cli_frontend.frontend)
app.command(epilog=examples("pagemirror events", "pagemirror events --target 127.0.0.1:50051 --json"))(cli_events.events)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    short_help="Run the model behind the mirror (python -m runtime_service).",
)(cli_serve.runtime)


@app.command(
    epilog=examples(
        "pagemirror generate --tokens 1,2,3 --max-tokens 6",
        'pagemirror generate --prompt "The capital of France is" --max-tokens 20',
        'pagemirror generate --chat --prompt "Write a haiku." --temperature 0.8 --seed 7 --max-tokens 60',
        'pagemirror generate --prompt "The capital of France is" --logprobs 3 --json',
        "pagemirror generate --target llm.example:50051 --tls-ca ca.pem --token-file token --tokens 1,2,3",
    )
)
def generate(
    context: typer.Context,
    tokens: Annotated[str | None, typer.Option(help="The prompt as token ids: 1,2,3. Prints token ids.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt as text. Prints text.")] = None,
    target: Target = DEFAULT_TARGET,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with tokenizer.json, where the server's is on another machine.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to return at most.  [default: 16]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.  [default: 0]")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the smallest set with this probability.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens below this share of the best one's probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divide logits of tokens that occurred by this, multiply negative ones.")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Take this from logits of tokens in the output.")] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Take this from a token's logit for each time it is in the output.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID:BIAS", help="Add BIAS to the logit of token ID; may be repeated.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Show each token's log probability, and the N most probable tokens', on stderr.")
    ] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="Do not sample stop ids before so many tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Token ids that end the output; may be repeated.")] = None,
    ignore_default_stop: Annotated[
        bool, typer.Option("--ignore-default-stop", help="Go on past the model's own stop ids.")
    ] = False,
    priority: Annotated[int, typer.Option(help="A smaller number goes first.")] = 0,
    request_id: Annotated[str, typer.Option(help="Name of the request.  [default: drawn by the server]")] = "",
    prefix_cache: PrefixCache = None,
    namespace: Annotated[str, typer.Option(help="Share cached pages only within this namespace.")] = "",
    max_queue_wait_ms: Annotated[int | None, typer.Option(help="Give up when not admitted within this time.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say on stderr how the request ended.")] = False,
    tls_ca: ClientTlsCa = None,
    tls_cert: ClientTlsCert = None,
    tls_key: ClientTlsKey = None,
    tls_name: ClientTlsName = "",
    token_file: ClientTokens = None,
    insecure: ClientInsecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per token, and one for the end.")] = False,
) -> None:
    """Stream tokens or text from a running scheduler."""
    if (tokens is None) == (prompt is None):
        raise typer.BadParameter("give one of --tokens and --prompt")
    if prompt is None and (chat or tokenizer is not None):
        raise typer.BadParameter("--chat and --tokenizer go with --prompt")
    token_ids = None if tokens is None else _token_ids("--tokens", tokens)
    stop_ids = [token for entry in stop or [] for token in _token_ids("--stop", entry)]
    from scheduler_service import cli_client

    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": _logit_bias(logit_bias or []),
        "num_logprobs": logprobs,
        "min_new_tokens": min_new_tokens,
        "stop_token_ids": stop_ids,
        "ignore_default_stop_ids": ignore_default_stop,
        "priority": priority,
        "request_id": request_id,
        "prefix_cache": prefix_cache,
        "cache_namespace": namespace,
        "max_queue_wait_ms": max_queue_wait_ms,
    }
    raise typer.Exit(
        cli_client.generate(
            target,
            tokens=token_ids,
            prompt=prompt,
            chat=chat,
            tokenizer=tokenizer,
            show_stats=stats,
            as_json=as_json,
            options=options,
            security=security_options(context),
        )
    )


@app.command(
    epilog=examples(
        "pagemirror rows --target 127.0.0.1:50051",
        "pagemirror rows --json",
        "pagemirror rows --target llm.example:50051 --tls-ca ca.pem --token-file token",
    )
)
def rows(
    context: typer.Context,
    target: Target = DEFAULT_TARGET,
    tls_ca: ClientTlsCa = None,
    tls_cert: ClientTlsCert = None,
    tls_key: ClientTlsKey = None,
    tls_name: ClientTlsName = "",
    token_file: ClientTokens = None,
    insecure: ClientInsecure = False,
    as_json: AsJson = False,
) -> None:
    """Show every page row in use: the scheduler's beside the mirror's. Exit status 1 if any two differ."""
    from scheduler_service import cli_client

    raise typer.Exit(cli_client.show_rows(target, security=security_options(context), as_json=as_json))


@app.command(
    epilog=examples(
        "pagemirror simulate examples/worked_example.yaml",
        "pagemirror simulate --json --refresh-policy tail_only examples/worked_example.yaml",
    )
)
def simulate(
    files: Annotated[list[str], typer.Argument(help="Scenario files.", metavar="FILE...")],
    refresh_policy: Annotated[AnyPolicy | None, typer.Option(help="In place of the files' own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run scenario files step by step: core, mirror and exact test model in one process.

    Exit status 1 if an invariant was violated, 2 for a bad file.
    """
    need_runtime("simulate")
    from scheduler_service import simulate as simulator

    raise typer.Exit(simulator.main(files, refresh_policy.value if refresh_policy else None, as_json))


@app.command(
    epilog=examples(
        "pagemirror demo",
        "pagemirror demo --model models/smollm2-135m-instruct",
    )
)
def demo(
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory for the part with real text.")] = None,
) -> None:
    """See a stale page table happen and not happen, then real text under page pressure."""
    need_runtime("demo")
    from scheduler_service import demo as demonstration

    raise typer.Exit(demonstration.main(model))


@app.command(
    epilog=examples(
        "pagemirror doctor",
        "pagemirror doctor --model models/smollm2-135m-instruct",
        "pagemirror doctor --target llm.example:50051 --tls-ca ca.pem --token-file token",
    )
)
def doctor(
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="Also ask the scheduler that listens there.")] = None,
    model: Annotated[Path | None, typer.Option(help="Also look at this Hugging Face directory.")] = None,
    tls_ca: ClientTlsCa = None,
    tls_cert: ClientTlsCert = None,
    tls_key: ClientTlsKey = None,
    tls_name: ClientTlsName = "",
    token_file: ClientTokens = None,
    insecure: ClientInsecure = False,
    as_json: AsJson = False,
) -> None:
    """Say of each thing that is needed whether it is ok, or what to do. Useful in bug reports.

    Versions, GPU and driver, what Triton needs to compile, the gateway, ports; a model's files with --model, a scheduler that
    is to let us in with --target. Exit status 1 if anything is to be fixed; what is merely not there is a note.
    """
    from scheduler_service import cli_doctor

    raise typer.Exit(cli_doctor.doctor(target, model=model, security=security_options(context), as_json=as_json))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as version_of

    typer.echo(f"pagemirror {version_of('pagemirror')}")


def main() -> None:
    """Entry point of the command `pagemirror`."""
    # gRPC otherwise writes lines of its own about connections that ended, which is what connections do.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        app()
    except BrokenPipeError:
        # The reader has gone, as in `pagemirror generate … | head`; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _token_ids(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"{option} takes whole numbers separated by commas, not {text!r}") from None


def _logit_bias(entries: list[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for entry in entries:
        token, _, bias = entry.partition(":")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias takes ID:BIAS, as in 42:-5, not {entry!r}") from None
        if token_id in found:
            raise typer.BadParameter(f"--logit-bias names token {token_id} twice")
        found[token_id] = value
    return found


if __name__ == "__main__":
    main()
