"""Is the presented key the unified key?"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers


class KeyCheck:
    """Compares what a client presents with ``[server].api_key``, in constant time.

    Args:
        api_key: the unified key; empty = none is needed (then the server listens on loopback only).
    """

    def __init__(self, api_key: str) -> None:
        self._digest = _digest(api_key.encode()) if api_key else b""

    def credential(self, headers: Headers) -> bytes | None:
        """The key that opened the door (empty when none is needed and none came); None = refused."""
        presented = _presented(headers)
        if not self._digest:
            return presented[0] if presented else b""
        # Each one presented is compared, so that the answer's time tells nothing of which was right.
        right = [key for key in presented if hmac.compare_digest(_digest(key), self._digest)]
        return right[0] if right else None


def _presented(headers: Headers) -> list[bytes]:
    """The keys in ``Authorization: Bearer`` (scheme in any case) and ``x-api-key``; never from the URL."""
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    found = [credential] if scheme.lower() == "bearer" else []
    found.append(headers.get("x-api-key", ""))
    return [key.strip().encode("latin-1") for key in found if key.strip()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
