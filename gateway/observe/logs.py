"""Logging: one line a finished request, and no secrets in any."""

from __future__ import annotations

import logging
from collections import OrderedDict
from threading import Lock

from gateway.config import Settings
from gateway.engine.types import RequestReport

log = logging.getLogger(__name__)

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

#: Libraries that log each outgoing request, with its URL.
_CHATTY = ("httpx", "httpcore", "urllib3", "filelock", "asyncio")

#: Client ids kept for running requests; the oldest go when requests end without a report.
_MAX_NAMES = 4096


class ScrubbingFormatter(logging.Formatter):
    """Blots secrets out of messages and tracebacks alike."""

    def __init__(self, fmt: str, secrets: list[str]) -> None:
        super().__init__(fmt)
        self._secrets = [secret for secret in secrets if secret]

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line


def setup_logging(settings: Settings) -> None:
    """Log to standard error, at the configured level. Replaces handlers that are there."""
    handler = logging.StreamHandler()
    handler.setFormatter(ScrubbingFormatter(_FORMAT, [settings.server.api_key]))
    logging.basicConfig(level=settings.logging.level.upper(), handlers=[handler], force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


class RequestLog:
    """The line of each finished request, under the id its client knows. Thread-safe."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._names: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def name(self, request_id: str, client_id: str) -> None:
        """Say which id the client was given for an engine request."""
        with self._lock:
            self._names[request_id] = client_id
            while len(self._names) > _MAX_NAMES:
                self._names.popitem(last=False)

    def finished(self, report: RequestReport) -> None:
        with self._lock:
            shown = self._names.pop(report.request_id, report.request_id)
        if not self._enabled:
            return
        cache = report.cache
        log.info(
            "prefix_hit=%s cached=%d/%d tiers=gpu:%d,cpu:%d,disk:%d ttft_ms=%s tokens=%d finish=%s request_id=%s",
            str(cache.cached_tokens > 0).lower(),
            cache.cached_tokens,
            cache.prompt_tokens,
            cache.gpu,
            cache.cpu,
            cache.disk,
            "none" if report.ttft_s is None else f"{report.ttft_s * 1e3:.1f}",
            report.completion_tokens,
            report.finish_reason.value,
            shown,
        )
