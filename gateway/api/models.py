"""``/v1/models``: the local model, then the upstream's."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from gateway.api.access import require_key
from gateway.api.context import AppState
from gateway.api.errors import model_not_found

router = APIRouter(dependencies=[Depends(require_key)])

_READ = ["GET", "HEAD"]


@router.api_route("/v1/models", methods=_READ)
async def list_models(request: Request) -> dict[str, Any]:
    state = AppState.of(request)
    remote = [model for model in await _remote(state) if not state.is_local(model["id"])]
    return {"object": "list", "data": [_local(state), *remote]}


@router.api_route("/v1/models/{model:path}", methods=_READ)
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    state = AppState.of(request)
    if state.is_local(model):
        return {**_local(state), "id": model}
    for found in await _remote(state):
        if found["id"] == model:
            return found
    raise model_not_found(model)


async def _remote(state: AppState) -> list[dict[str, Any]]:
    return await state.upstream.models() if state.upstream is not None else []


def _local(state: AppState) -> dict[str, Any]:
    engine = state.engine
    return {
        "id": engine.model_id,
        "object": "model",
        "created": engine.created,
        "owned_by": "kvgate",
        "max_model_len": engine.max_model_len,
    }
