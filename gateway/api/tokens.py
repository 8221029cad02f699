"""``/tokenize`` and ``/detokenize``: what the local model's tokenizer makes of a prompt. Also under ``/v1``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request

from gateway.api.access import require_key
from gateway.api.context import AppState
from gateway.api.errors import ApiError
from gateway.api.prepare import check_vocabulary
from gateway.api.serving import in_prompt_thread, read_request
from gateway.protocol.errors import validated
from gateway.protocol.limits import check_limits
from gateway.protocol.requests import ChatRequest
from gateway.protocol.tokenise import ChatTokenizeOptions, DetokenizeRequest, TokenizeRequest

router = APIRouter(dependencies=[Depends(require_key)])


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Token ids of a text, or of a chat as the model would get it."""
    state = AppState.of(request)
    body = await read_request(request)
    require_local(state, body.get("model"))
    return await in_prompt_thread(state, lambda: _tokenize(state, body))


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of token ids."""
    state = AppState.of(request)
    body = await read_request(request)
    require_local(state, body.get("model"))
    asked = validated(DetokenizeRequest, body)
    check_vocabulary(state, asked.tokens, "tokens")
    return {"prompt": await in_prompt_thread(state, lambda: state.encoder.decode(asked.tokens))}


def require_local(state: AppState, model: Any) -> None:
    """Raises ApiError (404) for a model that isn't the local one."""
    if model is not None and not (isinstance(model, str) and state.is_local(model)):
        raise ApiError(
            404,
            f"only {state.engine.model_id!r} runs here; leave model out, or ask the server that has the model",
            code="model_not_found",
            param="model",
        )


def _tokenize(state: AppState, body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("messages") is not None:
        check_limits(body, state.settings.limits)
        spelled = validated(ChatTokenizeOptions, body).return_token_strs
        ids = state.encoder.encode_chat(ChatRequest.parse(body))
    else:
        asked = validated(TokenizeRequest, body)
        spelled = asked.return_token_strs
        encode = state.encoder.encode_completion if asked.add_special_tokens else state.encoder.encode_bare
        ids = encode(asked.prompt or "")
    return {
        "count": len(ids),
        "max_model_len": state.engine.max_model_len,
        "tokens": ids,
        "token_strs": state.encoder.token_texts(ids) if spelled else None,
    }
