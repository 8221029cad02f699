"""Tenant namespaces of the prefix cache: derived here from the credential; a request can only narrow its own."""

from __future__ import annotations

import hashlib
from typing import Literal

_BYTES = 16


class Namespaces:
    """Which prefixes a request may share.

    Args:
        mode: ``shared``: all clients share; ``per_key``: only clients that present the same key.
    """

    def __init__(self, mode: Literal["shared", "per_key"]) -> None:
        self._per_key = mode == "per_key"

    def of(self, credential: bytes, cache_salt: str | None) -> str:
        """The namespace, stable over restarts; empty = the common one. No key can be read from it."""
        tenant = hashlib.blake2b(credential, person=b"kvgate-tenant").digest() if self._per_key else b""
        if not tenant and not cache_salt:
            return ""
        salt = (cache_salt or "").encode()
        return hashlib.blake2b(salt, key=tenant, digest_size=_BYTES, person=b"kvgate-salt").hexdigest()
