"""``/v1/embeddings``: forwarded; the local model writes text and makes none."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from gateway.api.access import require_key
from gateway.api.body import read_object
from gateway.api.context import AppState
from gateway.api.errors import ApiError
from gateway.api.generation import ClientGone
from gateway.api.serving import CLIENT_CLOSED, forward, is_forwarded

router = APIRouter(dependencies=[Depends(require_key)])


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """The upstream's embeddings."""
    state = AppState.of(request)
    raw, body = await read_object(request, state.settings.limits)
    if not is_forwarded(state, body.get("model")):
        raise ApiError(
            400,
            f"the local model {state.engine.model_id!r} writes text and makes no embeddings; name a model of the "
            "server at [server].api_base (GET /v1/models lists them)",
            code="unsupported_model",
            param="model",
        )
    try:
        return await forward(request, "/embeddings", raw)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)
