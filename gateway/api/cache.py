"""``/v1/cache``: what is cached for the caller, why a prompt misses, and pinning, warming, forgetting by hand.

Every route works in the caller's own namespace, derived from the credential; a ``cache_salt`` can only narrow it.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.api.access import require_key
from gateway.api.context import AppState
from gateway.api.errors import ApiError
from gateway.api.prepare import prepare_completion
from gateway.api.serving import read_request
from gateway.engine.types import GenerationRequest, SamplingParams, Started
from gateway.prompt.divergence import likely_cause, locate
from gateway.protocol.requests import ChatRequest
from kvstore.steering import PinLimitExceeded
from kvstore.store import Explanation, PrefixStore, PrefixSummary

router = APIRouter(prefix="/v1/cache", dependencies=[Depends(require_key)])

_PREVIEW_TOKENS = 24


class _Steering(BaseModel):
    """Fields of their own beside those of the chat or completion body."""

    model_config = ConfigDict(extra="ignore", strict=True)
    ttl_seconds: Annotated[float, Field(gt=0, le=366 * 86_400)] | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt that a cache route is about."""

    ids: list[int]
    namespace: str
    chat: ChatRequest | None
    ttl: float | None


@router.get("")
async def overview(request: Request, cache_salt: str | None = None) -> dict[str, Any]:
    """What is cached in the caller's namespace, most recently used first."""
    state = AppState.of(request)
    store = _store(state)
    namespace = state.namespaces.of(request.state.credential, cache_salt)
    found = await to_thread.run_sync(store.overview, namespace)
    decode = state.encoder.decode
    return {
        "object": "list",
        "data": [_shown(summary, decode(summary.first_tokens[:_PREVIEW_TOKENS])) for summary in found],
    }


@router.post("/explain")
async def explain(request: Request) -> dict[str, Any]:
    """How far a chat or completion body would hit, where it parts from what is cached, and why."""
    state = AppState.of(request)
    prefix = await _prefix(request, generation_prompt=True)
    return await to_thread.run_sync(_explain, state, prefix)


@router.post("/warm")
async def warm(request: Request) -> dict[str, Any]:
    """Compute a prefix and keep it, without an answer; with ``ttl_seconds`` pin it too."""
    state = AppState.of(request)
    store = _store(state)
    prefix = await _prefix(request)
    if len(prefix.ids) >= state.engine.max_model_len:
        raise ApiError(
            400,
            f"this model's maximum context length is {state.engine.max_model_len} tokens, but the prefix has "
            f"{len(prefix.ids)}; shorten it",
            code="context_length_exceeded",
        )
    started = time.perf_counter()
    cached = 0
    asked = GenerationRequest(
        f"warm-{secrets.token_hex(12)}", prefix.ids, SamplingParams(max_tokens=1, temperature=0), prefix.namespace
    )
    async with aclosing(state.engine.generate(asked)) as events:
        async for event in events:
            if isinstance(event, Started):
                cached = event.cache.cached_tokens
    pinned = _pin(store, prefix) if prefix.ttl is not None else 0
    return {
        "object": "cache.warm",
        "prompt_tokens": len(prefix.ids),
        "cached_tokens": cached,
        "computed_tokens": len(prefix.ids) - cached,
        "pinned_tokens": pinned,
        "milliseconds": round((time.perf_counter() - started) * 1e3, 1),
    }


@router.post("/pin")
async def pin(request: Request) -> dict[str, Any]:
    """Keep the cached part of a prefix from eviction, for ``ttl_seconds`` or until it is unpinned."""
    store = _store(AppState.of(request))
    prefix = await _prefix(request)
    tokens = await to_thread.run_sync(_pin, store, prefix)
    if not tokens:
        raise ApiError(
            404, "nothing of this prefix is cached; POST /v1/cache/warm computes it first", code="not_cached"
        )
    return {"object": "cache.pin", "prompt_tokens": len(prefix.ids), "pinned_tokens": tokens, "ttl_seconds": prefix.ttl}


@router.post("/unpin")
async def unpin(request: Request) -> dict[str, Any]:
    """End the pin of this very prefix."""
    store = _store(AppState.of(request))
    prefix = await _prefix(request)
    tokens = await to_thread.run_sync(store.unpin, prefix.ids, prefix.namespace)
    return {"object": "cache.unpin", "unpinned_tokens": tokens}


@router.post("/forget")
async def forget(request: Request) -> dict[str, Any]:
    """Drop the end of a prefix and all that goes on from it, unless in use or pinned."""
    store = _store(AppState.of(request))
    prefix = await _prefix(request)
    tokens = await to_thread.run_sync(store.forget, prefix.ids, prefix.namespace)
    return {"object": "cache.forget", "forgotten_tokens": tokens}


