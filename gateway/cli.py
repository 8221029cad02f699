"""The ``kvgate`` command. Heavy imports happen inside the commands, so that help and config errors are instant."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from gateway import cli_cache
from gateway.config import ConfigError, load_settings

app = typer.Typer(
    name="kvgate",
    help="An OpenAI-compatible gateway that computes a prompt prefix once and never again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_BAD_CONFIG = 2

app.add_typer(cli_cache.app)


@app.callback(invoke_without_command=True)
def _root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        typer.echo(f"kvgate {version('kvgate')}")
        raise typer.Exit


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file; without it the defaults apply.")] = None,
    host: Annotated[str | None, typer.Option(help="Overrides [server].host.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides [server].port; 0 takes a free one.")] = None,
    model: Annotated[str | None, typer.Option(help="Overrides [model].name.")] = None,
    log_level: Annotated[str | None, typer.Option(help="Overrides [logging].level.")] = None,
) -> None:
    """Serve the local model, and forward requests for others."""
    overrides = {"server.host": host, "server.port": port, "model.name": model, "logging.level": log_level}
    try:
        settings = load_settings(config, overrides)
    except ConfigError as error:
        _fail(str(error), _BAD_CONFIG)
    from gateway.serve import StartError, run

    try:
        run(settings)
    except StartError as error:
        _fail(str(error), _BAD_CONFIG)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    settings: Annotated[Path, typer.Option(help="The client's settings.")] = Path("settings.json"),
    model: Annotated[str | None, typer.Option(help="Overrides default_model.")] = None,
    stream: Annotated[bool | None, typer.Option("--stream/--no-stream", help="Overrides request.stream.")] = None,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Put the shared prefix in front.")] = True,
) -> None:
    """Ask a running server, with the shared prefix in front; prints hit tokens, TTFT and memory."""
    from gateway.client import ClientError, run_ask

    try:
        run_ask(question, settings, model=model, stream=stream, use_prefix=prefix)
    except ClientError as error:
        _fail(str(error), error.exit_code)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="JSONL request trace, one request a line.")],
    policy: Annotated[list[str] | None, typer.Option(help="Repeat for several; without it, all.")] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(help="% of the distinct blocks, or device/host/disk such as 1/4/20; 500b is 500 blocks. Repeat."),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hits over capacity (needs the extra: plot).")] = None,
) -> None:
    """Run eviction policies over a request trace: hits, saved work, distance to Belady's bound."""
    from gateway import replay as tool

    rows: list[tool.Row] = []
    try:
        policies = tool.check_policies(policy or [])
        requests = tool.load(trace)
        typer.echo(f"{tool.summary(requests)}\n{tool.HEADER}")
        for row in tool.run(requests, policies, capacity or ["1", "2", "5", "10", "20", "50"]):
            typer.echo(tool.line(row))
            rows.append(row)
        if csv is not None:
            tool.write_csv(rows, csv)
        if plot is not None:
            tool.write_plot(rows, plot)
    except tool.ReplayError as error:
        _fail(str(error), _BAD_CONFIG)


def _fail(message: str, code: int) -> None:
    typer.echo(f"kvgate: {message}", err=True)
    raise typer.Exit(code)


def main() -> None:
    app()
