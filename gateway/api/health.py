"""``/health``, ``/ready`` and ``/metrics``."""

from __future__ import annotations

from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response

from gateway.api.access import require_key_from_afar
from gateway.api.context import AppState
from gateway.api.errors import ApiError

router = APIRouter()

_READ = ["GET", "HEAD"]


@router.api_route("/health", methods=_READ)
async def health(request: Request) -> dict[str, object]:
    """The process lives; ``degraded`` and why when a part of it doesn't work."""
    reasons = AppState.of(request).engine.degraded()
    return {"status": "degraded" if reasons else "ok", "reasons": reasons}


@router.api_route("/ready", methods=_READ)
async def ready(request: Request) -> dict[str, object]:
    state = AppState.of(request)
    if state.drain.begun or not state.engine.ready:
        raise ApiError(503, "the engine is starting or stopping; ask again in a second", code="not_ready")
    return {"status": "ready"}


@router.api_route("/metrics", methods=_READ, dependencies=[Depends(require_key_from_afar)])
async def metrics(request: Request) -> Response:
    """Open to this machine; others need the key."""
    body, content_type = await to_thread.run_sync(AppState.of(request).metrics.render)
    return Response(body, headers={"content-type": content_type})
