"""``kvgate cache ...``: the store folder of a config, looked at and cared for while no server runs on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gateway.config import ConfigError, Settings, load_settings

if TYPE_CHECKING:
    from gateway.engine.loader import LoadedModel
    from kvstore.maintenance import Fault, StoreFolder

app = typer.Typer(name="cache", help="Look at, verify, repair and move the store on disk.", no_args_is_help=True)

_FAILED, _BAD_USE = 1, 2

Config = Annotated[Path | None, typer.Option(help="The server's TOML file; without it the defaults apply.")]


@app.command()
def identity(config: Config = None) -> None:
    """Parts of the identity of the configured model, and how they differ from what the store holds."""
    from gateway.engine.build import identity_of
    from kvstore.identity import differing_parts

    settings = _settings(config)
    ours = identity_of(_model(settings), settings)
    typer.echo(f"identity {ours.digest.hex()}")
    for name, value in ours.parts.items():
        typer.echo(f"  {name:13} {value}")
    if not _has_store(settings):
        typer.echo(f"no store in {_folder(settings)} yet")
        return
    with _opened(settings) as store:
        known, counts = store.identities(), store.stats().identities
    for digest, parts in known.items():
        chunks = counts.get(digest.hex(), 0)
        if digest == ours.digest:
            typer.echo(f"store: {chunks} chunks of this identity")
        else:
            names = ", ".join(differing_parts(ours.parts, parts)) if parts else "unknown parts"
            typer.echo(f"store: {chunks} chunks of {digest.hex()[:16]}…, which differs in: {names}")


@app.command()
def stats(config: Config = None) -> None:
    """Chunks, tokens, bytes, identities and pins in the store."""
    with _opened(_settings(config)) as store:
        found = store.stats()
    ratio = found.file_bytes / found.stored_bytes if found.stored_bytes else 0
    typer.echo(f"chunks {found.chunks}, tokens {found.tokens}, pinned prefixes {found.pinned_prefixes}")
    typer.echo(f"stored {_mib(found.stored_bytes)}, file {_mib(found.file_bytes)} ({ratio:.2f} × stored)")
    for digest, chunks in found.identities.items():
        typer.echo(f"  identity {digest[:16]}…: {chunks} chunks")


@app.command()
def verify(config: Config = None) -> None:
    """Check every stored chunk; exit 1 when one is bad."""
    with _opened(_settings(config)) as store:
        total, faults = _verify(store)
    for fault in faults:
        typer.echo(f"bad chunk {fault.key}: {fault.detail}")
    typer.echo(f"{total} chunks, {len(faults)} bad" + ("; `kvgate cache repair` drops them" if faults else ""))
    if faults:
        raise typer.Exit(_FAILED)


@app.command()
def repair(config: Config = None) -> None:
    """Drop what doesn't verify, and what hangs from it; the rest stays. Requests store it anew."""
    with _opened(_settings(config)) as store:
        total, faults = _verify(store)
        dropped = store.drop([bytes.fromhex(fault.key) for fault in faults]) if faults else 0
    typer.echo(f"{total} chunks, {len(faults)} bad, {dropped} dropped")


