"""The key check in front of the endpoints, before a body is read."""

from __future__ import annotations

import ipaddress

from fastapi import Request

from gateway.api.context import AppState
from gateway.api.errors import ApiError

#: Set by reverse proxies, behind which every client seems to be this machine.
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")


async def require_key(request: Request) -> None:
    """Dependency: lets the request through with the right key, and remembers it as ``state.credential``.

    Raises:
        ApiError: 401.
    """
    credential = AppState.of(request).keys.credential(request.headers)
    if credential is None:
        raise ApiError(
            401,
            "missing or wrong API key; send the server's [server].api_key as 'Authorization: Bearer <key>' or "
            "'x-api-key: <key>' (a key in the URL is never read)",
            code="invalid_api_key",
            headers={"www-authenticate": 'Bearer realm="kvgate"'},
        )
    request.state.credential = credential


async def require_key_from_afar(request: Request) -> None:
    """Dependency: as ``require_key``, but this machine needs no key.

    Raises:
        ApiError: 401.
    """
    if not _is_this_machine(request):
        await require_key(request)


def _is_this_machine(request: Request) -> bool:
    if any(header in request.headers for header in _PROXY_HEADERS):
        return False
    if request.client is None:  # a Unix socket
        return True
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
