"""Starting the process: engine, app and uvicorn."""

from __future__ import annotations

import logging
import signal
import socket

import uvicorn

from gateway.api.context import AppState
from gateway.app import create_app
from gateway.config import ConfigError, Settings
from gateway.draining import DrainingServer
from gateway.engine.build import build_engine
from gateway.engine.sources import ModelError
from gateway.observe.logs import setup_logging
from gateway.observe.metrics import Metrics
from kvstore import StoreInUse

log = logging.getLogger(__name__)

#: Time for answers that were ended to be written out, after [server].shutdown_seconds are over.
_LAST_WORDS_S = 3


class StartError(Exception):
    """The server can't start; one sentence with the remedy."""


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StartError: the address is taken, or the model or the cache can't be opened.
    """
    setup_logging(settings)
    listener = _listen(settings.server.host, settings.server.port)
    metrics = Metrics(settings)
    try:
        engine = build_engine(settings, metrics)
    except (ConfigError, ModelError) as error:
        raise StartError(str(error)) from error
    except StoreInUse as error:
        raise StartError(f"[prefix_cache] disk_cache_dir: {error}") from error
    app = create_app(settings, engine, metrics)
    _greet(listener, engine.model_id, bool(settings.server.api_key))
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=_LAST_WORDS_S, server_header=False
    )
    # uvicorn raises the signal again once it has shut down: a stop that was asked for and went well is exit 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    DrainingServer(config, AppState.of_app(app).drain).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded: a taken port is said at once."""
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"[server] can't listen on {host}:{port} ({error.strerror or error}); stop what uses it, or choose another "
            "port with --port"
        ) from error
    return listener


def _greet(listener: socket.socket, model: str, keyed: bool) -> None:
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    key = ' -H "authorization: Bearer $TAOTOKEN_API_KEY"' if keyed else ""
    print(
        f"kvgate serves {model} at http://{host}:{port}/v1. Try it:\n"
        f"  curl -s http://{host}:{port}/v1/chat/completions{key} -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello."}}]}}\'',
        flush=True,
    )