@app.command()
def clear(
    config: Config = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Delete all stored chunks."""
    settings = _settings(config)
    with _opened(settings) as store:
        found = store.stats()
        if not yes:
            typer.confirm(
                f"Delete {found.chunks} chunks ({_mib(found.stored_bytes)}) in {_folder(settings)}?", abort=True
            )
        store.clear()
    typer.echo(f"deleted {found.chunks} chunks")


@app.command("export")
def export_(
    file: Annotated[Path, typer.Argument(help="Where to write.")],
    config: Config = None,
    body: Annotated[Path | None, typer.Option(help="A JSON chat body: export only its prefix.")] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of that prefix, when it isn't the common one.")] = "",
) -> None:
    """Write the model's chunks, or one prefix's, into a file for another machine."""
    from gateway.engine.build import identity_of

    settings = _settings(config)
    loaded = _model(settings)
    ours = identity_of(loaded, settings)
    keys = None if body is None else _prompt_keys(settings, loaded, ours.digest, namespace, _body(body))
    fresh = file.with_name(f"{file.name}.part")
    with _opened(settings) as store:
        try:
            with fresh.open("wb") as out:
                tokens = list(store.export(out, ours.digest, keys))
            fresh.replace(file)
        except OSError as error:
            _fail(f"{file} can't be written ({error.strerror}); choose another place", _FAILED)
        finally:
            fresh.unlink(missing_ok=True)
    typer.echo(f"{len(tokens)} chunks, {sum(tokens)} tokens, {_mib(file.stat().st_size)} in {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What `kvgate cache export` wrote.")],
    config: Config = None,
) -> None:
    """Take in an export; refused unless the store has served the very same model."""
    from kvstore.maintenance import ExportError

    settings = _settings(config)
    try:
        size = file.stat().st_size
        with _opened(settings, room=2 * size) as store, file.open("rb") as source:
            tokens = list(store.load(source, int(settings.prefix_cache.disk_cache_gb * 2**30)))
    except OSError as error:
        _fail(f"{file} can't be read ({error.strerror}); check the path", _BAD_USE)
    except ExportError as error:
        _fail(f"{file}: {error}", _FAILED)
    typer.echo(f"{len(tokens)} chunks, {sum(tokens)} tokens taken in")


@app.command()
def explain(
    body: Annotated[Path, typer.Argument(help="A JSON chat body, as you send it; - reads it from standard input.")],
    api_base: Annotated[str, typer.Option(help="The running server.")] = "http://127.0.0.1:8000/v1",
    api_key_env: Annotated[str, typer.Option(help="Variable that holds the key.")] = "TAOTOKEN_API_KEY",
) -> None:
    """Ask a running server how far a prompt hits, and why no further."""
    import os

    import httpx

    url = f"{api_base.rstrip('/').removesuffix('/v1')}/v1/cache/explain"
    key = os.environ.get(api_key_env, "").strip()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.post(url, json=_body(body), headers=headers, timeout=60)
    except (httpx.HTTPError, ValueError) as error:
        _fail(f"can't ask {url} ({error}); start the server, or fix --api-base", _FAILED)
    if response.status_code != 200:
        _fail(f"{response.status_code}: {_message(response.text)}", _FAILED)
    typer.echo(json.dumps(response.json(), indent=2, ensure_ascii=False))


def _model(settings: Settings) -> LoadedModel:
    from gateway.engine.build import load_configured
    from gateway.engine.sources import ModelError

    try:
        return load_configured(settings)
    except (ModelError, ConfigError) as error:
        _fail(str(error), _BAD_USE)


def _prompt_keys(
    settings: Settings, loaded: LoadedModel, identity: bytes, namespace: str, body: dict[str, Any]
) -> set[bytes]:
    from gateway.prompt.encode import PromptEncoder
    from gateway.prompt.template import PromptError
    from gateway.protocol.errors import InvalidRequest
    from gateway.protocol.requests import ChatRequest
    from kvstore.keys import prompt_keys

    try:
        request = ChatRequest.parse({"add_generation_prompt": False, **body})
        ids = PromptEncoder(loaded.tokenizer, settings.prefix_cache.normalise).encode_chat(request)
    except (InvalidRequest, PromptError) as error:
        _fail(f"the body can't be used: {error}", _BAD_USE)
    return prompt_keys(identity, namespace, ids, settings.prefix_cache.chunk_size)


def _verify(store: StoreFolder) -> tuple[int, list[Fault]]:
    total = len(store.keys())
    faults: list[Fault] = []
    hidden = not sys.stderr.isatty()
    with typer.progressbar(store.verify(), length=total, label="verifying", file=sys.stderr, hidden=hidden) as bar:
        faults.extend(item for item in bar if item is not None)
    return total, faults


def _settings(config: Path | None) -> Settings:
    try:
        return load_settings(config, {})
    except ConfigError as error:
        _fail(str(error), _BAD_USE)


def _folder(settings: Settings) -> Path:
    return Path(settings.prefix_cache.disk_cache_dir).expanduser()


def _has_store(settings: Settings) -> bool:
    return (_folder(settings) / "data.mdb").exists()


@contextmanager
def _opened(settings: Settings, room: int = 0) -> Iterator[StoreFolder]:
    from kvstore import DiskUnavailable, StoreInUse
    from kvstore.maintenance import StoreFolder

    try:
        store = StoreFolder(_folder(settings), room)
    except (StoreInUse, DiskUnavailable) as error:
        _fail(str(error), _FAILED)
    with store:
        yield store


def _body(file: Path) -> dict[str, Any]:
    try:
        body = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        _fail(f"{file}: not a JSON body ({error}); give what you POST to /v1/chat/completions", _BAD_USE)
    if not isinstance(body, dict):
        _fail(f"{file}: not a JSON object; give what you POST to /v1/chat/completions", _BAD_USE)
    return body


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"kvgate: {message}", err=True)
    raise typer.Exit(code)
