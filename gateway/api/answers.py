"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from gateway.api.access import require_key
from gateway.api.prepare import prepare_chat, prepare_completion
from gateway.api.serving import Door, complete

router = APIRouter(dependencies=[Depends(require_key)])


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await complete(request, Door("/chat/completions", prepare_chat))


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await complete(request, Door("/completions", prepare_completion))