def _store(state: AppState) -> PrefixStore:
    store = state.engine.cache
    if store is None:
        raise ApiError(404, "the prefix cache is off; set [prefix_cache].enable = true", code="cache_disabled")
    return store


async def _prefix(request: Request, *, generation_prompt: bool = False) -> Prefix:
    """Read a chat body (``messages``) or a completion body (``prompt``) for the local model."""
    state = AppState.of(request)
    body = await read_request(request)
    model = body.get("model")
    if model is not None and not (isinstance(model, str) and state.is_local(model)):
        raise ApiError(404, f"only {state.engine.model_id!r} has a cache here; leave model out", code="model_not_found")
    return await to_thread.run_sync(_read_prefix, request, state, body, generation_prompt, limiter=state.prompt_threads)


def _read_prefix(request: Request, state: AppState, body: Mapping[str, Any], generation_prompt: bool) -> Prefix:
    try:
        ttl = _Steering.model_validate(dict(body)).ttl_seconds
    except ValidationError:
        raise ApiError(400, "ttl_seconds must be a number of seconds above 0", param="ttl_seconds") from None
    chat: ChatRequest | None = None
    if "messages" in body:
        chat = ChatRequest.parse({"add_generation_prompt": generation_prompt, **body})
        ids, salt = state.encoder.encode_chat(chat), chat.cache_salt
    else:
        prepared = prepare_completion(state, body)
        if len(prepared.prompts) != 1:
            raise ApiError(400, "send one prompt at a time", param="prompt")
        ids, salt = prepared.prompts[0], prepared.asked.cache_salt
    return Prefix(ids, state.namespaces.of(request.state.credential, salt), chat, ttl)


def _pin(store: PrefixStore, prefix: Prefix) -> int:
    try:
        return store.pin(prefix.ids, prefix.namespace, ttl=prefix.ttl)
    except PinLimitExceeded as error:
        raise ApiError(409, str(error), code="pin_limit_exceeded") from None


def _explain(state: AppState, prefix: Prefix) -> dict[str, Any]:
    store = _store(state)
    found = store.explain(prefix.ids, prefix.namespace)
    cached = min(found.match.n_tokens, len(prefix.ids) - 1)
    place, cause, advice = _reason(state, prefix, found)
    lost = len(prefix.ids) - 1 - cached
    seconds = store.planner.compute_seconds(cached, len(prefix.ids) - 1)
    return {
        "object": "cache.explanation",
        "prompt_tokens": len(prefix.ids),
        "cached_tokens": cached,
        "tiers": {tier.value: tokens for tier, tokens in found.match.tiers.items()},
        "first_divergence": place,
        "likely_cause": cause,
        "advice": advice,
        "lost_tokens": lost,
        "expected_lost_milliseconds": None if seconds is None else round(seconds * 1e3, 1),
    }


def _reason(state: AppState, prefix: Prefix, found: Explanation) -> tuple[dict[str, Any] | None, str, str]:
    at = found.match.n_tokens
    if at >= len(prefix.ids) - 1:
        return None, "complete", "all of the prompt is cached; its last token is always computed"
    if found.departed is not None:
        gone = found.departed
        age = max(0.0, time.time() - gone.at)
        return None, "evicted", (
            f"the next chunk was cached and left the {gone.tier} tier {age:.0f} s ago ({gone.reason}); give the tier "
            "more room, or pin the prefix"
        )  # fmt: skip
    if found.continuation is None:
        if at:
            return None, "new_text", "what is cached ends here; the rest is new and will be cached by this request"
        return None, "nothing_cached", (
            "no prompt that begins like this is cached for this key and cache_salt; other keys' prompts are never "
            "visible, and a change of model, dtype, tokenizer or chunk_size starts anew (kvgate cache identity)"
        )  # fmt: skip
    place = locate(state.encoder, prefix.ids, at, found.continuation, prefix.chat)
    tools = [str(tool.get("function", {}).get("name", "")) for tool in (prefix.chat.tools or [])] if prefix.chat else []
    cause, advice = likely_cause(place, [name for name in tools if name])
    return asdict(place), cause, advice


def _shown(summary: PrefixSummary, preview: str) -> dict[str, Any]:
    pinned = summary.pinned_until
    return {
        "object": "cache.prefix",
        "preview": preview,
        "chunks": summary.chunks,
        "tokens": summary.tokens,
        "tiers": {tier.value: tokens for tier, tokens in summary.tiers.items()},
        "accesses": summary.accesses,
        "last_access": summary.last_access,
        "pinned": pinned is not None,
        "pinned_until": None if pinned is None or math.isinf(pinned) else pinned,
    }
